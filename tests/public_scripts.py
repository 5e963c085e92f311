"""Public training scripts, unchanged, on small made-up data: what to fetch, how to run it, what is true of it.

None of their code is in this repository. COURSE_PUBLIC_SCRIPTS names a folder with clones of it: `git clone
https://github.com/OWNER/NAME OWNER/NAME` in that folder, and there `git checkout COMMIT`, for each that is listed here.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

VARIABLE = "COURSE_PUBLIC_SCRIPTS"
STAND_INS = Path(__file__).parent / "stand_ins"
"""Packages that these scripts want and this course has not."""
COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "milesial/Pytorch-UNet": "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
    "weiaicunzai/pytorch-cifar100": "11d8418f415b261e4ae3cb1ffe20d06ec95b98e4",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "kubeflow/training-operator": "25b8a5b57b3d7a0974c2ccd9ffbd03bca85698c0",
}


@dataclass(frozen=True)
class Script:
    """One of them."""

    repository: str
    path: str
    """In its repository; it runs in that folder."""
    args: str = ""
    data: Callable[[Path], None] = lambda folder: None
    """Writes into that folder what the script reads."""
    ranks: int = 0
    """By torchrun; 0: without."""
    apart: bool = False
    """Whether its ranks exchange nothing, each with a model of its own."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables on top."""
    optimizers: tuple[str, ...] = ()
    dataset: str = ""
    """Of its DataLoader; "": it has none."""
    rules: tuple[tuple[str, int], ...] = ()
    """All that is wrong or outdated in it by reading: rule and line. Each was looked at, and is true."""

    @property
    def name(self) -> str:
        """For pytest."""
        ranks = f"-{self.ranks}-ranks" if self.ranks else ""
        return f"{self.repository.split('/')[1]}-{'-'.join(Path(self.path).with_suffix('').parts)}{ranks}"


def scripts_folder() -> Path | None:
    """Where the clones are; None if the variable names none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def lay_out(script: Script, clones: Path, into: Path) -> Path:
    """A copy with its data; returns the folder in which it runs."""
    root = into / "repository"
    shutil.copytree(clones / script.repository, root, ignore=shutil.ignore_patterns(".git"))
    folder = (root / script.path).parent
    script.data(folder)
    return folder


def _letters(n: int) -> str:
    made = np.random.default_rng(0)
    return "".join(made.choice(list("abcdefgh O,!Gd\n"), n))


def _text(folder: Path) -> None:
    (folder / "input.txt").write_text("O God, O God!\n" + _letters(20_000))


def _words(folder: Path) -> None:
    (folder / "words").mkdir()
    for part in ("train", "valid", "test"):
        (folder / "words" / f"{part}.txt").write_text(_letters(30_000 if part == "train" else 2_000))


def _tokens(folder: Path) -> None:
    (folder / "data" / "made").mkdir(parents=True)
    for part in ("train", "val"):
        tokens = np.random.default_rng(0).integers(65, size=50_000).astype(np.uint16)
        tokens.tofile(folder / "data" / "made" / f"{part}.bin")
    (folder / "data" / "made" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _images(folder: Path) -> None:
    made = np.random.default_rng(0)
    for part in ("imgs", "masks"):
        (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    for i in range(60):
        np.save(folder / "data" / "imgs" / f"{i}.npy", made.integers(256, size=(64, 64, 3), dtype=np.uint8))
        np.save(folder / "data" / "masks" / f"{i}_mask.npy", made.integers(2, size=(64, 64), dtype=np.uint8))


def _results(folder: Path) -> None:
    (folder / "results").mkdir()


def _waves(folder: Path) -> None:
    import torch

    phase = torch.arange(20.0).view(-1, 1)
    torch.save(torch.sin(torch.arange(60.0) / 6 + phase).double().numpy(), folder / "traindata.pt")


WORDS = "--data words --use-optimizer --lr 0.001 --nhid 64 --emsize 64"
NANO = (
    "--device=cpu --compile=False --dataset=made --n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=8 "
    "--eval_iters=2 --gradient_accumulation_steps=4"
)
MINGPT = "--model.model_type=gpt-nano --trainer.batch_size=8 --trainer.num_workers=1"
ALONE = "--dummy -j 1 -b 8 --dist-backend gloo --world-size -1 --dist-url env://"
"""Without a GPU this script makes a process group, and no DistributedDataParallel."""
SCRIPTS = [
    Script("pytorch/examples", "mnist/main.py", optimizers=("Adadelta",), dataset="MNIST"),
    Script(
        "pytorch/examples",
        "imagenet/main.py",
        "--dummy -j 2 -b 8 -p 1",
        optimizers=("SGD",),
        dataset="FakeData",
        rules=(("save-not-atomic", 430),),
    ),
    Script(
        "pytorch/examples",
        "imagenet/main.py",
        ALONE,
        ranks=2,
        apart=True,
        optimizers=("SGD",),
        dataset="FakeData",
        rules=(("save-not-atomic", 430),),
    ),
    Script("pytorch/examples", "word_language_model/main.py", WORDS, _words, optimizers=("AdamW",)),
    Script(
        "pytorch/examples",
        "dcgan/main.py",
        "--dataset fake --workers 1 --batchSize 8 --ngf 8 --ndf 8",
        optimizers=("Adam", "Adam"),
        dataset="FakeData",
    ),
    Script("pytorch/examples", "vae/main.py", data=_results, optimizers=("Adam",), dataset="MNIST"),
    Script(
        "pytorch/examples",
        "time_sequence_prediction/train.py",
        "--steps 400",
        _waves,
        optimizers=("LBFGS",),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    Script(
        "karpathy/nanoGPT",
        "train.py",
        NANO,
        _tokens,
        optimizers=("AdamW",),
        rules=(("amp-old", 196), ("save-not-atomic", 286)),
    ),
    Script(
        "karpathy/minGPT", "projects/chargpt/chargpt.py", MINGPT, _text, optimizers=("AdamW",), dataset="CharDataset"
    ),
    Script("karpathy/makemore", "makemore.py", "-n 1", optimizers=("AdamW",), dataset="CharDataset"),
    Script(
        "milesial/Pytorch-UNet",
        "train.py",
        "--scale 1 -b 1",
        _images,
        optimizers=("RMSprop",),
        dataset="Subset",
        rules=(("amp-old", 80),),
    ),
    Script("weiaicunzai/pytorch-cifar100", "train.py", "-net squeezenet -b 8", optimizers=("SGD",), dataset="CIFAR100"),
    Script(
        "eriklindernoren/PyTorch-GAN",
        "implementations/wgan_gp/wgan_gp.py",
        optimizers=("Adam", "Adam"),
        dataset="MNIST",
    ),
    Script(
        "kubeflow/training-operator",
        "examples/pytorch/mnist/mnist.py",
        "--epochs 50",
        ranks=2,
        optimizers=("SGD",),
        dataset="FashionMNIST",
        rules=(("save-all-ranks", 220), ("set-epoch-missing", 207)),
    ),
]
