"""What the figures of notebook 01 say: chosen by the records, each sentence with records that choose another one."""

from __future__ import annotations

import pytest
from test_claims_nb01 import around, batch_size, make, timing, utilisation, validation

from labs.chapters.nb01 import figures, figures_batch
from labs.kit.check import predict
from labs.kit.record import Records


@pytest.fixture
def shown(monkeypatch):
    """Alternative texts of figures and sentences, in order."""
    found = []
    for module in (figures, figures_batch):
        monkeypatch.setattr(module, "show", lambda fig, alt: found.append(alt))
        monkeypatch.setattr(module, "say", found.append)
    return found


def ladder(**changes):
    figures.ladder({"CNN": Records(timing(**changes))}, predict(1.0, "ratio", "x"))


def test_the_ladder_says_what_is_next_to_nothing(shown):
    ladder(answers=(1.4, 1e-4, 1.4, 1.4, 1.4))
    alt, text = shown
    assert "as printed is not shown to be wrong; with its data outside it says next to nothing. " in alt
    assert "wait for the device: no change" in text and "below what was modelled" not in text


def test_the_ladder_of_a_gpu_is_measured(shown):
    ladder(answers=(2.8, 0.7, 2.8, 1.4, 1.4), device="cuda")
    assert "says 2 times the truth; with its data outside it says 0.5 times the truth" in shown[0]
    assert "+ warm up first: 0.5" in shown[1] and "measured" in shown[1]


WAITS = (
    ("data on the device", 0.1),
    ("x.to(device, non_blocking=True)", 0.1),
    ("x.to(device)", 0.9),
    ("loss.item()", 1),
)


def waits(device, free=0.1, copying=0.9):
    kind = "modelled" if device == "cpu" else "measured"
    shares = dict(WAITS) | {"data on the device": free, "x.to(device)": copying}
    return Records(
        make(
            "timing",
            "seen_share",
            "1",
            around(s),
            device=device,
            kind=kind,
            way=way,
            steps=10,
            batch=16,
            waits=way in ("x.to(device)", "loss.item()"),
        )
        for way, s in shares.items()
    )


def test_hidden_waits(shown):
    figures.hidden_waits(waits("cpu", free=0.001))
    figures.hidden_waits(waits("cuda", free=0.97, copying=0.95))
    figures.hidden_waits(waits("cuda", copying=0.6))
    figures.hidden_waits(waits("cuda", free=0.4, copying=0.94))
    emulated, launching, other, large = shown
    assert "on the emulated queue" in emulated and "all but the last of 10 steps; no copy" in emulated
    assert "| little |" in emulated and "and not 91 %, all but the last" in other
    assert "on a GPU" in launching and "launching takes as long" in launching
    assert "| some |" in large and "all but the last of 10 steps (its launches are seen: 94 %)" in large


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (1.0, "no drift that this run can show"),
        (1.03, "a drift, but a small one"),
        (1.3, "**the timed part was not steady**"),
        (0.7, "**the timed part was not steady**"),
    ],
)
def test_a_drift_of_the_timed_part_is_told(later, words, shown):
    run = [r for r in timing() if r.case.get("mode") != "train"]
    samples = [*around(1e-3), *around(1e-3 * later, 3)]
    run += [make("timing", "step_s", "s", samples, mode="train"), make("timing", "warm_up_steps", "", 3, settled=True)]
    run = [
        r if r.case.get("mode") != "no_sync" else make("timing", "step_s", "s", samples, mode="no_sync") for r in run
    ]
    figures.trace(Records(run))
    assert words in shown[-1] and ("drifts" in shown[0]) is (later != 1.0)
    assert "is not shown to take longer than without" in shown[-1], "the same times with and without the exchange"


def test_a_step_of_one_rank_is_no_step_of_ddp(shown):
    run = [*timing(ranks=(1.0,)), make("timing", "warm_up_steps", "", 3, settled=False)]
    figures.trace(Records(run))
    assert "one device" in shown[-1] and "never called it steady" in shown[-1] and "too few" in shown[-1]


def test_blocked_and_interleaved(shown):
    for blocked, fair, words in (
        (1.5, 1.0, "no difference, as there is none"),
        (1.0, 1.2, "a difference that is not there"),
    ):
        figures.neighbour(Records(validation(one_after_the_other=blocked, in_turn=fair)), predict(1.0, "ratio", "x"))
        assert words in shown[-1]
    assert "the neighbour is not seen this time" in shown[-2]


def test_pairs_beside_the_square_law():
    def table(**needs):
        return [
            {"slower": int(s[1:]) / 100, "pairs": p, "share": figures.Estimate(float(p >= n), 0, 1, 9)}
            for s, n in needs.items()
            for p in figures.PAIRS
        ]

    assert "that is 25 times, and here 4." in figures._growth_text(table(s10=10, s2=40))
    assert "cannot test that" in figures._growth_text(table(s10=5, s2=40))
    assert "2 %: more than 40" in figures._growth_text(table(s10=10, s2=80))


def test_busy_jobs(shown):
    figures_batch.utilisation(Records(utilisation()), predict(1.0, "share", "%"))
    assert "A wait shows" in shown[-1] and "small products, memory traffic, one number at a time" in shown[-1]
    figures_batch.utilisation(Records(utilisation(busy=(0.9, 0.9, 0.9, 0.9, 0.81))), predict(1.0, "share", "%"))
    assert "Whether a planted wait shows cannot be told" in shown[-1]
    figures_batch.utilisation(Records(utilisation(speeds=(1,) * 5, busy=(1,) * 5)), predict(1.0, "share", "%"))
    assert "Even a planted wait does not show; no job that looks busy was slow" in shown[-1]


@pytest.mark.parametrize(
    ("steps", "title", "words"),
    [
        ({4: 1.0, 32: 1.2, 256: 3.0, 2048: 20.0}, "a batch of 117; beyond 256 there is 20 % to gain", "117 samples"),
        ({32: 1.0, 256: 8.4, 2048: 64.0}, "no fixed part of a step to be seen", "a step costs whatever its batch"),
        (
            {32: 2.0, 256: 1.9, 2048: 15.2},
            "no cost per sample to be seen; beyond 256 no gain is shown",
            "a sample costs",
        ),
        ({32: 1.2, 256: 3.0}, "One device: half of the limit at a batch of 117.", "117 samples"),
    ],
)
def test_two_batches_may_not_tell_where_half_of_the_limit_is(steps, title, words, shown):
    figures_batch.throughput(Records(batch_size(steps)), predict(117, "batch"))
    assert title in f"{shown[0].rpartition('. ')[0]}." and words in shown[1].partition("* 2 devices")[0]


def test_a_step_in_the_table_of_mfu_says_whether_it_is_of_ddp():
    ddp = figures_batch.mfu_table({"cnn": Records(timing(no_sync=0.5))})
    assert [way for _, way in ddp.index] == ["DDP without its exchange (no_sync)", "DDP"]
    assert ddp["MFU"].iloc[0].startswith("4.2") and ddp["MFU"].iloc[1].startswith("2.1")
    alone = figures_batch.mfu_table({"cnn": Records(timing(ranks=(1.0,)))})
    assert [way for _, way in alone.index] == ["one device"]
