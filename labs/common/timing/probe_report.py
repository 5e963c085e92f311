"""The output of `python -m labs.hardware_probe`: this machine's checks and measured speed limits, as text or JSON.

With --preflight, labs.classroom.room_preflight takes over. It measures nothing, but also checks everything else that
the first minutes of a course need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit import cli
from labs.kit.errors import BadInput
from labs.kit.failure import RankFailed
from labs.kit.lab import for_smoke, lab_module
from labs.kit.measure import estimate
from labs.kit.preflight import Check, Facts, as_text, exit_code, gather, machine_checks, rank_checks
from labs.kit.record import Records


def as_json(found: list[Check], facts: Facts, records: Records) -> str:
    """Return the same as JSON, with the inventory and the measured speed limits."""
    speeds = [{"metric": r.metric, "unit": r.unit, "value": r.value, "kind": r.kind, **r.case} for r in records]
    return json.dumps(
        {
            "ready": exit_code(found) == 0,
            "checks": [dataclasses.asdict(c) for c in found],
            "inventory": facts.inventory,
            "speed_limits": speeds,
        },
        indent=2,
    )


def preflight(lab: str, parameters: dict[str, Any], options: cli.Launch, require_gpus: int = 0) -> tuple:
    """Gather the facts, run the probe on its ranks, and judge both: (checks, facts, records).

    Failing ranks become a failed check instead of an exception. BadInput passes through.
    """
    facts = gather(require_gpus)
    found = machine_checks(facts)
    try:
        records, seconds = _measure(lab, parameters, options)
        found += rank_checks(records, seconds, facts)
    except (RankFailed, OSError) as e:
        records = Records()
        print(e, file=sys.stderr)
        remedy = "the cause is in the lines on standard error; one rank alone: --nproc 1"
        found.append(Check("ranks", "fail", str(e).strip().splitlines()[-1], remedy))
    return found, facts, records


def _enough_or_shared(options: cli.Launch) -> cli.Launch:
    """Let the default two ranks share the core of a small machine; the core check warns about it."""
    from labs.kit.hardware import place

    try:
        place(options.nproc, options.device, options.oversubscribe)
    except BadInput:
        if options.nproc != cli.Launch().nproc:
            raise
        options = dataclasses.replace(options, oversubscribe=True)
        place(options.nproc, options.device, True)
    return options


def _measure(lab: str, parameters: dict[str, Any], options: cli.Launch) -> tuple[Records, float]:
    from labs.kit.display import View
    from labs.kit.launch import launch

    run = launch(
        lab,
        options.nproc,
        timeout_s=options.timeout_s,
        device=options.device,
        oversubscribe=options.oversubscribe,
        view=View(),
        **parameters,
    )
    return run, run.seconds


def main(lab: str, description: str | None, config_type: type, answer: Callable[[Records], Iterable[str]]) -> None:
    """Run the command line: the lab's options, plus --json and --require-gpus. Exits.

    Prints `answer`'s sentences first, then the checks, then every speed limit.
    """

    @dataclass(frozen=True)
    class Options(config_type):
        """The lab's options, and those of the preflight."""

        json: bool = False
        """Print one JSON object (checks, inventory, speed limits) instead of text."""
        require_gpus: int = 0
        """Fail unless torch can use at least this many GPUs."""
        preflight: bool = False
        """Print GO or NO-GO for the course in a few seconds, and a report; measures no speed."""
        report: Path | None = None
        """Where --preflight writes its report."""

    prog = f"python -m labs.{lab}"
    command = cli.parse(types.SimpleNamespace(Config=Options, __doc__=description), prog)
    command.config = for_smoke(lab_module(lab), command.config)
    if command.config.report is not None:
        cli.fail(prog, "--report belongs to --preflight: add it, or keep the records with --out")
    if command.config.require_gpus < 0:
        cli.fail(prog, f"require_gpus must be at least 0, not {command.config.require_gpus}")
    parameters = {f.name: getattr(command.config, f.name) for f in dataclasses.fields(config_type)}
    try:
        launch = _enough_or_shared(command.launch)
        cli.prepare()
        # Output of ranks (such as a gloo warning on a host without a name) must not get into the JSON.
        with contextlib.redirect_stdout(sys.stderr) if command.config.json else contextlib.nullcontext():
            found, facts, records = preflight(lab, parameters, launch, command.config.require_gpus)
    except BadInput as e:
        cli.fail(prog, str(e))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    with cli.closed_pipe_is_no_error():
        if command.config.json:
            print(as_json(found, facts, records))
        else:
            for sentence in answer(records):
                print(textwrap.fill(sentence, 100, subsequent_indent="  "))
            print(as_text(found), speed_text(records), sep="\n\n")
    raise SystemExit(max(exit_code(found), _save(records, command.output.out)))


def speed_text(records: Records) -> str:
    """Format the measured speed limits, one line each, at the best size."""
    best: dict[tuple[str, ...], Any] = {}
    for r in records:
        if r.unit in ("FLOP/s", "B/s"):
            key = (
                r.metric,
                *(
                    str(v).rpartition(":")[2]
                    for k, v in r.case.items()
                    if k not in ("side", "bytes", "batch_size", "ranks")
                ),
            )
            best[key] = max(r, best.get(key, r), key=lambda r: r.value)
    lines = [f"      {' '.join(key):<34} {estimate(r.samples, r.unit)}  {r.kind}" for key, r in best.items()]
    return "\n".join(["Speed limits, median of the best size [95 % interval]", *lines]) if lines else ""


def _save(records: Records, out: Path | None) -> int:
    if out is None or not len(records):
        return 0
    try:
        print(f"saved to {records.save(out)}", file=sys.stderr)
    except OSError as e:
        print(f"could not save to {out}: {e.strerror}", file=sys.stderr)
        return 1
    return 0
