"""Whether the exchange that the doctor tells is what a training without one saves."""

import statistics
import subprocess
import sys

import pytest
from doctor_training import environment
from test_doctor_ranks import SCRIPT, free_port, run

from labs.doctor import estimated_gain
from labs.doctor.schedule import LEAST_ROUNDS
from labs.kit.measure import estimate

pytestmark = [pytest.mark.long, pytest.mark.quiet, pytest.mark.timeout(600)]
LIMIT_S = 250


def test_exposed_exchange_is_the_step_less_the_step_without_exchange(tmp_path, capfd):
    """DDP's exchange takes 50 ms longer than it does. The training alone, with and without it, is taken in turn."""
    wide = ["--wide", "256", "--exchange", "0.05"]
    alone = [[_step_s(tmp_path, *wide, *more) for more in ((), ("--no-sync",))] for _ in range(LEAST_ROUNDS)]
    saved = estimate([with_s - without_s for with_s, without_s in alone], "s")
    facts = run(tmp_path, SCRIPT, *wide, modes=("no exchange",))
    told = estimate([a - b for a, b in estimated_gain.pairs_s(facts, estimated_gain.NO_EXCHANGE)], "s")
    with capfd.disabled():
        print(f"\nexposed exchange by the doctor {told}, step(DDP) - step(no_sync) {saved}")
    assert told.low < 1.2 * saved.high and saved.low < 1.2 * told.high
    assert told.value > 0.05 and saved.value > 0.05


def _step_s(tmp_path, *args):
    """Median step of rank 0, of two ranks alone."""
    times = tmp_path / "times.txt"
    command = [sys.executable, SCRIPT, *args, "--steps", "30", "--times", str(times)]
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env=environment() | places | {"RANK": rank}) for rank in "01"]
    try:
        assert not any(rank.wait(LIMIT_S) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return statistics.median(map(float, times.read_text().split()[5:]))
