"""The ten names of a notebook: what they return and print, and functions of a cell in a launch."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch import nn

from labs.kit import notebook, plot
from labs.kit.check import quantity
from labs.kit.errors import BadInput
from labs.kit.hardware import place
from labs.kit.notebook import Results, compare, launch, predict, recorded, run_on_ranks, show_figure
from labs.kit.record import Record


def results(**layout):
    layout = {"world_size": 2, "device": "cpu"} | layout
    return Results(
        [
            Record("x", "step", "ms", (1.0, 2.0), case={"way": "a"}, layout=layout),
            Record("x", "step", "ms", (3.0,), case={"way": "b"}, layout=layout | {"rank": 1}),
            Record("x", "gradient_bytes", "B", (8.0,), layout=layout),
        ]
    )


def test_a_frame_has_a_row_per_sample_and_the_unit_in_its_column():
    frame = results().frame("step")
    assert list(frame["step_ms"]) == [1.0, 2.0, 3.0] and list(frame["sample"]) == [0, 1, 0]
    assert list(frame["way"]) == ["a", "a", "b"] and frame["rank"].isna().sum() == 2
    assert list(results().frame("gradient_bytes").columns) == ["sample", "gradient_bytes"]
    with pytest.raises(LookupError, match="there are gradient_bytes, step"):
        results().frame("time")
    assert Results().frame("step").empty


def test_recorded_is_of_a_gpu_or_published_or_empty(capsys):
    assert recorded("hardware_probe").provenance["gpus"]
    assert {r.kind for r in recorded("pytorch_ddp")} == {"published"}
    assert len(recorded("data_parallel")) == 0
    assert capsys.readouterr().out == "No GPU run of data_parallel has been recorded yet.\n"


def test_a_guess_is_shown_beside_the_answer_and_drawn(capsys):
    guess = predict(1.6, "speedup", unit="x")
    guess.reveal(compare([2.0, 2.2, 2.1] * 3, [2.0] * 9))
    guess.reveal(1.88, kind="published")
    predict(None, "speedup", unit="x").reveal(3)
    assert capsys.readouterr().out.splitlines() == [
        "You said 1.6x; measured 1.05x (1.00 to 1.10).",
        "You said 1.6x; published 1.88x.",
        "You didn't guess; measured 3x.",
    ]
    _, ax = plt.subplots()
    guess.mark(ax)
    guess.mark(ax, row=1)
    assert len(ax.lines) == 1 and len(ax.collections) == 1
    assert [quantity(v, "ms") for v in (0.0123, 1.234, 12.34, 1234.0)] == ["0.012 ms", "1.23 ms", "12.3 ms", "1,234 ms"]


def test_few_pairs_are_warned_of():
    with pytest.warns(UserWarning, match="3 pairs"):
        compare([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])


def test_a_figure_says_what_it_shows_and_where_its_numbers_come_from(monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda bundle, raw: shown.append(bundle))
    fig, ax = plt.subplots(figsize=(4, 2))
    ax.set_title("A title that is much too long for one line of a figure that is only four inches wide")
    show_figure(fig, results(), alt="Two bars.\n  The first is longer.")
    assert shown[0]["text/plain"] == "[Figure: Two bars. The first is longer.]"
    assert "measured here" in shown[0]["text/html"] and "\n" in fig._suptitle.get_text()
    assert len(plot.to_png(fig)) < plot.MAX_PNG_BYTES
    show_figure(plt.figure(), pd.DataFrame({"ms": [1.0]}), alt="What a cell has timed.")
    assert "measured here" in shown[1]["text/html"]
    with pytest.raises(BadInput, match="alt="):
        show_figure(fig, alt="")


def test_functions_of_a_cell_run_on_the_devices_that_are_there():
    def tiny():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    run = launch("data_parallel", min(2, torch.get_num_threads() + 1), model=tiny, smoke=True, oversubscribe=True)
    assert run[0].config["model"] == "cell:tiny"
    assert run.one("gradient_bytes").value == 4 * 7850
    assert run_on_ranks(lambda: torch.cuda.is_available(), 2) == [place(2, oversubscribe=True)[0].kind != "cpu"] * 2

    def wrong():
        return nn.Linear(5, 10)

    with pytest.raises(BadInput, match="model 'cell:wrong' cannot be built"):
        launch("data_parallel", 2, model=wrong, smoke=True, oversubscribe=True)
