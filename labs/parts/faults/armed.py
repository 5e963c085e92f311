"""Two trainings of two ranks side by side, with and without what tells of a hang: one computes, the other waits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from labs.kit.rank import Rank, unpinned
from labs.parts.elastic import lifeline
from labs.parts.faults.requeued import RANKS, RECIPE, environment

DEBUG = RECIPE.with_name("train_ddp_debug.py")
LONGEST_S = 120


class Job:
    """A training that takes steps when it is asked to. `armed`: with the recipe's evidence and torch's recorder."""

    def __init__(self, root: Path, armed: bool, batch_size: int, seed: int, rank: Rank) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONGEST_S)
        )
        self.log = root / f"armed-{armed}.log"
        settings = json.dumps(
            {"armed": armed, "batch": batch_size // RANKS, "seed": seed, "folder": str(root / "debug")}
        )
        command = [sys.executable, "-m", "labs.parts.faults.armed", settings]
        with unpinned(rank), self.log.open("w") as log:
            self.ranks = [
                subprocess.Popen(
                    command,
                    env=environment(r, self.store.port, root / "run-0"),
                    text=True,
                    cwd=root,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
                for r in range(RANKS)
            ]

    def steps(self, n: int, guards: tuple[str, ...] = ()) -> list[float]:
        """Take n steps with these guards; the loss of the last on each rank. RuntimeError if a rank has gone."""
        for process in self.ranks:
            with suppress(BrokenPipeError):  # it has gone, as its missing answer tells
                process.stdin.write(json.dumps({"steps": n, "guards": guards}) + "\n")
                process.stdin.flush()
        answers = [process.stdout.readline() for process in self.ranks]
        if not all(answers):
            raise RuntimeError(f"a training has ended: {(self.log.read_text().splitlines() or ['without a word'])[-1]}")
        return [json.loads(answer)["loss"] for answer in answers]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # of a request that it never read
                    pipe.close()


# In the process of a rank


def main() -> None:
    """Train the recipe's model on request, until standard input ends."""
    settings = json.loads(sys.argv[1])
    lifeline.hold(f"armed-{settings['armed']}-{os.environ['RANK']}")
    answers, sys.stdout = sys.stdout, sys.stderr
    training = Training(_recipe(), settings)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"loss": training.steps(asked["steps"], asked["guards"])}), file=answers, flush=True)
    os._exit(0)


def _recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", DEBUG)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


class Training:
    """What train_ddp_debug.py trains, with those of its guards that a request names."""

    def __init__(self, recipe: ModuleType, settings: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        self.torch, self.recipe, self.done = torch, recipe, 0
        torch.set_num_threads(1)
        if settings["armed"]:  # before the group: that is when the recorder's size is read
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.evidence = recipe.Evidence(Path(settings["folder"]), rank, ranks, 3600, False)
        dist.init_process_group("gloo")
        torch.manual_seed(settings["seed"])
        self.model = DistributedDataParallel(recipe.build_model(0.0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(settings["batch"], 1, 28, 28)
        self.y = torch.randint(10, (settings["batch"],))
        self.not_finite = torch.zeros((), dtype=torch.int64)

    def steps(self, n: int, guards: list[str]) -> float:
        """The loss of the last of n steps; replicas are compared once, after it."""
        for _ in range(n):
            loss = self.recipe.cross_entropy(self.model(self.x), self.y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.done += 1
            if "each step" in guards:
                self.evidence.end_of_step(self.done)
                seen = loss.isfinite() | (self.not_finite > 0)
                self.not_finite = self.torch.where(seen, self.not_finite, self.done)
        if "replicas" in guards:
            self.recipe.check_replicas(self.model.module, RANKS)
        if "memory" in guards:
            self.evidence.log_memory()
        return loss.item()


if __name__ == "__main__":
    main()
