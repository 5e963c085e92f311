"""The model and the data of a recipe, or of somebody's own copy of one, as a workload that labs can train."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from labs.common.models import Workload
from labs.kit.errors import BadInput, require

NEEDED = ("build_model", "load_data")


def require_recipe(path: Path) -> None:
    """BadInput unless there is a Python file at `path` that names what a recipe must have. Nothing is run."""
    require(path.suffix == ".py" and path.is_file(), f"recipe {path}: there is no such Python file")
    text = path.read_text("utf-8", "replace")
    for name in NEEDED:
        require(
            f"def {name}(" in text,
            f"recipe {path} has no function {name}: see the two places marked YOUR in labs/recipes/train_ddp.py",
        )


def workload_of(path: Path, seed: int) -> Workload:
    """What `build_model` and `load_data` of the file give, its batches by DataLoader. BadInput if they fail.

    Batches come in an order drawn from torch's random state, epoch after epoch. The loss is cross-entropy, as in the
    recipes.
    """
    try:
        module = _imported(path)
        torch.manual_seed(seed)
        model = module.build_model(0.0)
        train, _ = module.load_data(module.DATA)
    except (Exception, SystemExit) as e:
        told = " ".join(str(e).split())[:300]
        raise BadInput(f"recipe {path} cannot be used: {type(e).__name__}: {told}") from e
    loaders: dict[int, Iterator[tuple[Tensor, Tensor]]] = {}

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        require(rows <= len(train), f"batch_size {rows} is more than the {len(train)} samples of recipe {path}")
        if rows not in loaders:
            loaders[rows] = _endless(DataLoader(train, rows, shuffle=True, drop_last=True))
        return next(loaders[rows])

    return Workload(model, make_batch, cross_entropy)


def _endless(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def _imported(path: Path) -> ModuleType:
    """The file as a module; what stands under `if __name__ == "__main__":` is not run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module
