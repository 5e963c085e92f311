"""Shapes that change: as many FLOPs as fixed ones, new to every arm, and the switch put back."""

import pytest
import torch

from labs import changing_shapes
from labs.changing_shapes import ARMS, Config, schedule
from labs.kit.errors import BadInput
from labs.kit.launch import launch


class Alone:
    """What `run` needs of a rank, in this process."""

    rank, device = 0, torch.device("cpu")

    def record(self, metric, unit, samples, **case):
        return metric

    def progress(self, *_):
        pass

    def barrier(self):
        pass


def test_predict_by_hand():
    assert changing_shapes.predict(1.0, 6.0, steps=100, shapes=100) == pytest.approx(7.0)
    assert changing_shapes.predict(1.0, 6.0, steps=100, shapes=1) == pytest.approx(1.06)


def test_no_changing_shape_is_seen_twice_and_the_mean_is_the_fixed_one():
    found = schedule(Config(), 31)
    changing = [h for b in (False, True) for pair in found["changing", b] for h in pair]
    assert len(set(changing)) == len(changing) == 124 and min(changing) > 0
    for arm in ARMS:
        assert all(sum(pair) == 2 * 96 for pair in found[arm]) and len(found[arm]) == 31
    assert all(found["seen", b][1:] == found["changing", b][:-1] for b in (False, True)), "a round later"
    far = [sum(abs(pair[0] - 96) for pair in found["changing", b][:30]) for b in (False, True)]
    assert far[0] == far[1], "over an even number of rounds both arms are equally far from the fixed height"


def test_flop_are_equal_and_follow_from_the_sizes():
    config = Config(height=20, width=8, channels=4, batch=2, rounds=3)
    found = schedule(config, 3)
    forward = 2 * 9 * (3 * 4 + 4 * 4) * 20 * 8 * 2
    backward = 2 * 9 * (3 * 4 + 2 * 4 * 4) * 20 * 8 * 2  # the first convolution's input needs no gradient
    assert {changing_shapes.step_flop(config, found[arm]) for arm in ARMS} == {forward + backward}


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_arm_is_measured(nproc):
    run = launch("changing_shapes", nproc=nproc, smoke=True, oversubscribe=True)
    for benchmark in (False, True):
        for shapes in ("fixed", "changing"):
            record = run.one("step_s", shapes=shapes, cudnn_benchmark=benchmark)
            assert len(record.samples) == 3 and min(record.samples) > 0
        assert len(run.one("seen_step_s", cudnn_benchmark=benchmark).samples) == 3
    assert len({r.value for r in run.where("step_flop")}) == 1


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_switch_is_put_back(monkeypatch, before, fails):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    seen = []

    def train(module, x):
        if x.device.type != "meta":  # there, FLOPs are counted
            seen.append(torch.backends.cudnn.benchmark)
        if fails and len(seen) == 5:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(changing_shapes, "train", train)
    steps = changing_shapes.run(Config(rounds=1, height=9, width=4, channels=2), Alone())
    if fails:
        with pytest.raises(RuntimeError):
            list(steps)
    else:
        list(steps)
        assert len(seen) == 2 * 12 and sum(seen) == 12  # warm-up and one round: six arms of two steps each
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"width": 0}, "width must be at least 1"),
        ({"channels": -1}, "channels must be"),
        ({"batch": 0}, "batch must be"),
        ({"height": 62}, r"height must be above 62 for 30 rounds of new heights, not 62: raise height or lower rounds"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("changing_shapes", nproc=1, **values)
