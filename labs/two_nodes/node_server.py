"""One machine's torchruns. Started by labs.two_nodes.machines in that machine's network, never by hand.

    python -m labs.two_nodes.node_server ROOT NAME

Loads torch once. Then each line of its standard input, JSON, is a torchrun to start: torchrun's own options, the
function that its ranks run, environment, log file. Agents and ranks are forked from here, so that they begin at once,
and are ended with what they came from: a killed torchrun takes its ranks with it, as a machine does.
"""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import os
import select
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from labs.kit import supervise

POLL_S = 0.02


def main() -> None:
    """Serve requests until standard input ends; tell the end of each agent by a file beside its log."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    supervise.hold(name)

    import labs.two_nodes.ranks  # noqa: F401

    (root / f"{name}-ready").touch()
    agents: dict[int, Path] = {}
    lines = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            if not (chunk := os.read(0, 1 << 16)):
                return
            *whole, lines = (lines + chunk).split(b"\n")
            for line in whole:
                request = json.loads(line)
                agents[_start(request)] = Path(request["log"])
        _reap(agents)


def _start(request: dict[str, Any]) -> int:
    """Fork an agent; its pid, also as a file beside its log."""
    log = Path(request["log"])
    if pid := os.fork():
        _write(log.with_suffix(".pid"), str(pid))
        return pid
    code = 1
    try:
        supervise.end_with_parent()
        supervise.announce(Path(os.environ[supervise.ANNOUNCE]), "agent")
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.environ.update(request["environment"])
        if off := request["clock_off_s"]:
            shift_clock(off)
        _run(request)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not through the server's own frames


def _run(request: dict[str, Any]) -> None:
    """What torchrun does, but that its ranks are forked, and call a function."""
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    logging.basicConfig()
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.INFO)  # tells when it waits
    module, _, function = request["entry"].partition(":")
    entry = getattr(importlib.import_module(module), function)
    config, _, _ = torchrun.config_from_args(torchrun.parse_args([*request["flags"], "-m", module]))
    config.start_method = "fork"
    elastic_launch(config, entry)(*request["args"])


def shift_clock(seconds: float) -> None:
    """Let torchrun's rendezvous of this process read a clock of the wall that is off.

    Linux has a namespace for the clocks since boot, not for the time of day (time_namespaces(7)); so it is put
    off where the rendezvous reads it.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=seconds)

    dynamic_rendezvous.datetime = Shifted


def _reap(agents: dict[int, Path]) -> None:
    for pid in list(agents):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended = {"code": os.waitstatus_to_exitcode(status), "time": time.time()}
            _write(agents.pop(pid).with_suffix(".ended"), json.dumps(ended))


def _write(path: Path, text: str) -> None:
    """Whole at once: somebody waits for it."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    os.replace(new, path)


if __name__ == "__main__":
    main()
