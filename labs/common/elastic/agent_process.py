"""Run PyTorch's elastic agent for one training run after another. Started by labs.elastic_restart.agent, not by you.

    python -m labs.common.elastic.agent_process ROOT

Reads one JSON request per line: the run's folder, whether to fork its ranks, torchrun's arguments and the script's. It
imports torch once, while its fork server does the same on another core, so a run starts at once. Without forking, it
calls torchrun, whose ranks are fresh interpreters.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from labs.common.elastic import journal, train
from labs.kit import _compat, supervise

MODULE = "labs.elastic_train"


def main() -> None:
    """Serve requests until standard input ends."""
    root = Path(sys.argv[1])
    supervise.hold("agent")
    multiprocessing.set_forkserver_preload(["labs.kit.supervise", "labs.common.elastic.loop"])
    forkserver.ensure_running()
    (root / f"server-{forkserver._forkserver._forkserver_pid}").touch()
    _compat.preload_dynamo()  # otherwise imported when the first failed rank's traceback is logged
    import torch.distributed.run  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        folder, error = Path(request["folder"]), ""
        (folder / journal.FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            run(folder, request["forked"], request["torchrun"], request["args"])
        except BaseException as e:  # mostly ChildFailedError; the lab waits for an answer in any case
            error = f"{type(e).__name__}: {' '.join(str(e).split())}"[:500]
        (folder / "new-ended").write_text(json.dumps({"error": error}))
        os.replace(folder / "new-ended", folder / "ended")


def run(folder: Path, forked: bool, flags: list[str], args: list[str]) -> None:
    """Run one training script, with restarts, and write the agent's events to the run's journal."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic import metrics
    from torch.distributed.launcher.api import elastic_launch

    with (folder / journal.FOLDER / "agent.jsonl").open("a", buffering=1) as file:

        class ToJournal(metrics.MetricHandler):
            def emit(self, metric_data: metrics.MetricData) -> None:
                if event := EVENTS.get(metric_data.name):
                    row = {"event": event, "time": metric_data.timestamp, "rank": None, "pid": os.getpid()}
                    file.write(json.dumps(row) + "\n")

        metrics.configure(ToJournal(), group="torchelastic")
        if not forked:
            return torchrun.main([*flags, "-m", MODULE, *args])
        config, _, _ = torchrun.config_from_args(torchrun.parse_args([*flags, "-m", MODULE]))
        config.start_method = "forkserver"
        elastic_launch(config, train.entry)(args)


EVENTS = {
    "workers.default.failed": "detected",
    "workers.default.unhealthy": "detected",
    "SimpleElasticAgent._rendezvous.success": "starting",
}
"""The agent's metrics to record, and each one's name in the journal."""


if __name__ == "__main__":
    main()
