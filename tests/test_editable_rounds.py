"""The rounds that learners edit: as they are committed, and after each edit that the notebook suggests.

The cell itself is run, as the notebook holds it, so that what is tested is what is read.
"""

import contextlib
import io
import linecache
import re
import time
from pathlib import Path

import nbformat
import pytest
from again import holds_soon

ROOT = Path(__file__).parents[1]


def run(number, cell_id, *edits, ranks=2):
    """What the cell prints after replacing old by new text in it, given as pairs; and the seconds that it took."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    names = {"__name__": "__main__", "NPROC": ranks}
    for cell in cells:
        if re.match(r"(import|from) ", cell.source):
            exec(cell.source, names)
    source = next(c.source for c in cells if c.id == cell_id)
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is not once in the cell"
        source = source.replace(old, new)
    name = f"<cell {cell_id} {len(edits)} {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), names)
    return printed.getvalue(), time.monotonic() - start


def without(line):
    return line + "\n", "\n"


def test_00_arrays_in_a_cache_are_not_memory():
    assert len(run("00", "edit-triad")[0].splitlines()) == 2
    counted_twice, _ = run("00", "edit-triad", ("return 3 *", "return 300 *"))
    assert counted_twice.count("Memory does not give that") == 2


def test_00_the_report_is_of_this_machine():
    assert run("00", "report")[0].startswith(("torch sees no CUDA device", "cuda:0 is "))


def test_01_without_synchronising_the_clock_times_the_orders():
    right = lambda: run("01", "edit-clock")[0]  # noqa: E731
    assert holds_soon(lambda told: told.count("you timed the work") == 2, right(), right)
    wrong, _ = run("01", "edit-clock", without("    stream.synchronize()  # delete this line"))
    assert wrong.count("you timed how fast work can be ordered") == 2


def test_01_copies_and_readings_wait_in_secret():
    blind = without("    stream.synchronize()  # delete this line")
    blocking, _ = run(
        "01", "edit-clock", blind, ("        # x = stream.to_device(batch)  ", "        x = stream.to_device(batch)  ")
    )
    assert blocking.count("how fast work can be ordered") == 0, "each copy waits for the step before it"
    reading, _ = run("01", "edit-clock", blind, ("        # stream.item(", "        stream.item("))
    assert reading.count("how fast work can be ordered") == 0
    pinned, _ = run(
        "01",
        "edit-clock",
        blind,
        ("        # x = stream.to_device(batch, non", "        x = stream.to_device(batch, non"),
    )
    assert pinned.count("how fast work can be ordered") == 2, "a copy that does not block waits for nothing"


def test_01_making_data_inside_is_seen():
    slow, _ = run("01", "edit-clock", ("    stream.synchronize()", "    time.sleep(2)\n    stream.synchronize()"))
    assert slow.count("something besides the steps") == 2


def test_02_without_seeds_the_workers_draw_alike():
    alike, _ = run("02", "edit-seeds", (", worker_init_fn=seed_worker", ""))
    assert "rank 0: 64 random numbers, 32 of them drawn before" in alike
    assert "So 75 % of the augmentation is wasted" in alike  # 2 workers on 2 ranks: four times the same
    ranks, _ = run("02", "edit-seeds", ("    torch.manual_seed(dist.get_rank())", "    torch.manual_seed(0)"))
    assert "all ranks: 64 drawn by another rank, too" in ranks and "So 50 % " in ranks


def test_03_without_set_epoch_every_epoch_has_one_order():
    wrong, _ = run("03", "edit-set-epoch", without("        sampler.set_epoch(epoch)  # delete this line"))
    assert wrong.endswith("1 order in 3 epochs: the model meets the same batches again, in the same order.\n")
    assert wrong.count("128 + 128 images read, 256 of 256 different") == 3


def test_03_one_rank_reads_everything():
    assert "epoch 0: 256 images read, 256 of 256 different" in run("03", "edit-set-epoch", ranks=1)[0]


UNSCALE = "    scaler.unscale_(optimizer)  # move this line\n"
CLIP = "    norm = clip_grad_norm_(model.parameters(), editable.MAX_NORM)\n"
STEP = "    scaler.step(optimizer)\n"


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (
            [(UNSCALE + CLIP, CLIP + UNSCALE)],
            r"clipping saw is 6[\d.,e+]+ times what it is in FP32.*moved .* it is wrong",
        ),
        ([(UNSCALE + CLIP + STEP, CLIP + STEP + UNSCALE)], r"Your step stops: RuntimeError: unscale_\(\) "),
        ([(UNSCALE, UNSCALE + UNSCALE)], r"Your step stops: RuntimeError: unscale_\(\) has already been called"),
        ([(CLIP, "    norm = x.new_ones(())\n")], "and it is wrong|it is wrong"),
        ([("    return norm\n", "")], "Your step stops: TypeError: the step must return the norm"),
    ],
    ids=["below clipping", "below step", "twice", "no clipping", "no norm"],
)
def test_04_a_moved_unscale_is_seen(edits, words):
    assert re.search(words, run("04", "edit-unscale", *edits)[0], re.DOTALL)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ('    model.load_state_dict(state["model"])', 6),
        ('    scheduler.load_state_dict(state["scheduler"])', None),
        ('    optimizer.load_state_dict(state["optimizer"])  # delete this line, or another', None),
        ('    torch.set_rng_state(state["random"])', 6),
    ],
    ids=["model", "scheduler", "optimizer", "random"],
)
def test_05_every_forgotten_piece_changes_the_losses(line, step):
    told, _ = run("05", "edit-state", without(line))
    found = re.match(r"The loss differs from step (\d+) on, and the parameters at the end by [\d.e+]+ % ", told)
    assert found and told.endswith("No error was raised.\n")
    assert int(found[1]) == step if step else int(found[1]) > 6


SEND = "        dist.send(hidden.detach(), dst=1)  # swap this line\n"
RECEIVE = "        dist.recv(gradient, src=1)  # and this one\n"


def test_06_a_swap_ends_in_seconds_and_names_the_line():
    run("06", "edit-deadlock")  # the first launch imports torch
    told, _ = run("06", "edit-deadlock", (SEND + RECEIVE, RECEIVE + SEND))
    assert told.splitlines() == [
        "Given up after 5 s: rank 0 waits for rank 1 in line 5, dist.recv(gradient, src=1)",
        "Given up after 5 s: rank 1 waits for rank 0 in line 10, dist.recv(hidden, src=0)",
        "Each waits for the other, and would for ever: a deadlock.",
    ]


def test_06_a_missing_message_ends_too():
    told, _ = run("06", "edit-deadlock", ("        dist.send(hidden.grad, dst=0)\n", ""))
    assert "rank 0 waits for rank 1 in line 6, dist.recv(gradient, src=1)" in told
    assert told.endswith("The other rank has ended its step, and would never have answered.\n")


def test_06_a_half_that_does_not_train_is_named():
    told, _ = run("06", "edit-deadlock", ("        hidden.backward(gradient)\n", ""))
    assert told == "The step ends, and the gradient in rank 0's half is not that of one process.\n"


def nats(told):
    """(the learner's loss, that with all gradients)."""
    found = re.search(r": ([\d.]+) nats, with all gradients ([\d.]+) nats", told)
    return float(found[1]), float(found[2])


@pytest.mark.long
def test_07_without_error_feedback_less_is_learned():
    """From the same seeds: nothing but the edit differs."""
    kept, everything = nats(run("07", "edit-feedback")[0])
    lost, same = nats(run("07", "edit-feedback", ("gradient = gradient + left_out", "pass"))[0])
    assert everything == same and everything < kept < lost


RING = "levels.ring_in_order(x, [0, 1, 2, 3])"


@pytest.mark.parametrize(
    ("line", "inside", "out"),
    [
        (RING, 1.5, 1.5),
        ("levels.ring_in_order(x, [0, 2, 1, 3])", 0.0, 3.0),
        ("levels.hierarchical_all_reduce(x, inside, across)", 3.0, 1.0),
        ("levels.hierarchical_all_reduce(x, across, inside)", 1.0, 3.0),
    ],
)
def test_08_what_leaves_a_node_is_counted(line, inside, out):
    told, _ = run("08", "s2-12", (RING, line))
    assert told.splitlines() == [
        "the sum is right on all ranks",
        f"inside each node {inside} vectors are sent, out of each node {out}",
    ]


def timers(told):
    """{rank: {column: ms}} of the table, and the rank that is last most often."""
    head, *rows, last = told.splitlines()
    columns = ["data", "forward", "backward", "optimizer", "whole step", "arrives"]
    assert all(column in head for column in columns)
    found = {int(r.split()[0]): dict(zip(columns, map(float, r.split()[1:]), strict=True)) for r in rows}
    return found, int(re.search(r"rank (\d)", last)[1])


def test_09_a_rank_that_is_late_in_backward_is_named_by_its_arrival():
    def once():
        return timers(run("09", "edit-late")[0])

    def named(seen):
        found, last = seen
        return last == 1 and found[0]["arrives"] < 15 < found[1]["arrives"] and found[0]["backward"] > 40

    assert holds_soon(named, once(), once)


def test_09_late_in_data_shows_in_that_ranks_own_timer():
    def once():
        return timers(run("09", "edit-late", ('place == "backward"', 'place == "data"'))[0])

    def shown(seen):
        found, last = seen
        return last == 1 and found[1]["data"] >= 30 > found[0]["data"]

    assert holds_soon(shown, once(), once)


UPDATE = "            continue\n"


def drifted(told):
    """What the first line says, and the losses of both ranks after each comparison, with those of the healthy loop."""
    first, head, *rows = told.splitlines()
    assert head.split()[:6] == ["after", "step", "rank", "0", "rank", "1"] and len(rows) == 7
    return first, {row.split()[0]: [float(loss) for loss in row.split()[1:3]] for row in rows}


def test_10_a_left_out_update_is_found_and_the_losses_show_it():
    first, losses = drifted(run("10", "edit-drift")[0])
    assert first == "Compared every 5 steps, the replicas differ after step 15, in 0.bias, 0.weight, 2.bias, 2.weight."
    assert losses["10"][0] == losses["10"][1] and abs(losses["15"][0] - losses["15"][1]) > 0.01


def test_10_a_gradient_that_is_changed_by_a_hundred_thousandth_is_found_and_no_loss_shows_it():
    scaled = "            next(model.parameters()).grad *= 1.00001\n"
    first, losses = drifted(run("10", "edit-drift", (UPDATE, scaled))[0])
    assert first == "Compared every 5 steps, the replicas differ after step 15, in 0.weight."
    assert all(abs(a - b) < 0.0015 for a, b in losses.values()), "to the third digit, which is what is printed"


def judged_11(told):
    """{truth: how many of six comparisons are wrong by over 10 %}, and all that they said."""
    rows = [
        re.search(r"truth ([\d.]+)  your answers (.+)  wrong by over 10%: (\d) of 6$", line)
        for line in told.splitlines()
    ]
    return {float(r[1]): int(r[3]) for r in rows}, {float(r[1]): [float(x) for x in r[2].split()] for r in rows}


COMPARE_IN_TURN = "[a, b, b, a] * (rounds // 2)"
FOOLED_11 = {
    "one after the other": ((COMPARE_IN_TURN, "[a] * rounds + [b] * rounds"), lambda said, truth: said > 1.1 * truth),
    "best against median": (
        ("statistics.median(ratios)  #", "min(seconds[b]) / statistics.median(seconds[a])  #"),
        lambda said, truth: said < 0.9 * truth,
    ),
    "a pair or two": (("rounds=20", "rounds=2"), lambda said, truth: abs(said / truth - 1) > 0.1),
}


@pytest.mark.quiet
def test_11_an_honest_comparison_survives_a_neighbour():
    """Seldom wrong, while each edit is wrong nearly always: other programs on both cores spoil a comparison, too."""
    once = lambda: judged_11(run("11", "edit-compare")[0])[0]  # noqa: E731
    assert holds_soon(lambda wrong: sum(wrong.values()) <= 4, once(), once)


@pytest.mark.quiet
@pytest.mark.parametrize("name", FOOLED_11)
def test_11_each_of_the_three_edits_is_fooled_on_both_questions(name):
    edit, off = FOOLED_11[name]

    def once():
        return judged_11(run("11", "edit-compare", edit)[0])[1]

    def fooled(said):
        return all(sum(off(x, truth) for x in answers) >= 4 for truth, answers in said.items())

    assert holds_soon(fooled, once(), once)


def test_10_without_the_planted_line_nothing_differs():
    first, losses = drifted(run("10", "edit-drift", (UPDATE, "            pass\n"))[0])
    assert first == "After 30 steps and 6 comparisons the replicas are the same, bit for bit."
    assert losses["30"] == losses["healthy"] and losses["30"][0] == losses["30"][1]
