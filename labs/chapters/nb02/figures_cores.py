"""Figures of notebook 02 about cores: workers a model needs, augmentation, threads."""

from __future__ import annotations

from labs import loader_cores
from labs.common.loading.rates import counted
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import paired_ratio, verdict
from labs.kit.plot import SERIES, bars, curve, figure, points, prediction, show
from labs.kit.record import Records


def needed(run: Records, guess: Prediction) -> None:
    """Figure: share of its own rate that the model reaches, by workers, and what the rule expects."""
    asked = run.where("predicted_workers")[0]
    times, workers = asked.case["model_rate"], int(asked.value)
    shares = {n: share.scaled(100, "%") for n, share in sorted(loader_cores.fed(run, times).items())}
    message = f"Predicted: {counted(workers)}. Measured: {loader_cores.enough_text(run, times)}"
    fig, ax = figure(
        message,
        xlabel="num_workers",
        ylabel="share of the rate of\nthe model alone (%)",
        records=run,
        size=(6.6, 3.3),
        legend_below=True,
    )
    points(ax, list(shares), shares.values(), label="model and loader together", color=SERIES[0])
    rule = [100 * expected_share(n, times) for n in shares]
    curve(ax, list(shares), rule, label="rule: workers x rate of one, until the model is fed", color=SERIES[1])
    prediction(ax, workers, guess)
    ax.set_xticks(list(shares))
    ax.set_xlim(min(shares) - 0.5, max(shares) + 0.5)
    ax.set_ylim(0, max(115, 1.05 * float(guess)))
    show(fig, alt=f"{message}. " + "; ".join(f"{counted(n)}: {share}" for n, share in shares.items()))
    one = run.one("images_per_s", way="one worker").value
    say(
        f"One worker gives {one:,.0f} images/s, the model takes {times:g} times as many. "
        f"{guess.against(shares[workers])}{_why_short(run, times, workers)}"
    )


def expected_share(workers: int, times: float) -> float:
    """Share of its rate that a model of `times` one worker's rate reaches, if every worker has a core of its own."""
    return min(1.0, workers / times)


def _why_short(run: Records, times: float, workers: int) -> str:
    """Which of the rule's assumptions failed, where its number of workers is shown to be too small."""
    shares = loader_cores.fed(run, times)
    if shares[workers].high >= loader_cores.ENOUGH:
        return ""
    both = {r.case["workers"]: r.samples for r in run.where("images_per_s", way="both", model_rate=times)}
    few = min(both)
    cores = int(run.provenance["cores"])
    said = [f"Here {counted(workers)} are not enough, with {cores} cores for workers, trainer and all other programs."]
    if shares[few].high < expected_share(few, times):
        told = f"{shares[few].scaled(100, '%')} in place of {expected_share(few, times):.0%}"
        said.append(f"With {counted(few)}, too, it is {told}: beside the model, a worker gave less than before, alone.")
    gain, hoped = paired_ratio(both[workers], both[few]), expected_share(workers, times) / expected_share(few, times)
    if few < workers and gain.high < hoped:
        said.append(f"{counted(workers)} over {counted(few)}: {gain}, where the rule expects {hoped:.3g} x.")
    said.append(
        verdict(paired_ratio(both[workers + 1], both[workers]), f"{counted(workers + 1)} over {counted(workers)}") + "."
    )
    return " " + " ".join(said)


def augmentation(run: Records, guess: Prediction) -> None:
    """Figure: time per image of each stage; the guess is the share of crop, flip and colour jitter."""
    stages = {r.case["stage"]: r for r in run.where("stage_s")}
    share = loader_cores.augmentation_share(run).scaled(100, "%")
    longest = max(stages, key=lambda s: stages[s].value)
    rivals = [s for s in stages if paired_ratio(stages[s].samples, stages[longest].samples).high >= 1]
    most = f"the longest stage: {longest}" if rivals == [longest] else f"the longest: {' or '.join(rivals)}"
    message = f"Crop, flip and colour jitter: {share.value:.0f} % of an image's time; {most}"
    fig, ax = figure(
        message, xlabel="time per image (ms)", ylabel="stage", records=run, size=(6.8, 3.3), legend_below=True
    )
    times = {s: [1e3 * t for t in r.samples] for s, r in stages.items()}
    bars(ax, list(times), [loader_cores.measure.estimate(t) for t in times.values()], label="one process")
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. " + "; ".join(f"{s}: {1e3 * r.value:.2f} ms" for s, r in stages.items()))
    one_by_one, batched = [stages[s].samples for s in ("flip", "colour jitter")], run.one("batched_jitter_s")
    ratio = paired_ratio([sum(t) for t in zip(*one_by_one, strict=True)], batched.samples)
    on = "the GPU" if batched.case["on"] == "cuda" else "one thread of the CPU"
    told = verdict(ratio, f"Time for flip and jitter by Pillow, image by image, over both by torch for a batch on {on}")
    say(f"* Crop, flip and jitter: {share} of the time. {guess.against(share)}\n* {told}.")


def threads(run: Records) -> None:
    """What happens if every worker uses as many threads as there are cores, in a sentence."""
    rates = {r.case["threads"]: r for r in run.where("items_per_s")}
    most = rates[max(rates)]
    ratio = paired_ratio(most.samples, rates[1].samples)
    case = most.case
    told = (
        f"{case['workers']} workers on {case['cores']} cores, {case['threads']} threads each against one each, "
        "items per second"
    )
    say(f"{verdict(ratio, told)}.")
