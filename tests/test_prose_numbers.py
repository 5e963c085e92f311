"""No number of a measurement is typed into prose: of the notebooks' texts, and of what their figures and verdicts say.

What prose_numbers.py finds and cannot trace to a setting of the same section or to a link needs a line here, with its
reason. Reasons:

    defined     true by definition: nobody measured it
    given       what an exercise or an example sets out from, made up
    arithmetic  follows from numbers beside it
    datasheet   a published size, speed or default, kept in labs/kit/gpus.toml, records/published or torch
    question    a learner is asked about it
    work        how long somebody or a command is busy, told so that a break can be planned
    rule        a rule of thumb, or the limit of a verdict
    quoted      an article's words, no fact of ours
    set PATH NAME   a constant of this program, which must still have that value
"""

import ast
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from prose_numbers import QUANTITY, ROOT, UNITS, quantities, settings, typed_numbers, unsupported

from labs import bucket_overlap, many_ranks, slowest_rank, two_nodes
from labs.models import MODELS
from labs.parts.sharding import five_ways

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REASONS = {"work", "defined", "given", "arithmetic", "datasheet", "question", "rule", "quoted", "set"}

# notebook, cell: numbers: reason. How long the work takes is not listed: tests/test_agenda.py holds those minutes.
PROSE = """
00 0d2ca74b: 95 %: defined
00 544c27a6: twice: quoted
00 5681f724: twice: datasheet
00 62e7df0f: 150 ms | 100 ms: arithmetic
00 003e0acc: twice: question
01 need: 95 %: defined
01 m2: 95 %: defined
01 m2: 5 % | 10 %: question
01 m3: 3 %: rule
01 ex2: 95 %: defined
01 ex4: 2 % | 4 times | 20 %: given
02 code-pinned-text: 0.15 MB: arithmetic
02 explore-workers-text: 800 images/s: question
02 needed: 1.4 times: set labs/loader_cores.py model_rates
02 needed: 90 %: set labs/loader_cores.py ENOUGH
02 m6: 0 %: defined
02 m9: 4 MiB: set labs/parts/traps/shm.py LIMIT_BYTES
02 r5: twice: rule
02 m11: 5 %: set labs/parts/tuning/rules.py TOLERANCE
02 ex3: 3 %: given
03 title: half: question
03 r1: twice: defined
03 explore-speedup-text: 20 ms | 90 %: question
03 r6: 0.25 MiB: set labs/gradient_accumulation.py bucket_cap_mb
04 title: 20 %: quoted
04 title: 16 bytes: arithmetic
04 m1b: 10 %: arithmetic
04 m4: twice: question
04 r4: 12 GB: quoted
04 r4: 16 bytes: arithmetic
04 learned: 16 bytes: arithmetic
05 title: 80 GB: datasheet
05 title: a third: arithmetic
05 r1: 16 bytes: arithmetic
05 r1: 11 GB: quoted
05 m1d: 24 GB | 24,564 MiB: datasheet
05 r2: twice: question
05 m3b: 2 MiB | 20 MiB: datasheet
05 m3c: 50 MiB | 30 MiB: given
05 m3c: 20 MiB: set labs/parts/remedies/on_gpu.py PAGE_BYTES
05 m6: 12 bytes: arithmetic
05 m7: a quarter: arithmetic
05 ex1: 32 bytes: defined
05 learned: a third: arithmetic
06 r1: 10 %: arithmetic
06 explore-pipeline-text: 1 ms: question
06 m8: 16 bytes: arithmetic
06 mine-text: 16 bytes: arithmetic
06 ex1: twice: given
06 learned: 1.5 times: arithmetic
07 m2: 32 KiB | 16 GiB | 1 MiB | 2 MiB: datasheet
07 r3-guess: 125 MB/s: question
07 m3b: few percent: datasheet
07 m4: 4 MiB: arithmetic
07 m4b: 64 kB: defined
07 r4-guess: 4.2 MB: arithmetic
07 r4-guess: 25 MiB: datasheet
07 r5-guess: two percent: arithmetic
07 ex1: four seconds: given
07 m6: 1.5 times: set labs/gradient_compression.py AROUND
07 edit-text: 5 %: question
07 ex3: twice: defined
08 s1-05: five minutes: given
08 s1-09: five minutes: given
08 s1-09: ten minutes: datasheet
08 s1-10: 2 s: arithmetic
08 s1-10: 15 s: datasheet
08 s1-15: ten minutes: datasheet
08 s2-03: half: arithmetic
08 s2-09: 25 %: set labs/two_levels.py APART
08 s3-02: 5 MB: arithmetic
08 s6-02: 60 ms | 8 ms: arithmetic
08 s6-09: 60 s | ten minutes: question
08 s4-00: 80 %: set labs/parts/planning/scaling.py REACHED
08 s4-00: 4 µs: set labs/parts/planning/scaling.py GAP_S
08 s4-00: 1 %: set labs/parts/planning/scaling.py SPREAD
08 s4-07: 20 %: question
08 s4-17: 50 Gbit/s: question
08 s7-02: 16 bytes: arithmetic
08 s7-09: 200 Gbit/s: set labs/cost.py network_gb_s
08 s7-09: 15 minutes: set labs/cost.py startup_min
08 s7-09: 60 s: set labs/cost.py save_s
08 s7-09: 10 minutes: set labs/cost.py restart_min
09 s3-00: 4 bytes: defined
09 s5-10: ten minutes: work
09 ex3-00: 1 % | 1 s | 2 s | 3 s | 6 s | 15 %: given
10 title: ten minutes: datasheet
10 s1-10: 300 s: set labs/recipes/train_ddp_debug.py --patience
10 s3-08: 16 bytes: arithmetic
10 s5-03: 0.2 MB: arithmetic
10 s6-03: 20 s | 180 s | 2 s | 60 GB: given
10 s6-03: 700 s | 300 s | 2 GB/s: arithmetic
10 take-home: 30 minutes: datasheet
10 ex2-00: 20 kB | 1.9 MB: given
11 s3-04: some seconds | half a minute: work
11 s4-03: 40 kB | 40 MB: arithmetic
11 s4-09: 20 %: given
11 take: 5 %: rule
12 s5-00: 15 %: set labs/parts/doctor/diagnosis.py ILL
12 take-home: 40 s: set labs/doctor.py --seconds
12 take-home-b: 1.05 x: rule
12 ex1-00b: two minutes: work
"""

# Texts of figures, verdicts, explorers and labs; names of cards are left out. File below labs: numbers: reason.
TOLD = """
chapters/nb00/figures.py: 10 KiB | a hundred times: question
chapters/nb00/figures_limits.py: 100 %: defined
chapters/nb01/claims.py: 5 %: rule
chapters/nb01/figures.py: 5 % | 10 % | a tenth: question
chapters/nb01/figures.py: 1 %: rule
chapters/nb02/figures.py: 15 % | 5 %: rule
chapters/nb02/figures_data.py: 10 s: rule
chapters/nb03/explorer.py: 32 GB/s: datasheet
chapters/nb04/claims.py: 2 % | 24 GB: quoted
chapters/nb04/figures_memory.py: 50 % | 20 %: quoted
chapters/nb04/figures_memory.py: 1 % | 2 %: rule
chapters/nb05/claims.py: 11 GB: quoted
chapters/nb05/figures.py: 11 GB: quoted
chapters/nb05/figures_recompute.py: twice: arithmetic
chapters/nb07/claims.py: 80 GB: datasheet
chapters/nb07/figures.py: 1 MiB | 32 KiB | 16 GiB: datasheet
chapters/nb08/claims_cost.py: 80 GB | 24 GB: datasheet
chapters/nb08/figures_cost.py: 16 GB | 24 GB | 40 GB | 80 GB | 1,555 GB/s: datasheet
chapters/nb08/figures_cost.py: 16 bytes: arithmetic
chapters/nb08/figures_efficiency.py: 10 % | 90 %: datasheet
chapters/nb08/figures_efficiency.py: 60 s | 6 s: question
chapters/nb08/figures_ranks.py: half: arithmetic
chapters/nb08/figures_scaling.py: 20 %: rule
chapters/nb10/figures_memory.py: 0 %: defined
chapters/nb11/figures.py: 50 %: defined
chapters/nb11/figures_fooled.py: 5 %: rule
chapters/nb11/vote.py: 50 %: defined
all_reduce_anatomy.py: 4 bytes: defined
clinic.py: 0.1 times | 1000 times: rule
critical_batch.py: twice: defined
doctor_trial.py: 15 %: set labs/parts/doctor/diagnosis.py ILL
fooled.py: 5 %: rule
loader_cores.py: 0.1 times | 16 times: rule
measure_validation.py: 2 % | 5 % | 10 %: question
measure_validation.py: 95 %: defined
nan_clinic.py: 0.01 MB | 100000 MB: rule
oom_clinic.py: twice: defined
point_to_point.py: 4 bytes: defined
profile_step.py: 1000 ms: rule
scaling_model.py: 20 %: rule
slow_link.py: 4 bytes: defined
strategy.py: 1 x: defined
training_checkpoint.py: 4 KiB | 4 GiB: rule
"""
# What an exercise gives to its solver, and programs that it hands out, are made up.
GIVEN = re.compile(r"(exercise|solution)\w*$|reports$|slow_training$")
CARD = re.compile(r"\b[A-Z]\d+ \d+GB\b")


def table(text):
    """{key: {number: reason}}; the key is all before the first colon, a line may end in a constant to look up."""
    found = {}
    for line in text.strip().splitlines():
        key, numbers, reason = line.split(": ", 2)
        found.setdefault(key, {}).update({n: reason for n in numbers.split(" | ")})
    return found


def entries(nb):
    return {k.partition(" ")[2]: v for k, v in table(PROSE).items() if k.startswith(nb)}


def without_minutes(nb):
    """The notebook without how long it and its exercises take."""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^(\*\*Time\*\*: )[^.]*\.", r"\1", cell.source, flags=re.M)
            if re.match(r"### \d\d\.\d ", cell.source):
                cell.source = re.sub(r"\bAbout \d+ minutes\b", "", cell.source, count=1)
    return nb


def cards_left_out(source):
    """What a program says, without names such as "A100 80GB SXM"."""
    return [(line, q, text) for line, q, text in typed_numbers(CARD.sub("", source))]


def told():
    chapters = [p for p in sorted((ROOT / "labs/chapters").glob("nb*/*.py")) if not GIVEN.search(p.stem)]
    return [*sorted((ROOT / "labs").glob("*.py")), *chapters]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_numbers_in_prose_have_a_setting_a_source_or_a_reason(path):
    found = list(unsupported(without_minutes(nbformat.read(path, 4)), entries(path.name[:2])))
    lines = [f"{path.stem}, cell {cell}: {number!r} in: {sentence}" for cell, number, sentence in found]
    why = "neither set in this section nor beside a link: show it from records, or list why it is none of ours"
    assert not found, "\n".join([why, *lines])


@pytest.mark.parametrize("path", told(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_figures_and_verdicts_say_is_computed(path):
    listed = table(TOLD).get(path.relative_to(ROOT / "labs").as_posix(), {})
    found = [f"line {line}: {q!r} in: {text}" for line, q, text in cards_left_out(path.read_text()) if q not in listed]
    assert not found, "typed into a text that learners read; compute it from records, or list why:\n" + "\n".join(found)


def test_no_line_of_the_lists_is_left_over():
    """An entry whose number has gone would let the next one in unseen."""
    left = []
    for path in NOTEBOOKS:
        nb = without_minutes(nbformat.read(path, 4))
        used = {(cell, number) for cell, number, _ in unsupported(nb, {})}
        listed = {(cell, number) for cell, numbers in entries(path.name[:2]).items() for number in numbers}
        left += [(path.name, *entry) for entry in listed - used]
    for name, numbers in table(TOLD).items():
        used = {q for _, q, _ in cards_left_out((ROOT / "labs" / name).read_text())}
        left += [(name, n) for n in numbers if n not in used]
    assert not left
    reasons = [r for t in (PROSE, TOLD) for numbers in table(t).values() for r in numbers.values()]
    assert {r.split()[0] for r in reasons} <= REASONS


def constants(path, name):
    """The numbers that the program `path` gives to `name`: an assignment, a field, or an option's default."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                found += [v for t, v in pairs if ast.unparse(t) == name]
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            found.append(node.value)
        elif isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == name for a in node.args):
            found += [k.value for k in node.keywords if k.arg == "default"]
    return [float(n) for v in found for n in _flat(v)]


def _flat(node):
    value = eval(compile(ast.Expression(node), "<constant>", "eval"), {"__builtins__": {}})
    return value if isinstance(value, tuple) else (value,)


SETS = [
    (number, reason)
    for t in (PROSE, TOLD)
    for numbers in table(t).values()
    for number, reason in numbers.items()
    if reason.startswith("set ")
]


ENDINGS = {"_min": "min", "_gb_s": "GB/s", "bucket_cap_mb": "MiB"}  # of names, with their units; torch's MB are MiB


@pytest.mark.parametrize(("number", "reason"), SETS, ids=lambda x: x)
def test_settings_that_are_told_are_those_of_the_program(number, reason):
    _, path, name = reason.split()
    (q,) = quantities(number)
    kind, scale = next((UNITS[u] for end, u in ENDINGS.items() if name.endswith(end)), (q.kind, 1))
    values = [v * scale for v in constants(path, name) if kind == q.kind]
    values += [v - 1 for v in values if q.kind == "ratio"]  # a factor of 1.15 is 15 % more
    assert any(abs(v - q.value) <= 1e-9 * abs(q.value) for v in values), f"{number} is told; {path} has {values}"


def test_the_rest_of_the_arithmetic():
    """Numbers of the list that follow from what a lab is, not from numbers beside them."""
    overlap = bucket_overlap.Config()
    assert overlap.layers == 16 and round(overlap.layers * overlap.width**2 * 4 / 1e6, 1) == 4.2
    assert two_nodes.LIVE["keep_alive_interval"] * two_nodes.LIVE["keep_alive_max_attempt"] == 2
    sent = five_ways.predict_levels(many_ranks.job(many_ranks.Config(), 64), "fsdp")
    assert round(sent["across"] / 1e6) == 5
    shapes = [p.shape for p in MODELS["mlp"]().module.parameters()]
    rank_4 = sum(
        4 * sum(s) if len(s) == 2 else s.numel() for s in shapes
    )  # torch's PowerSGD leaves vectors as they are
    assert 0.01 < rank_4 / sum(s.numel() for s in shapes) < 0.02
    rare = slowest_rank.Config()
    assert rare.mean_ms / rare.rare_share == 60 and rare.work_ms + rare.mean_ms == 8


# --- the rule itself


def plant(text, code="launch('mlp', mb_s=100.0)", late=""):
    cells = [new_markdown_cell("## 1. One", id="one"), new_code_cell(code), new_markdown_cell(text, id="two")]
    return new_notebook(cells=[*cells, new_markdown_cell("## 2. Two", id="three"), new_markdown_cell(late, id="four")])


def numbers_of(nb, listed=None):
    return [(cell, number) for cell, number, _ in unsupported(nb, listed or {})]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("A step takes 12 ms here.", "12 ms"),
        ("Measured: **1.76x faster** with two workers.", "1.76 x"),
        ("The copy reached 11.3 GB/s, and", "11.3 GB/s"),
        ("Two ranks lose about 40 % of it.", "40 %"),
        ("It costs 2.7 points of accuracy.", "2.7 points"),
        ("On this machine DDP is twice as fast.", "twice"),
        ("Between 3 and 14 ms, as it happens.", "14 ms"),
        ("* It took 1,200 seconds,\n  and more.", "1,200 seconds"),
        ("[A source](https://example.org) says so. Here it is 5.1 times.", "5.1 times"),
        ("[Notebook 04](04_mixed_precision.ipynb) has 210 GFLOP/s.", "210 GFLOP/s"),
        ("Starting a rank takes about a second here.", "about a second"),
        ("A step takes a few milliseconds.", "few milliseconds"),
    ],
)
def test_a_planted_number_is_found(text, number):
    assert ("two", number) in numbers_of(plant(text))


@pytest.mark.parametrize(
    "text",
    [
        "The wire carries 100 MB/s, which are 0.1 GB/s or 0.8 Gbit/s.",
        "Llama 3 reached [380 TFLOP/s](https://arxiv.org/abs/2407.21783) on 16,384 GPUs.",
        "Images of 224 x 224 pixels, in 3 x 3 windows; a batch of 64, 12 layers.",
        "```\npython -m labs.x --seconds 9    # about 12 ms\n```",
    ],
)
def test_a_setting_a_source_a_shape_and_a_listing_are_let_through(text):
    assert numbers_of(plant(text)) == []


def test_a_setting_counts_in_its_own_section_with_its_own_unit_only():
    assert numbers_of(plant("", late="The wire carries 100 MB/s.")) == [("four", "100 MB/s")]
    assert numbers_of(plant("It takes 100 ms.")) == [("two", "100 ms")]
    assert numbers_of(plant("It takes 100 s.", code="run(batch_size=100, mb=100)")) == [("two", "100 s")]
    assert numbers_of(plant("It takes 30 ms.", code="def late(delay_ms=30):\n    pass")) == []
    assert ("s", 0.005) in set(settings(ast.parse("PAUSE_MS = 5")))


def test_a_launched_lab_brings_its_defaults():
    wire = "The wire carries 200 MB/s."
    assert numbers_of(plant(wire, code="launch('bucket_overlap', nproc=2)")) == []
    assert numbers_of(plant(wire, code="launch('timing', nproc=2)")) == [("two", "200 MB/s")]


def test_an_entry_is_for_one_cell_and_one_number():
    nb = plant("A step takes 12 ms here.", late="A step takes 12 ms here.")
    assert numbers_of(nb, {"two": {"12 ms": "given"}}) == [("four", "12 ms")]
    assert numbers_of(nb, {"two": {"13 ms": "given"}}) == [("two", "12 ms"), ("four", "12 ms")]


def test_minutes_of_work_are_left_out_and_no_others():
    late = "**Time**: about 9 minutes. About 8 minutes."
    nb = without_minutes(plant("### 01.1 Do it\n\nAbout 25 minutes. It trains for about 25 minutes.", late=late))
    assert numbers_of(nb) == [("two", "25 minutes"), ("four", "8 minutes")]


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('def say(r):\n    """Up to 5 ms."""\n    return f"1.76x faster, {r} in all"', "1.76 x"),
        ('print("a step takes 12 ms")', "12 ms"),
        ('TEXT = "* DDP loses " "40 % of it"', "40 %"),
        ('say(f"{x:.1f} ms against " f"9.3 ms")', "9.3 ms"),
        ('SAID = {"two": "twice as fast"}', "twice"),
    ],
)
def test_a_number_typed_into_a_text_is_found(source, number):
    assert [q for _, q, _ in typed_numbers(source)] == [number]


def test_computed_numbers_docstrings_and_comments_are_let_through():
    source = '"""Takes 12 ms."""\ndef f(x):\n    """9 ms."""\n    return f"{x:.0f} ms, {x} %, {2}x"  # 3 ms\n'
    assert list(typed_numbers(source)) == []


def test_units_are_read_whole():
    """'5 samples' is no time in s, '3 hooks' none in h, and a rate is no size."""
    assert list(quantities("5 samples, 3 hooks, 8 GPUs, 2 x 3, FP16 x, 10 Mbyte, GPU-3 s1, $1-s$, 1-s")) == []
    assert [(q.kind, q.value) for q in quantities("5 GB/s and 2 to 4 ms")] == [("B/s", 5e9), ("s", 0.002), ("s", 0.004)]
    assert set(re.findall(QUANTITY, "1 GB/s")) == {("1", "", "GB/s")}
