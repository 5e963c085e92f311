"""The room on one page: who is ready, predictions against measurements, whose machine, which exercises.

    python -m labs.classroom /shared/room                          # writes build/room/index.html
    python -m labs.classroom /shared/room --anonymous --watch 10   # letters for names, drawn again every 10 s
    python -m labs.classroom /shared/room --reveal 03.1 03.3       # show_solution() works for these from now on

Reads what learners keep with COURSE_ROOM=/shared/room; nothing is sent anywhere.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.record import write_atomic
from labs.kit.room import REVEALED, matches, revealed_patterns

PROG = "python -m labs.classroom"


@dataclass(frozen=True)
class Config:
    """Which room, and what to do with it."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The shared folder that learners have as COURSE_ROOM."""
    out: Path = Path("build/room")
    """Folder of the page."""
    watch: float = 0.0
    """Read the room and draw the page again every so many seconds, until Ctrl-C; the page reloads itself."""
    anonymous: bool = False
    """Letters in place of names, for a page that is projected."""
    reveal: tuple[str, ...] = ()
    """Exercises whose solutions learners may see from now on, for example 03.1 "04.*" or all; draws no page."""
    hide: tuple[str, ...] = ()
    """Exercises whose solutions they may not see any more; draws no page."""

    def __post_init__(self) -> None:
        require(self.folder.is_dir(), f"{self.folder} is not a folder: name the one that learners have as COURSE_ROOM")
        require(self.watch == 0 or 1 <= self.watch <= 3600, f"watch must be 1 to 3600 seconds, not {self.watch:g}")
        room, out = self.folder.resolve(), self.out.resolve()
        require(room != out and room not in out.parents, f"{self.out} is inside of the room: choose another with --out")


def change_revealed(folder: Path, reveal: tuple[str, ...], hide: tuple[str, ...]) -> list[str]:
    """Write the room's list of revealed solutions and return it. BadInput for ids that do not exist."""
    from labs.kit.check import exercise_ids

    ids = exercise_ids()
    for pattern in (*reveal, *hide):
        known = any(matches(i, [pattern]) for i in ids)
        require(known, f'there is no exercise {pattern!r}; there are {", ".join(ids)}, "03.*" and all')
    try:
        before = revealed_patterns(folder)
    except ValueError as e:
        raise BadInput(f"{folder / REVEALED} is damaged ({e}): remove it and reveal again") from None
    chosen = [i for i in ids if matches(i, (*before, *reveal)) and not matches(i, hide)]
    write_atomic(folder / REVEALED, json.dumps({"revealed": chosen}) + "\n")
    return chosen


def draw(config: Config, seats) -> Path:  # type: ignore[no-untyped-def]
    """Read the room, write the page, name on stderr what could not be read."""
    from labs.classroom.room.collect import read_room
    from labs.classroom.room.page import anonymous, render

    room = read_room(config.folder)
    for name, text in room.problems:
        print(f"{PROG}: {name + ': ' if name else ''}{text}", file=sys.stderr)
    shown = anonymous(room, seats) if config.anonymous else room
    page = render(shown, hide_names=config.anonymous, refresh_s=config.watch)
    return write_atomic(config.out / "index.html", page)


def watch(config: Config) -> None:
    """Draw the page, and again whenever a file of the room has changed. A share that is lost for a while is named."""
    from labs.classroom.room.collect import signature
    from labs.classroom.room.page import Seats

    seats, seen = Seats(), None
    while True:
        try:
            now = signature(config.folder)
            if now != seen:
                print(f"{time.strftime('%H:%M:%S')}  {draw(config, seats)}", flush=True)
                seen = now
        except (OSError, BadInput) as e:
            if not config.watch:
                raise
            print(f"{PROG}: {e}; tried again in {config.watch:g} s", file=sys.stderr)
        if not config.watch:
            return
        time.sleep(config.watch)


def main() -> int:
    """Run the command line; returns the exit code."""
    config = cli.parse_config(Config, __doc__, PROG)
    try:
        if config.reveal or config.hide:
            chosen = change_revealed(config.folder, config.reveal, config.hide)
            print(f"revealed: {', '.join(chosen) or 'nothing'}")
        else:
            watch(config)
    except BadInput as e:
        cli.fail(PROG, str(e))
    except OSError as e:
        cli.fail(PROG, f"{e.filename or config.out}: {e.strerror}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
