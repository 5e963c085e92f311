"""Figure and sentences of notebook 03 on overlap: what every rank computes and exchanges during one step."""

from __future__ import annotations

from labs import ddp_overlap
from labs.common.data_parallel import step_timeline
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import show
from labs.kit.record import Records


def timeline(run: Records, guess: Prediction) -> None:
    """Figure: one step of median length on every rank; then what is hidden, over all steps."""
    found = ddp_overlap.overlap(run)
    message = f"{found.hidden.value:.0f}% of the time in all-reduces is hidden behind backward"
    fig = step_timeline.draw(run, message)
    show(fig, alt=f"{message}. Of {found.under_way} with all-reduces under way, {found.exposed} are exposed.")
    say(overlap_text(run, guess))


def overlap_text(run: Records, guess: Prediction) -> str:
    """What is hidden, what it costs, and whether the timeline's account is that of the clock."""
    found = ddp_overlap.overlap(run)
    lines = [f"{guess.against(found.hidden)}", *ddp_overlap.answer(run)]
    return "\n".join(f"* {line}" for line in lines)
