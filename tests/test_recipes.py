"""Each recipe runs alone, where the course cannot be imported, and trains what the recipe before it trains."""

import ast
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from again import holds_soon
from forked import Forks
from processes import MARK, assert_no_survivors, family, new_environment, wait_for
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.timeout(300)  # three starts of torch, on a machine that may be busy with other things

LABS = Path(__file__).parents[1] / "labs"
RECIPES = sorted(p.stem for p in (LABS / "recipes").glob("*.py"))
TRAINING = [name for name in RECIPES if name.startswith("train_")]
FEW = ("--cpu", "--steps", "4", "--log-every", "1", "--batch-size", "32")
EXACT = (*FEW, "--float64")
BF16_STEP = 2.0**-8
"""Largest relative rounding error of a BF16 number."""

# Stands for a machine on which the course is not installed. The installed one is found by an import hook of its own.
REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("labs", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}, on purpose", name=name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the recipes and their data, and nothing else of the course."""
    home = tmp_path_factory.mktemp("home")
    for folder, pattern in (("recipes", "*.py"), ("common/data", "*.npz")):
        (home / folder).mkdir(parents=True)
        for path in (LABS / folder).glob(pattern):
            shutil.copy(path, home / folder)
    (home / "refuse").mkdir()
    (home / "refuse" / "sitecustomize.py").write_text(REFUSE)
    return home


@dataclass
class Result:
    """What a recipe printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def losses(self) -> list[float]:
        """Of each step; ten digits, which tell any two FP32 numbers from 0.01 to 2 apart."""
        return [float(loss) for loss in re.findall(r"^step .* loss (\S+) ", self.out, re.M)]

    @property
    def tested(self) -> str:
        """The line on the test data."""
        (line,) = re.findall(r"^test loss .*", self.out, re.M)
        return line


def command(home: Path, recipe: str, *options: object, ranks: int = 0, torchrun: tuple[str, ...] = ()) -> list[str]:
    """By torchrun if `ranks` is given."""
    by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *torchrun] if ranks else []
    return [sys.executable, "-B", *by, str(home / "recipes" / f"{recipe}.py"), *map(str, options)]


def environment(home: Path, **more: str) -> dict[str, str]:
    return {**new_environment(OMP_NUM_THREADS="1", **more), "PYTHONPATH": str(home / "refuse")}


def changed(home: Path, recipe: str, name: str, *changes: tuple[str, str]) -> str:
    """The name of a copy of the recipe in which a learner has changed this."""
    text = (home / "recipes" / f"{recipe}.py").read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (home / "recipes" / f"{name}.py").write_text(text)
    return name


@pytest.fixture
def start(home, tmp_path):
    """Start a recipe in an empty folder; whatever is left of it in the end is killed."""
    started = []

    def start(recipe: str, *options: object, env: dict[str, str] | None = None, **how) -> subprocess.Popen:
        pipe, env = subprocess.PIPE, environment(home, **(env or {}))
        process = subprocess.Popen(
            command(home, recipe, *options, **how),
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=env,
            cwd=tmp_path,
            start_new_session=True,
        )
        process.mark = env[MARK]
        started.append(process)
        return process

    yield start
    for process in started:
        for p in family(process.mark):
            p.kill()
        process.communicate()


@pytest.fixture(scope="module")
def forks(home):
    with Forks(environment(home)) as forks:
        yield forks


@pytest.fixture
def run(start, forks, home, tmp_path):
    def run(recipe: str, *options: object, code: int = 0, fresh: bool = False, **how) -> Result:
        """Run a recipe in an empty folder, as a fork of a process that has torch, or by a `fresh` interpreter."""
        if not fresh and not how.get("torchrun"):
            argv, env = command(home, recipe, *options)[2:], environment(home, **(how.get("env") or {}))
            result = Result(*forks.run(argv, how.get("ranks", 0), env, tmp_path, 250))
            assert (result.code == 0) == (code == 0), result.err
            return result
        process = start(recipe, *options, **how)
        out, err = process.communicate(timeout=250)
        assert (process.returncode == 0) == (code == 0), err
        assert_no_survivors(process.mark)
        return Result(process.returncode, out, err)

    return run


def same(a, b) -> bool:
    """Whether two nests of tensors and values are equal bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def single(home, forks, tmp_path_factory):
    """(result, weights) of train_single.py in FP64."""
    folder = tmp_path_factory.mktemp("single")
    argv = command(home, "train_single", *EXACT, "--save", folder / "w.pt")[2:]
    result = Result(*forks.run(argv, 0, environment(home), folder, 250))
    assert result.code == 0, result.err
    return result, torch.load(folder / "w.pt", weights_only=True)


def assert_trains_the_same(result: Result, weights: dict, single: tuple[Result, dict], tolerance: float = 1e-9) -> None:
    """Losses at every step, on test data, and weights. FP64 rounds by 1e-16; sums of ~1e4 terms and Adam's division by
    sqrt(v) + 1e-8 leave some 1e-12 of that."""
    assert len(result.losses) == 4
    assert result.losses == pytest.approx(single[0].losses, abs=tolerance)
    assert numbers(result.tested) == pytest.approx(numbers(single[0].tested), abs=tolerance)
    assert weights.keys() == single[1].keys()
    for name, expected in single[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=tolerance)


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+\.\d+", line)]


def test_single_learns(single):
    assert single[0].losses[-1] < single[0].losses[0] and "accuracy" in single[0].tested


def test_two_ranks_train_what_one_process_trains(run, single, tmp_path):
    two = run("train_ddp", *EXACT, "--save", "w.pt", ranks=2, fresh=True)  # by torchrun
    assert_trains_the_same(two, torch.load(tmp_path / "w.pt", weights_only=True), single)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_any_number_of_ranks_trains_what_one_process_trains(run, single, tmp_path, ranks):
    result = run("train_ddp", *EXACT, "--save", "w.pt", ranks=ranks)
    assert_trains_the_same(result, torch.load(tmp_path / "w.pt", weights_only=True), single)


# Mixed precision


@pytest.fixture(scope="module")
def losses_in_fp32(home, forks, tmp_path_factory):
    argv, folder = command(home, "train_ddp", *FEW)[2:], tmp_path_factory.mktemp("ddp")
    return Result(*forks.run(argv, 2, environment(home), folder, 250))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_16_bits_train_alike(run, losses_in_fp32, precision):
    """Ten matrix products one after the other, forward and backward, each rounded to 2^-8 at most: 20 x 2^-8 bounds the
    loss if errors add up without exception. They do not: the first losses agree within one rounding."""
    result = run("train_ddp_amp", *FEW, "--precision", precision, "--clip", 1, ranks=2)
    assert result.losses != losses_in_fp32.losses
    assert result.losses[0] == pytest.approx(losses_in_fp32.losses[0], rel=BF16_STEP)


@pytest.mark.long
def test_without_16_bits_amp_is_ddp_bit_by_bit(run, losses_in_fp32):
    result = run("train_ddp_amp", *FEW, "--precision", "fp32", ranks=2)
    assert (result.losses, result.tested) == (losses_in_fp32.losses, losses_in_fp32.tested)


# Fast habits


def test_fast_habits_train_what_one_process_trains(run, single, tmp_path):
    """Batches come from another process, the optimizer is fused, and weights are saved after every step."""
    result = run("train_ddp_fast", *EXACT, "--workers", 1, "--save", "w.pt", "--save-every", 1e-9, ranks=2)
    assert_trains_the_same(result, torch.load(tmp_path / "w.pt", weights_only=True), single)
    assert [p.name for p in tmp_path.glob("w.pt*")] == ["w.pt"]


@pytest.mark.long
@pytest.mark.parametrize("options", [("--bf16",), ("--bf16", "--compile")])
def test_fast_habits_in_16_bits_train_alike(run, losses_in_fp32, options):
    """As for train_ddp_amp: the first loss within one rounding."""
    result = run("train_ddp_fast", *FEW, *options, ranks=2)
    assert result.losses != losses_in_fp32.losses
    assert result.losses[0] == pytest.approx(losses_in_fp32.losses[0], rel=BF16_STEP)


def test_without_a_compiler_compile_is_refused_in_one_line(run):
    result = run("train_ddp_fast", "--cpu", "--compile", env={"CXX": "no-such-compiler"}, code=2)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "--compile needs no-such-compiler: install it" in result.err


# A communication hook


@pytest.mark.long
def test_without_a_hook_it_is_ddp_bit_by_bit(run, losses_in_fp32):
    result = run("train_ddp_hook", *FEW, "--hook", "none", ranks=2)
    assert (result.losses, result.tested) == (losses_in_fp32.losses, losses_in_fp32.tested)


def test_the_fp16_hook_trains_alike(run, losses_in_fp32):
    """The first loss is from before any exchange: the same bits. Each exchange then rounds twice by 2^-11 at most; 20
    times that for each of three steps bounds the loss as above, if errors add up without exception."""
    result = run("train_ddp_hook", *FEW, "--hook", "fp16", ranks=2)
    assert result.losses[0] == losses_in_fp32.losses[0] and result.losses != losses_in_fp32.losses
    assert result.losses == pytest.approx(losses_in_fp32.losses, rel=3 * 20 * 2.0**-11)


@pytest.mark.long
def test_powersgd_learns_on_two_ranks(run):
    """It begins to compress after a tenth of the steps."""
    options = ("--cpu", "--steps", 40, "--log-every", 1, "--batch-size", 64, "--hook", "powersgd")
    losses = run("train_ddp_hook", *options, ranks=2).losses
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.long
@pytest.mark.parametrize("hook", ["none", "fp16", "powersgd"])
def test_a_hook_with_plain_python(run, hook):
    assert len(run("train_ddp_hook", *FEW, "--hook", hook).losses) == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--bucket-mb", "0"], "--bucket-mb, --powersgd-rank: above 0"),
        pytest.param(["--hook", "bf16", "--cpu"], "take --hook fp16", marks=pytest.mark.long),
        pytest.param(["--hook", "fp16", "--float64"], "--float64 needs --hook none", marks=pytest.mark.long),
    ],
)
def test_a_hook_that_cannot_be_is_one_line(run, options, told):
    result = run("train_ddp_hook", *options, code=2)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1) and told in result.err


# Resume

RUN = ("--cpu", "--log-every", "1", "--batch-size", "1200", "--dropout", "0.2", "--save-every", "4")


def whole_and(run, how: dict, steps: int, tmp_path) -> tuple[Result, dict]:
    whole = run("train_ddp_resume", *RUN, "--steps", steps, "--checkpoint", "whole.pt", **how)
    return whole, torch.load(tmp_path / "whole.pt", weights_only=True)


@pytest.mark.parametrize("ranks", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_killed_and_started_again_it_ends_bit_by_bit_the_same(run, start, tmp_path, ranks):
    """An epoch has 8 steps: it is killed in the second, and goes on into the third."""
    whole, expected = whole_and(run, {"ranks": ranks}, 20, tmp_path)
    process = start("train_ddp_resume", *RUN, "--steps", 20, "--checkpoint", "killed.pt", ranks=ranks)
    for line in process.stdout:
        if line.startswith("step 11/"):  # the checkpoint is of step 8
            for p in family(process.mark):
                p.kill()
            break
    saved = torch.load(tmp_path / "killed.pt", weights_only=True)["step"]
    assert saved % 4 == 0 and 8 <= saved < 20
    resumed = run("train_ddp_resume", *RUN, "--steps", 20, "--checkpoint", "killed.pt", ranks=ranks)
    assert resumed.losses == whole.losses[saved:] and resumed.tested == whole.tested
    assert same(torch.load(tmp_path / "killed.pt", weights_only=True), expected)


# The recipe that combines what work needs

FULL = ("--cpu", "--log-every", "1", "--batch-size", "1200", "--dropout", "0.2", "--accumulate", "2")
FULL_RUN = (
    *FULL,
    "--precision",
    "fp32",
    "--steps",
    "12",
    "--warmup",
    "2",
    "--save-every",
    "4",
    "--validate-every",
    "5",
)


@pytest.mark.parametrize(("ranks", "micro"), [(0, 4), pytest.param(2, 2, marks=pytest.mark.long)])
def test_full_with_accumulation_trains_what_a_single_batch_trains(run, tmp_path, ranks, micro):
    """In FP64, with the schedule and clipping at work; a mean of means or a gradient exchanged too early would show."""
    options = (*EXACT, "--precision", "fp32", "--warmup", "1", "--clip", "0.5", "--validate-every", "2")
    once = run("train_ddp_full", *options, "--checkpoint", "a.pt", "--metrics", "a.jsonl")
    parts = run(
        "train_ddp_full", *options, "--accumulate", micro, "--checkpoint", "b.pt", "--metrics", "b.jsonl", ranks=ranks
    )
    assert len(once.losses) == 6 and parts.losses == pytest.approx(once.losses, abs=1e-9)
    a, b = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("a.pt", "b.pt"))
    for name, expected in a.items():
        torch.testing.assert_close(b[name], expected, rtol=0, atol=1e-9)


def test_the_learning_rate_rises_and_falls(run, tmp_path):
    run("train_ddp_full", *FULL, "--steps", "6", "--warmup", "2", "--metrics", "m.jsonl")
    rows = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(1e-3) and rates[2] > rates[3] > rates[5] > 0


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_full_killed_and_resumed_has_the_same_weights_and_metrics(run, start, tmp_path, ranks):
    whole = run("train_ddp_full", *FULL_RUN, "--checkpoint", "whole.pt", "--metrics", "whole.jsonl", ranks=ranks)
    files = ("--checkpoint", "killed.pt", "--metrics", "killed.jsonl")
    process = start("train_ddp_full", *FULL_RUN, *files, ranks=ranks)
    for line in process.stdout:
        if line.startswith("step 7/"):  # the checkpoint is of step 4: steps 5 to 7 are in the file already
            for p in family(process.mark):
                p.kill()
            break
    saved = torch.load(tmp_path / "killed.pt", weights_only=True)["step"]
    resumed = run("train_ddp_full", *FULL_RUN, *files, ranks=ranks)
    assert 4 <= saved < 12 and len(resumed.losses) < len(whole.losses)
    states = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "killed")]
    assert same(*states)
    rows = [
        [{k: v for k, v in json.loads(line).items() if k != "samples_per_s"} for line in path.read_text().splitlines()]
        for path in (tmp_path / "whole.jsonl", tmp_path / "killed.jsonl")
    ]
    assert rows[0] == rows[1]


def test_an_error_ends_a_rank_with_workers(start, home):
    """They ignore SIGTERM, by which Python ends them at exit, before it waits for them."""
    loads = ("worker_init_fn=ignore_sigterm", "worker_init_fn=ignore_sigterm, num_workers=1, persistent_workers=True")
    fails = ("            step += 1\n", "            step += 1\n            1 / (3 - step)\n")
    process = start(changed(home, "train_ddp_resume", "train_resume_fails", loads, fails), *RUN, "--checkpoint", "e.pt")
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "step 2/" in out and "step 3/" not in out
    assert_no_survivors(process.mark)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "workers"), [(0, 0), (2, 0), (2, 1)])
def test_sigterm_saves_and_ends(run, start, home, tmp_path, ranks, workers):
    """Workers of the loader are signalled, too: torchrun signals the process group of each rank."""
    whole, expected = whole_and(run, {"ranks": ranks}, 40, tmp_path)
    loads = ("pin_memory=cuda,", f"pin_memory=cuda, num_workers={workers}, persistent_workers={workers > 0},")
    recipe = changed(home, "train_ddp_resume", "train_resume_loads", loads)
    process = start(recipe, *RUN, "--save-every", 1000, "--steps", 40, "--checkpoint", "t.pt", ranks=ranks)
    wait_for(lambda: process.stdout.readline().startswith("step 5/"), what="step 5")
    os.kill(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
    out, _ = process.communicate(timeout=250)
    assert process.returncode == (1 if ranks else 128 + signal.SIGTERM)
    (at,) = map(int, re.findall(r"stopped by SIGTERM and saved at step (\d+)", out))
    assert_no_survivors(process.mark)
    resumed = run("train_ddp_resume", *RUN, "--steps", 40, "--checkpoint", "t.pt", ranks=ranks)
    assert resumed.losses == whole.losses[at:] and same(torch.load(tmp_path / "t.pt", weights_only=True), expected)


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_starts_again_and_goes_on(run, start, tmp_path, sign):
    whole, expected = whole_and(run, {"ranks": 2}, 40, tmp_path)
    process = start(
        "train_ddp_resume", *RUN, "--steps", 40, "--checkpoint", "e.pt", ranks=2, torchrun=("--max-restarts", "1")
    )
    wait_for(lambda: process.stdout.readline().startswith("step 9/"), what="step 9")
    os.kill(max(ranks_of(process)), sign)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert f"step 40/40  loss {whole.losses[-1]:.10f}" in out and whole.tested in out
    assert same(torch.load(tmp_path / "e.pt", weights_only=True), expected)


def ranks_of(process: subprocess.Popen) -> list[int]:
    return [p.pid for p in psutil.Process(process.pid).children() if "train_" in " ".join(p.cmdline())]


@pytest.mark.long
def test_half_a_file_never_takes_the_place_of_a_whole_one(run, home, tmp_path):
    """Killed in the middle of a save, in a process that imports the recipe and cuts the power inside torch.save."""
    code = f"""
import os, sys
sys.path.insert(0, {str(home / "recipes")!r})
import pathlib, torch, train_ddp_resume
path = pathlib.Path("c.pt")
train_ddp_resume.save(path, {{"step": torch.tensor(1)}})
def dies(state, file):
    file.write(b"half")
    file.flush()
    os._exit(9)
torch.save = dies
train_ddp_resume.save(path, {{"step": torch.tensor(2)}})
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(home), cwd=tmp_path)
    assert done.returncode == 9 and torch.load(tmp_path / "c.pt", weights_only=True)["step"] == 1


@pytest.mark.parametrize(
    ("content", "options", "told"),
    [
        (b"PK half", (), "damaged"),
        ({"step": 1, "order": [64, 0]}, ("--seed", 5), "--batch-size, --seed [64, 0]: give"),
    ],
)
@pytest.mark.long
def test_a_checkpoint_that_cannot_be_used_is_refused(run, tmp_path, content, options, told):
    path = tmp_path / "c.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    result = run("train_ddp_resume", *FEW, "--checkpoint", "c.pt", *options, code=2)
    assert result.code == 2 and told in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("env", "recipe", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "train_ddp", "8 processes, each alone: let srun or mpirun start torchrun"),
        (
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "4",
                "GROUP_WORLD_SIZE": "2",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            "train_ddp_resume",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_ranks_that_would_not_meet_are_refused(run, env, recipe, told):
    result = run(recipe, *FEW, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **env}, code=2)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1) and told in result.err


# Recomputation, pipeline, sharding


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_recomputation_changes_no_bit(run, tmp_path, ranks):
    """With dropout: what is computed twice drops the same activations twice."""
    found = []
    for option in ("--recompute", "--no-recompute"):
        result = run("train_recompute", *FEW, "--dropout", 0.5, option, "--save", f"with{option}.pt", ranks=ranks)
        found.append((result.losses, result.tested))
    weights = [torch.load(tmp_path / f"with--{name}.pt", weights_only=True) for name in ("recompute", "no-recompute")]
    assert len(found[0][0]) == 4 and found[0] == found[1] and same(*weights)


@pytest.mark.long
def test_recomputation_trains_what_a_single_process_trains(run, single, tmp_path):
    result = run("train_recompute", *EXACT, "--save", "w.pt", ranks=2)
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    names = {name.replace(".0.", ".", 1): w for name, w in weights.items()}  # a block is in an nn.Sequential of its own
    assert_trains_the_same(result, names, single)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 3, 4, 6))])
def test_stages_train_what_a_single_process_trains(run, single, tmp_path, ranks):
    result = run("train_pipeline", *EXACT, "--save", "w.pt", ranks=ranks)
    assert_trains_the_same(result, torch.load(tmp_path / "w.pt", weights_only=True), single)


@pytest.mark.parametrize(
    ("ranks", "change", "told"),
    [
        pytest.param(7, ("Block(128, dropout)", "Block(128, dropout)"), "start at most 6", marks=pytest.mark.long),
        (
            0,
            ("return nn.Sequential(", "return (lambda *layers: nn.ModuleList(layers))("),
            "must return an nn.Sequential",
        ),
    ],
)
def test_a_model_without_enough_stages_is_refused(run, home, ranks, change, told):
    recipe = changed(home, "train_pipeline", "train_stages", change)
    result = run(recipe, *FEW, ranks=ranks, code=2)
    assert told in result.err and "Traceback" not in result.err


WRAPPED = """nn.Sequential(nn.Flatten(), nn.Linear(784, 128), *blocks, nn.Linear(128, 10))
class Whole(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x)
build_sequential, build_model = build_model, lambda dropout: Whole(build_sequential(dropout))
"""


@pytest.mark.parametrize("recipe", ["train_fsdp", pytest.param("train_tensor_parallel", marks=pytest.mark.long)])
def test_blocks_are_found_at_any_depth_and_missed_if_there_are_none(run, home, single, recipe):
    layers = WRAPPED.splitlines()[0]
    deep = run(changed(home, recipe, "train_deep", (f"{layers}\n", WRAPPED)), *EXACT, ranks=2)
    assert deep.losses == pytest.approx(single[0].losses, abs=1e-9)
    flat = ("[Block(128, dropout) for _ in range(4)]", "[nn.Identity() for _ in range(4)]")
    assert "the model has no Block" in run(changed(home, recipe, "train_flat", flat), *FEW, code=2).err


@pytest.mark.long
def test_a_loaded_training_takes_the_learning_rate_of_the_command(run, tmp_path):
    run("train_fsdp", *FEW, "--save", "first")
    run("train_fsdp", *FEW, "--load", "first", "--lr", "1e-30", "--save", "second")
    first, second = (weights_in(tmp_path / name, tmp_path / f"{name}.pt") for name in ("first", "second"))
    assert same(first, second), "steps of 1e-30 change no FP32 number"


def weights_in(folder: Path, file: Path) -> dict:
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)["model"]


SHARDED = [
    ("train_fsdp", 2, ()),
    ("train_tensor_parallel", 2, ()),
    ("train_fsdp", 0, ()),
    ("train_fsdp", 4, ()),
    ("train_tensor_parallel", 0, ()),
    ("train_tensor_parallel", 4, ("--tensor", 2)),
]


@pytest.mark.parametrize(
    ("recipe", "ranks", "options"), [*SHARDED[:2], *(pytest.param(*c, marks=pytest.mark.long) for c in SHARDED[2:])]
)
def test_shards_train_what_a_single_process_trains(run, single, tmp_path, recipe, ranks, options):
    result = run(recipe, *EXACT, *options, "--save", "states", ranks=ranks)
    dcp_to_torch_save(tmp_path / "states", tmp_path / "w.pt")
    assert_trains_the_same(result, torch.load(tmp_path / "w.pt", weights_only=True)["model"], single)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saver", "loader"), [(("train_fsdp", 2), ("train_fsdp", 0)), (("train_tensor_parallel", 2), ("train_fsdp", 3))]
)
def test_states_are_loaded_on_another_number_of_ranks(run, tmp_path, saver, loader):
    """Four steps, then the same four batches again. The states of Adam are loaded, too, or losses would differ."""
    options = (*EXACT, "--batch-size", 24)
    run(saver[0], *options, "--save", "states", ranks=saver[1])
    results = [run(recipe, *options, "--load", "states", ranks=ranks) for recipe, ranks in (("train_fsdp", 2), loader)]
    assert results[0].losses == pytest.approx(results[1].losses, abs=1e-9)
    afresh = run("train_fsdp", *options, ranks=2)
    assert results[0].losses[0] < afresh.losses[0], "it went on from what was learnt"


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["train_fsdp", "train_tensor_parallel"])
def test_shards_in_bf16(run, losses_in_fp32, recipe):
    result = run(recipe, *FEW, "--precision", "bf16", ranks=2)
    assert result.losses != losses_in_fp32.losses
    assert result.losses[0] == pytest.approx(losses_in_fp32.losses[0], rel=2 * BF16_STEP)


# Tools


def test_check_gpu_reports_on_a_cpu(run):
    out = run("check_gpu", "--cpu", "--size", 64, "--seconds", 0.01).out
    assert f"torch {torch.__version__}" in out
    for name in ("FP64", "FP32", "BF16", "FP16"):
        assert re.search(rf"  {name} matmul, 64 x 64: \d\S* TFLOP/s|  {name} matmul: not on this device", out)
    assert float(re.search(r"triad.* ([\d,]+) GB/s", out)[1].replace(",", "")) > 0


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_time_step_compares(run, ranks):
    out = run("time_step", "--cpu", "--batch-size", 8, "--seconds", 0.1, ranks=ranks).out
    for rank in range(max(ranks, 1)):
        for way in "AB":
            middle, low, high = numbers(re.search(rf"rank {rank}  {way}: (.* per step)", out)[1])
            assert 0 < low <= middle <= high
        ratio, low, high = numbers(re.search(rf"rank {rank}  A/B: (.*\])", out)[1])
        assert low <= ratio <= high


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_load_data_measures_loader_and_model(run, ranks):
    out = run("load_data", "--cpu", "--seconds", 0.05, "--workers", 0, 1, ranks=ranks).out
    for rank in range(max(ranks, 1)):
        assert len(re.findall(rf"rank {rank}  [01] workers: loader alone [\d,]+, with the model", out)) == 2


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_profile_step_tells_where_the_time_goes(run, tmp_path, ranks):
    outs = []

    def measured():
        outs.append(run("profile_step", "--cpu", "--batch-size", 8, "--steps", 6, ranks=ranks).out)
        return outs[-1]

    def as_the_clock_says(out):  # a neighbour may come between the two clocks
        pairs = re.findall(r"together +([\d.]+) ms per step; by the host's clock ([\d.]+) ms", out)
        return len(pairs) == max(ranks, 1) and all(abs(float(a) / float(b) - 1) <= 0.03 for a, b in pairs)

    assert holds_soon(as_the_clock_says, measured(), measured)
    out = outs[-1]  # of which the traces are
    for rank in range(max(ranks, 1)):
        mine = re.findall(rf"rank {rank}  ([a-z -]+?) +([\d.]+) ms", out)
        assert [name for name, _ in mine] == [
            "data",
            "host-to-device",
            "forward",
            "backward",
            "exposed communication",
            "optimizer",
            "overhead",
            "together",
        ]
        *parts, whole = (float(ms) for _, ms in mine)
        assert sum(parts) == pytest.approx(whole, abs=0.01)
        assert parts[4] > 0 if ranks else parts[4] == 0, "with one rank nothing is exchanged"


RANGES = {"data": (5, 15), "host-to-device": (15, 16), "forward": (20, 40), "backward": (40, 80), "optimizer": (82, 97)}


@pytest.mark.parametrize("seed", range(6))
def test_profile_step_cuts_a_gpus_trace(seed):
    """No GPU: bars as torch.profiler writes them, at random. A count of every microsecond says what is right."""
    dice = random.Random(seed)
    step = {"name": "ProfilerStep#4", "cat": "user_annotation", "ts": 0, "dur": 100, "tid": 1}
    rows = [
        step,
        *({"name": n, "cat": "user_annotation", "ts": a, "dur": b - a, "tid": 1} for n, (a, b) in RANGES.items()),
    ]
    kinds = [
        ("gemm", "kernel"),
        ("ncclDevKernel_AllReduce", "kernel"),
        ("Memcpy HtoD", "gpu_memcpy"),
        ("Memset", "gpu_memset"),
    ]
    for number in range(dice.randint(1, 25)):
        name, kind = dice.choice(kinds)
        launch, wait = dice.randint(0, 95), dice.randint(0, 10)
        rows.append(
            {
                "name": name,
                "cat": kind,
                "ts": launch + wait,
                "dur": dice.randint(0, 15),
                "tid": 7 + number % 2,
                "args": {"correlation": number},
            }
        )
        rows.append(
            {
                "name": "cudaLaunchKernel",
                "cat": "cuda_runtime",
                "ts": launch,
                "dur": 1,
                "tid": 3,
                "args": {"correlation": number},
            }
        )
    found, steps = recipe("profile_step").shares({"traceEvents": [{"ph": "X", **row} for row in rows]})
    assert steps == 1
    expected = Counter(share_at(moment, rows) for moment in range(100))
    assert {name: round(1e6 * s) for name, s in found.items() if s} == expected


def share_at(moment, rows):
    """The share that the microsecond from `moment` on belongs to: what computes hides what is copied or exchanged."""

    def range_at(t):
        return next((name for name, (a, b) in RANGES.items() if a <= t < b), "overhead")

    launched = {e["args"]["correlation"]: e["ts"] for e in rows if e["cat"] == "cuda_runtime"}
    kernels = ("kernel", "gpu_memcpy", "gpu_memset")
    runs = [e for e in rows if e["cat"] in kernels and e["ts"] <= moment < e["ts"] + e["dur"]]
    computing = {
        range_at(launched[e["args"]["correlation"]])
        for e in runs
        if "HtoD" not in e["name"] and "nccl" not in e["name"]
    }
    for name in ("forward", "backward", "optimizer", "data", "host-to-device", "overhead"):
        if name in computing:
            return name
    if any("HtoD" in e["name"] for e in runs):
        return "host-to-device"
    if runs:
        return "exposed communication"
    where = range_at(moment)
    return "idle" if where in ("forward", "backward", "optimizer") else where


def recipe(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", LABS / "recipes" / f"{name}.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.long
def test_workers_draw_other_numbers_and_a_seed_repeats_them(home, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(home / "recipes")!r})
import torch
from torch.utils.data import DataLoader, Subset
import load_data
data = Subset(load_data.Images(load_data.DATA), [0] * 8)  # one image, turned at random
def epoch(seed):
    return [x for x, _ in DataLoader(data, 4, collate_fn=load_data.collate, num_workers=2,
                                     generator=torch.Generator().manual_seed(seed))]
if __name__ == "__main__":
    a, b, c = epoch(1), epoch(1), epoch(2)
    assert all(map(torch.equal, a, b)) and not torch.equal(a[0], c[0])
    images = torch.cat(a)
    assert len(images.flatten(1).unique(dim=0)) == 8, "two workers have drawn the same"
"""
    (tmp_path / "draws.py").write_text(code)
    done = subprocess.run([sys.executable, "draws.py"], env=environment(home), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# What is wrong is told in one line

WRONG = [
    (["--batch-size", "0"], "1 or more"),
    (["--batch-size", "20000"], "10000 samples"),
    (["--lr", "nan"], "--lr must be above 0"),
    (["--data", "absent.npz"], "--data absent.npz: there is no such file"),
    (["--save", "no/such/w.pt"], "there is no such folder"),
]


@pytest.mark.parametrize(
    ("options", "told"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.long) for w in WRONG[1:])]
)
def test_a_bad_value_is_one_line(run, options, told):
    result = run("train_single", *options, code=2)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("train_single.py: ") and told in result.err


@pytest.mark.parametrize(
    "recipe",
    [
        "check_gpu",
        *(pytest.param(r, marks=pytest.mark.long) for r in RECIPES if r not in ("check_gpu", "compare_two", *TRAINING)),
    ],
)
def test_a_tool_tells_a_bad_value_in_one_line(run, recipe):
    result = run(recipe, "--seconds", 0, code=2)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"{recipe}.py: ") and "--seconds" in result.err


@pytest.mark.long
@pytest.mark.parametrize("recipe", TRAINING)
def test_ranks_tell_a_bad_value_once(run, recipe):
    result = run(recipe, "--batch-size", "0", code=1, ranks=2, fresh=True)  # torchrun ends the others
    assert result.err.count(f"{recipe}.py: ") == 1 and "1 or more" in result.err
    assert "exitcode  : 2" in result.err and "Traceback (most recent call last):\n  File" not in first_part(result.err)


def first_part(err: str) -> str:
    """What the ranks said, before torchrun's own report of which one failed first."""
    return err.partition("failed (exitcode")[0]


# Ctrl-C


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "ranks"), [("train_single", 0), *((r, 2) for r in TRAINING if r != "train_single")])
def test_ctrl_c_ends_all_processes(start, recipe, ranks):
    process = start(recipe, "--cpu", "--steps", 100_000, "--log-every", 1, ranks=ranks)
    wait_for(lambda: process.stdout.readline().startswith("step 2/"), what="step 2")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
    assert_no_survivors(process.mark)
    _, err = process.communicate(timeout=250)
    assert process.returncode != 0 and f'{recipe}.py", line' not in err, "no traceback of the recipe"


# The page about them


def test_the_table_names_commands_that_exist():
    page = (LABS / "recipes" / "README.md").read_text()
    for words in [c.split() for c in re.findall(r"`((?:python|torchrun) [^`]+)`\s*\|$", page, re.M)]:
        (recipe,) = [w for w in words if w.endswith(".py")]
        options = {w for w in words[words.index(recipe) :] if w.startswith("--")}
        text = (LABS / "recipes" / recipe).read_text()
        assert options <= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_imports_nothing_but_torch_and_numpy(recipe):
    tree = ast.parse((LABS / "recipes" / f"{recipe}.py").read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {"torch", "numpy", *sys.stdlib_module_names}
