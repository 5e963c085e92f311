"""The doctor's static rules: each fires at its line of the ill example and nowhere else, and its cure silences it."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labs.doctor import __main__ as doctor
from labs.doctor import rules, rules_precision, rules_steps, supervisor
from labs.doctor.hits import CERTAINTIES
from labs.doctor.rules import RULES, UNREADABLE, check

ROOT = Path(__file__).parents[1]
ILL = [pytest.param(r, source, id=f"{r.name}-{n}") for r in RULES for n, source in enumerate(r.ill)]
HEALTHY = [pytest.param(r, source, id=f"{r.name}-{n}") for r in RULES for n, source in enumerate(r.healthy)]


def hits_of(folder, source, name="train.py"):
    path = folder / name
    path.write_text(source)
    return check(path)


def certain(hits):
    return [(h.rule, h.line) for h in hits if h.certainty != "look at it"]


@pytest.mark.parametrize(("rule", "source"), ILL)
def test_an_ill_example_has_its_hit_at_its_line_and_no_other_that_is_certain(rule, source, tmp_path):
    marked = [n for n, line in enumerate(source.splitlines(), 1) if "# <-" in line]
    hits = hits_of(tmp_path, source)
    assert marked and [h.line for h in hits if h.rule == rule.name] == marked
    assert certain(h for h in hits if h.rule != rule.name) == []


@pytest.mark.parametrize("source", next(r for r in RULES if r.name == "fixed-gpu").ill)
def test_the_first_gpu_is_no_certain_mistake(source, tmp_path):
    """srun --gpus-per-task=1 shows each rank one alone, and the source does not tell who starts it."""
    assert certain(hits_of(tmp_path, source)) == []


@pytest.mark.parametrize(("rule", "source"), HEALTHY)
def test_a_healthy_example_has_no_hit_of_its_rule_and_none_that_is_certain(rule, source, tmp_path):
    hits = hits_of(tmp_path, source)
    assert [h for h in hits if h.rule in (rule.name, UNREADABLE)] == [] and certain(hits) == []


@pytest.mark.parametrize(("rule", "source"), ILL)
def test_a_cure_that_is_a_diff_can_be_patched_in_and_ends_the_hit(rule, source, tmp_path):
    first = next(h for h in hits_of(tmp_path, source) if h.rule == rule.name)
    if not first.cure.startswith("---"):
        assert first.cure == rule.cure
        return
    subprocess.run(["patch", "-p1"], input=first.cure, text=True, cwd=tmp_path, check=True, capture_output=True)
    left = check(tmp_path / "train.py")
    assert [h.line for h in left if h.rule == rule.name] == [] and certain(left) == []


@pytest.mark.parametrize(
    ("head", "lines"),
    [
        (rules_precision.HEAD, rules_precision.STEP.strip().split("\n")),
        (
            rules_precision.WITHOUT.replace("float16", "bfloat16").replace("            optimizer.zero_grad()\n", ""),
            ["optimizer.zero_grad()", "loss.backward()", "optimizer.step()"],
        ),
    ],
    ids=["scaler", "plain"],
)
def test_of_all_orders_of_a_step_the_healthy_one_alone_has_no_hit(head, lines, tmp_path):
    silent = []
    for order in itertools.permutations([line.strip() for line in lines]):
        if not certain(hits_of(tmp_path, head + "".join(f"            {line}\n" for line in order))):
            silent.append(order)
    wanted = tuple(line.strip() for line in lines)
    # Without a scaler, a pass may as well begin with another of the three, as long as they follow in this round
    rounds = [wanted[i:] + wanted[:i] for i in range(len(wanted))] if len(wanted) == 3 else [wanted]
    assert sorted(silent) == sorted(rounds)


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "labs/recipes").glob("*.py")))
def test_no_recipe_is_accused(recipe):
    hits = check(ROOT / "labs/recipes" / recipe)
    assert certain(hits) == [] and UNREADABLE not in [h.rule for h in hits]


# A recipe with one line changed, or one left out: (recipe, line, what stands there instead, the rule that must see it)
MUTANTS = [
    ("train_single", "            optimizer.zero_grad()\n", "", "zero-grad-missing"),
    ("train_single", "loss.backward()", "loss.backward()\n            optimizer.zero_grad()", "zero-grad-order"),
    ("train_single", "            step += 1\n", "            step += 1; torch.cuda.empty_cache()\n", "empties-cache"),
    ("train_single", "            step += 1\n", "            step += 1; torch.cuda.synchronize()\n", "synchronises"),
    ("train_single", "            step += 1\n", "            step += 1; losses.append(loss)\n", "loss-kept"),
    ("train_single", "            step += 1\n", "            step += 1; loss.item()\n", "reads-each-step"),
    ("train_single", "    with torch.no_grad():\n        for", "    if True:\n        for", "no-grad-missing"),
    ("train_single", "torch.set_num_threads(1)", "torch.set_num_threads(9999)", "too-many-threads"),
    ("train_ddp", "        sampler.set_epoch(step // len(loader))", "        pass", "set-epoch-missing"),
    ("train_ddp", "sampler=sampler, drop_last", "sampler=sampler, shuffle=True, drop_last", "shuffle-beside-sampler"),
    ("train_ddp", "    if args.save and rank == 0:", "    if args.save:", "save-all-ranks"),
    ("train_ddp", "Parallel(model, ", "Parallel(model, find_unused_parameters=True,", "find-unused"),
    ("train_ddp", "model = DistributedDataParallel(", "model = nn.DataParallel(", "data-parallel"),
    ("train_ddp", "model.module.state_dict(), args", "model.state_dict(), args", "save-wrapped"),
    ("train_ddp", "    dist.destroy_process_group()", "    pass", "destroy-missing"),
    (
        "train_ddp",
        "            loss.backward()\n            optimizer.step()\n",
        "            loss.backward()\n            if step % 4 == 0:\n                optimizer.step()\n",
        "no-sync-missing",
    ),
    (
        "train_ddp",
        "            optimizer.zero_grad()\n",
        "            optimizer.zero_grad()\n            torch.autograd.set_detect_anomaly(True)\n",
        "anomaly",
    ),
    ("train_ddp_amp", "torch.amp.GradScaler(device.type, ", "torch.cuda.amp.GradScaler(", "amp-old"),
    ("train_ddp_amp", "            scaler.unscale_(optimizer)", "            pass", "clip-before-unscale"),
    ("train_ddp_amp", "            scaler.update()", "            pass", "scaler-update"),
    ("train_ddp_amp", "scaler.step(optimizer)", "optimizer.step()", "scaler-step-missing"),
    ("train_ddp_resume", "save(args.checkpoint, state)", "torch.save(state, args.checkpoint)", "save-not-atomic"),
]


@pytest.mark.parametrize(("recipe", "line", "instead", "rule"), MUTANTS, ids=[f"{m[0]}-{m[3]}" for m in MUTANTS])
def test_a_recipe_with_one_changed_line_is_seen(recipe, line, instead, rule, tmp_path):
    source = (ROOT / f"labs/recipes/{recipe}.py").read_text()
    assert line in source
    assert rule in [h.rule for h in hits_of(tmp_path, source.replace(line, instead))]


def test_rules_say_who_teaches_what_and_where_it_is_written():
    headings = {}
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        headings[notebook.name[:2]] = notebook.read_text()
    names = [r.name for r in RULES]
    assert len(set(names)) == len(names) >= 35
    for r in RULES:
        assert r.certainty in CERTAINTIES and r.why.endswith(".") and r.cure and r.source.startswith("https://"), r.name
        assert f"# {r.section}" in headings[r.notebook], (r.name, r.section)


LIBRARY = {
    "train.py": "from loops.fit import Fitter\nimport helpers\n\nFitter(helpers.optimizer()).fit([])\n",
    "helpers.py": "import torch as t\n\ndef optimizer():\n    return t.optim.SGD([], lr=1.0)\n",
    "loops/__init__.py": "",
    "loops/fit.py": """from .steps import one_step

class Base:
    def fit(self, loader):
        for batch in loader:
            self.one(batch)

class Fitter(Base):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def one(self, batch):
        one_step(batch, self.optimizer)
""",
    "loops/steps.py": "def one_step(batch, rule):\n    loss = batch.sum()\n    loss.backward()\n    rule.step()\n",
}


def test_a_step_is_followed_through_packages_relative_imports_classes_and_arguments(tmp_path):
    """Neither the loop, nor the optimizer, nor the step stands in the script; nothing but the data flow names it."""
    for name, source in LIBRARY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    [hit] = check(tmp_path / "train.py")
    assert (hit.rule, Path(hit.file).name, hit.line, hit.code) == (
        "zero-grad-missing",
        "steps.py",
        3,
        "loss.backward()",
    )
    (tmp_path / "loops/steps.py").write_text(
        LIBRARY["loops/steps.py"].replace("rule.step()", "rule.step()\n    rule.zero_grad()")
    )
    assert check(tmp_path / "train.py") == []


@pytest.mark.parametrize(
    "line",
    ["from loops import fit", "from loops.fit import Fitter as fit", "import loops.fit", "import loops.fit as fit"],
)
@pytest.mark.parametrize("within", ["from .steps import one_step", "from . import steps", "from loops import steps"])
def test_every_form_of_an_import_is_followed(line, within, tmp_path):
    called = {"from loops import fit": "fit.Fitter", "import loops.fit": "loops.fit.Fitter"}.get(line, "fit.Fitter")
    called = "fit" if "Fitter as" in line else called
    step = "one_step" if "one_step" in within else "steps.one_step"
    changed = {
        "train.py": LIBRARY["train.py"]
        .replace("from loops.fit import Fitter", line)
        .replace("Fitter(h", f"{called}(h"),
        "loops/fit.py": LIBRARY["loops/fit.py"]
        .replace("from .steps import one_step", within)
        .replace("        one_step(", f"        {step}("),
    }
    for name, source in (LIBRARY | changed).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    assert [(hit.rule, Path(hit.file).name) for hit in check(tmp_path / "train.py")] == [
        ("zero-grad-missing", "steps.py")
    ]


def test_what_a_package_hands_on_by_a_relative_import_is_found(tmp_path):
    (tmp_path / "loops").mkdir()
    for name, source in LIBRARY.items():
        source = source.replace("from loops.fit import Fitter", "import loops").replace(
            "\nFitter(", "\nloops.fit.Fitter("
        )
        (tmp_path / name).write_text(source)
    (tmp_path / "loops/__init__.py").write_text("from . import fit\n")
    assert [hit.rule for hit in check(tmp_path / "train.py")] == ["zero-grad-missing"]


def test_an_import_from_above_the_root_is_none_of_the_programs(tmp_path):
    """As in scripts that run as a module, too: try: from .. import common, except ImportError."""
    for dots in range(1, len(tmp_path.parents) + 5):
        assert hits_of(tmp_path, f"from {'.' * dots} import common\nfrom {'.' * dots}other import thing\n") == []


def test_a_mistake_of_a_rule_is_told_and_the_others_are_heard(tmp_path, monkeypatch):
    def fails(*args):
        raise IndexError(2)

    source = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
    broken = [replace(r, find=fails) if r.name == "save-not-atomic" else r for r in RULES]
    monkeypatch.setattr(rules, "RULES", broken)
    found, told = hits_of(tmp_path, source)
    assert (
        (found.rule, told.rule) == ("amp-old", UNREADABLE)
        and "save-not-atomic" in told.why
        and "IndexError" in told.why
    )
    monkeypatch.setattr(rules, "Program", fails)
    [told] = hits_of(tmp_path, source)
    assert told.rule == UNREADABLE and "IndexError" in told.why


def test_the_source_is_read_before_the_script_runs(tmp_path, monkeypatch):
    """After it, a mistake in reading would throw the measurements away; and by the first rank of a machine alone."""
    done = []
    monkeypatch.setattr(rules, "check", lambda script: done.append("read") or [])
    monkeypatch.setattr(supervisor, "examine", lambda *args: done.append("run") or [])
    monkeypatch.setattr(sys, "argv", ["labs.doctor", str(tmp_path / "train.py")])
    (tmp_path / "train.py").touch()
    for rank, order in (("0", ["read", "run"]), ("1", ["run"])):
        done.clear()
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            doctor.main()
        assert done == order


@pytest.mark.parametrize(
    ("raw", "line", "told"),
    [
        (b"import torch\nfor x in:\n", 2, "invalid syntax"),
        (b"x = 1\0\n", 0, "null bytes"),
        (b"x = '\xff'\n", 1, "decode"),
        (None, 0, "No such file"),
        (b"x = " + b"(" * 500 + b")" * 500, None, ""),
        (b"x = 0" + b" + 1" * 20_000, None, ""),
    ],
    ids=["syntax", "null", "encoding", "missing", "parentheses", "terms"],
)
def test_what_cannot_be_read_is_one_hit_and_no_crash(raw, line, told, tmp_path):
    if raw is not None:
        (tmp_path / "train.py").write_bytes(raw)
    hits = check(tmp_path / "train.py")
    assert {h.rule for h in hits} == {UNREADABLE} and all(told in h.why for h in hits)
    assert line is None or [h.line for h in hits] == [line]


def test_a_broken_helper_is_told_and_the_script_is_looked_at(tmp_path):
    (tmp_path / "helper.py").write_text("def f(:\n")
    source = "import helper\nimport torch\nscaler = torch.cuda.amp.GradScaler()\n"
    assert [(h.rule, Path(h.file).name) for h in hits_of(tmp_path, source)] == [
        ("amp-old", "train.py"),
        (UNREADABLE, "helper.py"),
    ]


def test_names_that_go_in_circles_end(tmp_path):
    """A name for itself, functions that call each other, a class that is its own base."""
    source = rules_steps.HEALTHY + (
        "\ndef a(x):\n    y = x\n    x = y\n    return b(x)\n\ndef b(x):\n    return a(x)\n\nclass C(C):\n    pass\n"
        "bar = enumerate(bar)\nbar = tqdm(bar)\nfor i, x in bar:\n    a(x).backward()\n    C().step()\n    opt.step()\n"
        "    opt.zero_grad()\n"
    )
    assert certain(hits_of(tmp_path, source)) == []


def test_a_diff_is_right_beside_wide_letters_tabs_and_form_feeds(tmp_path):
    source = "import torch\n\x0c\nif True:\n\tnamé = 'ü'; scaler = torch.cuda.amp.GradScaler()  # größer\n"
    [hit] = hits_of(tmp_path, source)
    assert hit.line == 4 and "+\tnamé = 'ü'; scaler = torch.amp.GradScaler(\"cuda\")  # größer\n" in hit.cure


def test_the_rules_need_no_torch():
    code = "import sys; from labs.doctor.rules import check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
