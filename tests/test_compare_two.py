"""compare_two.py: planted differences are found, equal programs are not told apart, nothing is left running."""

import importlib.util
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MARK, assert_no_survivors, family, new_environment, wait_for

from labs.kit.measure import estimate

RECIPE = Path(__file__).parents[1] / "labs" / "recipes" / "compare_two.py"


def loaded(source=None, name="compare_two"):
    """The recipe as a module, from its file or from this source."""
    spec = importlib.util.spec_from_loader(name, loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(RECIPE)
    exec(compile(source or RECIPE.read_text(), str(RECIPE), "exec"), vars(module))
    return module


class Machine:
    """Stands for the machine: each run takes 8 % longer than the one before, the first of each command ten times."""

    def __init__(self, b_takes, noise=0.0, drift=1.08, seed=0):
        self.times = {"a": 1.0, "b": b_takes}
        self.level, self.drift, self.noise, self.draw, self.ran = 1.0, drift, noise, random.Random(seed), []

    def run(self, command):
        cold = command not in self.ran
        self.ran.append(command)
        self.level *= self.drift
        seconds = self.times[command] * self.level * self.draw.uniform(1 - self.noise, 1 + self.noise)
        return seconds * (10 if cold else 1), 0, f"loss 1\nat 2 samples/s\nat {1000 / seconds:,.3f} samples/s\n"


def compared(module, machine, monkeypatch, capsys, *options):
    """What the recipe prints last about a and b on this machine."""
    module.run = machine.run
    monkeypatch.setattr(sys, "argv", ["compare_two.py", *options, "a", "b"])
    handlers = {sign: signal.getsignal(sign) for sign in module.STOP}
    try:
        module.main()
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)
    return capsys.readouterr().out.splitlines()[-1]


def problems(module, monkeypatch, capsys):
    """What this recipe gets wrong, of what it must get right."""
    found = []
    machine = Machine(1.0)
    said = compared(module, machine, monkeypatch, capsys)
    if "inconclusive" not in said or "of 8 pairs" not in said:
        found.append(f"equal programs: {said}")
    if len(machine.ran) != 18:
        found.append(f"{len(machine.ran)} runs for 8 rounds and a warm-up")
    for takes, word in ((0.7, "B is faster"), (1.4, "B is slower")):
        if word not in (said := compared(module, Machine(takes), monkeypatch, capsys)):
            found.append(f"{takes}: {said}")
    # A machine that is half as fast for a while: only pairs show 4 %
    spell = Machine(0.96, noise=0.004, drift=1.0)
    steady = spell.run
    spell.run = lambda command: (lambda s, *more: (s * (2.0 if 6 < len(spell.ran) < 15 else 1.0), *more))(
        *steady(command)
    )
    if "B is faster" not in (said := compared(module, spell, monkeypatch, capsys)):
        found.append(f"a slow spell: {said}")
    rate = compared(module, Machine(0.7), monkeypatch, capsys, "--metric", "([0-9.,]+) samples/s")
    if "B is larger" not in rate:
        found.append(f"samples per second: {rate}")
    return found


def test_what_is_there_is_found_and_what_is_not_is_not(monkeypatch, capsys):
    assert problems(loaded(), monkeypatch, capsys) == []


def test_the_interval_is_that_of_the_course():
    """Two bootstraps with other random numbers, one with scipy's Student t."""
    for seed, n in enumerate((6, 8, 31)):
        draw = random.Random(seed)
        samples = [draw.gauss(1, 0.05) for _ in range(n)]
        low, high = loaded().interval(samples)
        course = estimate(samples)
        assert (low, high) == pytest.approx((course.low, course.high), abs=0.2 * (course.high - course.low))


# As a program


@pytest.fixture
def start(tmp_path):
    """Start the recipe in an empty folder; whatever is left of it in the end is killed."""
    started = []

    def start(*options):
        env, pipe = new_environment(), subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, str(RECIPE), *map(str, options)],
            stdout=pipe,
            stderr=pipe,
            env=env,
            text=True,
            cwd=tmp_path,
        )
        process.mark = env[MARK]
        started.append(process)
        return process

    yield start
    for process in started:
        for p in family(process.mark):
            p.kill()
        process.communicate()


@pytest.fixture
def run(start):
    def run(*options):
        process = start(*options)
        out, err = process.communicate(timeout=250)
        assert_no_survivors(process.mark)
        return process.returncode, out, err

    return run


def test_numbers_of_two_commands(run, tmp_path):
    """Each prints its next number; the first one does not count."""
    (tmp_path / "a").write_text("".join(f"{1.5 * k}\n" for k in (90, 10, 11, 12, 13, 14, 15)))
    (tmp_path / "b").write_text("".join(f"{k}\n" for k in (10, 10, 11, 12, 13, 14, 15)))
    take = "echo {0} >> order; head -n 1 {0}; sed -i 1d {0}"
    code, out, err = run("--rounds", 6, "--metric", "(.+)", take.format("a"), take.format("b"))
    assert (code, err) == (0, "")
    assert "A/B: 1.500 [1.500, 1.500] of 6 pairs: B is smaller, by 33.3 % of A or more" in out
    assert "".join((tmp_path / "order").read_text().split()) == "baabbaabbaabba"
    assert "warm-up, not counted: A 135, B 10" in out


def test_a_failing_command_ends_it_with_its_output(run, tmp_path):
    fails = 'echo x >> n; if [ "$(wc -l < n)" -ge 4 ]; then echo "out of memory"; exit 7; fi'
    code, out, err = run("true", fails)
    assert code == 1 and err.startswith(f"compare_two.py: round 3 of 8, B: {fails}: exit code 7\nout of memory")
    assert len((tmp_path / "n").read_text().splitlines()) == 4 and "round 2" in out and "A/B:" not in out


def test_without_a_number_above_0_there_is_no_ratio(run):
    code, _, err = run("--metric", "loss (.*)", "echo loss 2; echo loss nan", "echo loss 1")
    assert code == 1 and "warm-up, not counted, A: " in err
    assert err.endswith(": no number above 0 for --metric\nloss 2\nloss nan\n\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("loss 3, loss 1,234.5", 1234.5),
        ("loss 2e-3", 0.002),
        ("loss 0", None),
        ("loss inf", None),
        ("loss 1\nloss ", None),
    ],
)
def test_the_last_number_counts(text, found):
    assert loaded().number(text, re.compile(r"loss (\S*)")) == found


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["true"], "arguments are required: COMMAND"),
        (["--rounds", "5", "true", "true"], "--rounds from 6"),
        (["--metric", "(", "true", "true"], "--metric '(':"),
        (["--metric", "loss [0-9.]+", "true", "true"], "--metric needs one group"),
    ],
)
def test_what_cannot_work_is_one_line(run, options, told):
    code, out, err = run(*options)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("compare_two.py: ") and told in err


def test_stopped_it_leaves_no_child(start, tmp_path):
    """The command has a child, and a grandchild in the background."""
    process = start("true", "touch begun; sleep 1000 & sh -c 'sleep 1000; true'; true")
    wait_for((tmp_path / "begun").exists, what="the second command")
    wait_for(lambda: len(family(process.mark)) >= 4, what="its children")
    os.kill(process.pid, signal.SIGTERM)  # to the recipe alone: its commands are in sessions of their own
    _, err = process.communicate(timeout=250)
    assert process.returncode == 128 + signal.SIGTERM and err == ""
    assert_no_survivors(process.mark)


@pytest.mark.long
def test_stopped_it_leaves_no_rank_of_torchrun(start):
    """Ranks have sessions of their own: only torchrun can end them, and gets the time for it."""
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    train = f"{RECIPE.with_name('train_ddp.py')} --cpu --steps 100000 --log-every 100000"
    process = start(f"OMP_NUM_THREADS=1 {torchrun} {train}", "true")

    def ranks():
        commands = [" ".join(p.cmdline()) for p in family(process.mark)]
        return sum("train_ddp" in c and "distributed.run" not in c and "compare_two" not in c for c in commands) == 2

    wait_for(ranks, what="two ranks")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=250)
    assert process.returncode == 130
    assert_no_survivors(process.mark)


def test_what_a_command_leaves_behind_is_ended_and_its_time_does_not_count(monkeypatch):
    monkeypatch.setenv(MARK, mark := new_environment()[MARK])
    seconds, code, output = loaded().run("sleep 1000 & echo done")
    assert (code, output) == (0, "done\n") and seconds < 900
    assert_no_survivors(mark)


def test_what_does_not_end_when_asked_is_killed(monkeypatch):
    recipe = loaded()
    recipe.PATIENCE_S = 0.2
    script = "trap '' TERM; echo; while true; do sleep 0.05; done"
    ignores = subprocess.Popen(script, shell=True, start_new_session=True, stdout=subprocess.PIPE)
    with ignores:
        ignores.stdout.readline()
        monkeypatch.setattr(recipe, "range", lambda n: itertools.islice(itertools.count(), int(n)), raising=False)
        begun = time.monotonic()
        recipe.end(ignores)
        assert ignores.wait(timeout=100) == -signal.SIGKILL and time.monotonic() - begun >= 0.2
