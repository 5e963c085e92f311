"""The cost model of parallel training by hand, its choices where they are known, and the tool's command line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from labs.chapters.nb06.figures_plan import BATCHES, LINKS, SIZES, family, place_of
from labs.kit.errors import BadInput
from labs.parts.planning.parallel_cost import Job, Machine, Plan, best, cost, costs, fewest_gpus, plans, shape
from labs.strategy import Config, advise, main

JOB = Job(parameters=1e9, batch=32, seq=1024, layers=20, hidden=2048, vocabulary=1000)
GPUS = Machine(gpus=2, memory_bytes=80e9, flop_s=1e14, link_bytes_s=25e9, latency_s=0.0)
ALONE = cost(JOB, GPUS, Plan())


def test_one_gpu_by_hand():
    flop = 32 * 1024 * (6 * 1e9 + 12 * 20 * 2048 * 1024)
    assert ALONE.step_s == pytest.approx(flop / 1e14) and ALONE.bubble_s == ALONE.exposed_s == 0
    tokens = 32 * 1024
    assert ALONE.states_bytes == 18e9
    assert ALONE.activation_bytes == tokens * (20 * 34 * 2048 + 10 * 1000)


def test_accumulation_and_recomputation_trade_memory_for_time():
    four, again = cost(JOB, GPUS, Plan(micro_batches=4)), cost(JOB, GPUS, Plan(recompute=True))
    assert four.activation_bytes == ALONE.activation_bytes / 4 and four.step_s == ALONE.step_s
    assert again.step_s == pytest.approx(4 / 3 * ALONE.step_s)
    assert again.activation_bytes < ALONE.activation_bytes / 5 and again.states_bytes == ALONE.states_bytes


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro", [1, 2, 8, 32])
def test_a_pipeline_waits_for_its_bubble(stages, micro):
    c = cost(JOB, replace(GPUS, gpus=stages), Plan(pipeline=stages, micro_batches=micro))
    assert c.bubble_s / (c.bubble_s + c.compute_s) == pytest.approx((stages - 1) / (micro + stages - 1))
    assert c.states_bytes == pytest.approx(ALONE.states_bytes / stages)


def test_a_naive_split_is_no_faster_than_one_gpu():
    c = cost(JOB, GPUS, Plan(pipeline=2))
    assert c.compute_s + c.bubble_s == pytest.approx(ALONE.step_s) and c.step_s > ALONE.step_s
    assert c.plan.scheme == "naive split"


def test_layers_that_do_not_divide_make_the_largest_stage_the_pace():
    three = cost(replace(JOB, layers=20), replace(GPUS, gpus=3), Plan(pipeline=3, micro_batches=4))
    assert three.compute_s == pytest.approx(ALONE.compute_s / 3 * (7 * 3 / 20))


def test_ddp_hides_all_but_its_last_bucket_until_the_link_is_too_slow():
    c = cost(JOB, GPUS, Plan(data=2))
    assert c.exposed_s == pytest.approx(25 * 2**20 / 25e9) and c.states_bytes == ALONE.states_bytes
    slow = cost(JOB, replace(GPUS, link_bytes_s=1e9), Plan(data=2))
    assert slow.exposed_s == pytest.approx(4e9 / 1e9 - 2 / 3 * ALONE.compute_s / 2)


def test_sharding_divides_the_states_and_moves_three_times_the_parameters():
    c = cost(JOB, GPUS, Plan(data=2, sharded=True))
    assert c.states_bytes == pytest.approx(8e9 + 2 * 2 * 1e9 / 20)
    slow = cost(JOB, replace(GPUS, link_bytes_s=1e8), Plan(data=2, sharded=True))
    assert slow.exposed_s == pytest.approx(3 * 0.5 * 2e9 / 1e8 - slow.compute_s)


def test_tensor_parallel_moves_four_all_reduces_of_the_activations_per_layer():
    c = cost(JOB, GPUS, Plan(tensor=2))
    assert c.exposed_s == pytest.approx(4 * 20 * (2 * 2048 * 32 * 1024) / 25e9)
    assert c.states_bytes == ALONE.states_bytes / 2
    assert cost(JOB, GPUS, Plan(tensor=2, recompute=True)).exposed_s == pytest.approx(1.5 * c.exposed_s)


def test_every_plan_uses_all_gpus_and_divides_the_batch():
    found = list(plans(JOB, 4))
    assert {p.ranks for p in found} == {4}
    assert all(JOB.batch % (p.data * p.micro_batches) == 0 for p in found)
    assert {"DDP", "FSDP2", "pipeline", "naive split", "tensor", "DDP x pipeline", "DDP x tensor"} <= {
        p.scheme for p in found
    }
    assert all(p.data == 1 for p in plans(replace(JOB, batch=3), 2))


def test_the_choice_where_it_is_known():
    assert best(costs(JOB, GPUS), GPUS.memory_bytes).plan.scheme == "DDP", "fits, and the link is fast"
    small = replace(GPUS, memory_bytes=15e9)
    assert best(costs(JOB, small), small.memory_bytes).plan.sharded, "states do not fit one GPU"
    slow = replace(small, link_bytes_s=2e8)
    assert best(costs(JOB, slow), slow.memory_bytes).plan.pipeline == 2, "a pipeline moves least"
    assert best(costs(JOB, replace(GPUS, memory_bytes=1e9)), 1e9) is None


def test_fewest_gpus_is_the_first_power_of_two_that_fits():
    big = replace(JOB, parameters=7e9)
    small = replace(GPUS, memory_bytes=23e9)
    n = fewest_gpus(big, small)
    assert best(costs(big, replace(small, gpus=n)), 23e9) and not best(costs(big, replace(small, gpus=n // 2)), 23e9)
    assert fewest_gpus(big, replace(GPUS, memory_bytes=1e6), most=64) is None


@pytest.mark.parametrize("parameters", [1e6, 1.24e8, 1.3e9, 7e9, 1.75e11])
def test_the_assumed_shape_has_about_these_parameters(parameters):
    layers, hidden = shape(parameters)
    assert 12 * layers * hidden**2 == pytest.approx(parameters, rel=0.25) and hidden % 64 == 0


def test_what_a_card_s_datasheet_gives_is_used_and_named():
    config = Config(gpu="A100 80GB SXM", tflops=123.0)
    machine = config.of_machine()
    assert machine["memory_gb"] == (80, "datasheet") and machine["tflops"] == (123.0, "given")
    assert config.machine().memory_bytes == pytest.approx(79e9)
    assert set(Config().inputs()["origin"]) <= {"given", "assumed"}


def test_the_issue_s_example_fits_nowhere_and_says_what_would():
    advice = advise(Config(params=7e9, batch=32, gpus=2, memory_gb=24, link_gb_s=25))
    assert advice.choice is None and advice.speed_up is None
    assert "Nothing fits" in advice.reasons()[1] and f"{advice.enough_gpus} of these GPUs" in advice.reasons()[1]
    enough = advise(replace(advice.config, gpus=advice.enough_gpus))
    assert enough.choice and enough.reasons()[1].startswith(f"Use {enough.choice.plan}")


def test_the_table_has_one_row_per_scheme_those_that_fit_first():
    table = advise(Config(params=1.5e9, gpus=4, memory_gb=40)).by_scheme()
    fits = list(table["fits"])
    assert fits == sorted(fits, reverse=True) and "no" in fits and "yes" in fits
    times = [float(v) for v, f in zip(table["s per step"], fits, strict=True) if f == "yes"]
    assert times == sorted(times)


@pytest.mark.parametrize(("values", "told"), [
    ({"params": 0}, "params must be at least 1"), ({"gpus": 0}, "gpus must be at least 1"),
    ({"memory_gb": -1}, "memory_gb must not be negative"), ({"memory_gb": 0.5}, "lower it below 0.5"),
    ({"gpu": "A100"}, "did you mean 'A10'"), ({"gpus": 5000}, "at most 4096"), ({"params": 1e20}, "at most 1e14"),
    ({"params": math.inf}, "at most 1e14"), ({"params": math.nan}, "params must be"),
])  # fmt: skip
def test_bad_values_are_one_line(values, told):
    with pytest.raises(BadInput, match=told):
        Config(**values)


def test_the_command_prints_inputs_advice_and_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["strategy", "--params", "1e9", "--gpus", "2", "--memory-gb", "80"])
    main()
    printed = capsys.readouterr().out
    assert "hidden size" in printed and "Use DDP" in printed and "naive split" in printed


def test_a_wrong_option_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["strategy", "--parms", "1e9"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "did you mean '--params'" in capsys.readouterr().err


def test_the_star_lies_on_the_map_where_the_job_is():
    links = list(LINKS.values())
    for k, link in enumerate(links):
        for i, batch in enumerate(BATCHES):
            config = Config(params=SIZES[2], batch=batch, link_gb_s=link)
            assert place_of(config) == (pytest.approx(k * len(BATCHES) + i), pytest.approx(2))
    assert place_of(Config(params=1e13, batch=1))[1] == len(SIZES) - 1, "outside: at the edge"


def test_a_plan_has_the_colour_of_its_scheme():
    assert family(None) == "nothing fits" and family(Plan()) == "one GPU"
    assert family(Plan(pipeline=2)) == family(Plan(pipeline=2, micro_batches=4)) == "pipeline"
    assert family(Plan(data=2, tensor=2)) == "two of them" and family(Plan(data=2, sharded=True)) == "FSDP2"
