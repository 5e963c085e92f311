"""Every notebook keeps the contract, and every rule of the contract notices when it is broken."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_rules import CELL_WORDS, EDITABLE_LINES, RULES, SIZE_LIMIT_BYTES

from labs.kit.code import code_shown
from labs.kit.errors import require

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PNG = "iVBORw0KGgo="
FIGURE = f'<img alt="Step time against ranks" title="{{title}}" src="data:image/png;base64,{PNG}">'


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_keeps(path, rule):
    problems = RULES[rule](nbformat.read(path, as_version=4), path)
    assert not problems, "\n".join(problems)


def code(source, output="", *tags):
    outputs = [new_output("stream", name="stdout", text=output)] if output else []
    return new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


def printed(text):
    return new_output("stream", name="stdout", text=text)


def html(markup):
    return new_output("display_data", data={"text/html": markup})


@pytest.fixture
def good(tmp_path):
    """A small notebook that keeps every rule, and its path; a notebook of the same name stands before it."""
    cells = [
        new_markdown_cell("# Split the batch\n\n3 min on two CPU cores. [Previous](00_a.ipynb)"),
        new_markdown_cell("## You will\n\n- measure time\n- compare ranks\n  at length\n- explain both"),
        new_markdown_cell("## You need\n\nTwo cores; see [the data](00_a.ipynb#top) and [web](https://pytorch.org)."),
        code("NPROC = 2\nSOLUTIONS = False", "", "parameters"),
        code(
            "from labs.kit.launch import launch\nfrom labs.kit.check import check, predict\n"
            "from labs.kit.code import show_code\nfrom labs.kit.errors import require"
        ),
        code('guess = predict(2, "x")\nrun = launch("ddp", nproc=NPROC)', "step 3.2 ms", "nbval-ignore-output"),
        code("run.where(guess)", "128 bytes"),
        new_markdown_cell("## Take it home\n\nA recipe.\n\n## Exercises"),
        code('check("03.1", None, solutions=SOLUTIONS)', "03.1 to do"),
        code('check("03.2", None, solutions=SOLUTIONS)', "03.2 to do"),
        new_markdown_cell("## Claims on trial"),
        new_markdown_cell("## What you learned\n\n- time\n- ranks\n- both\n\n**Further reading**\n\n- one"),
    ]
    cells += [code("def train(x):\n    return x\n\neditable.compare(train)"), code("show_code(require)")]
    cells[-1].outputs.append(new_output("display_data", data=code_shown(require)))
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), start=1):
        cell.execution_count = count
    cells[6].outputs.append(html(FIGURE.format(title="recorded on Imaginary 8000, torch 2.13.0, 2026-11-21 UTC")))
    cells[5].outputs.append(html(FIGURE.format(title="measured here on Imaginary 9000, torch 2.13.0, 2026-11-21 UTC")))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    kernel["course_run"] = {"cpu": "Imaginary 9000", "python": "3.11.7", "gpus": [], "torch": "2.13.0+cpu"}
    path = tmp_path / "03_split.ipynb"
    return save(new_notebook(cells=cells, metadata=kernel), path), path


def save(notebook, path):
    for p in (path.with_name("00_a.ipynb"), path):
        nbformat.write(notebook, p)
    return notebook


def test_good_notebook_breaks_no_rule(good):
    assert {name: found for name, rule in RULES.items() if (found := rule(*good))} == {}


def replace(index, old, new):
    def plant(nb):
        assert old in nb.cells[index].source
        nb.cells[index].source = nb.cells[index].source.replace(old, new)

    return plant


def tag(index, name):
    return lambda nb: nb.cells[index].metadata.tags.append(name)


def output(index, value):
    return lambda nb: nb.cells[index].outputs.append(value)


def set_id(nb):
    nb.cells[5].id = nb.cells[6].id


def swap_sections(nb):
    nb.cells[7], nb.cells[10] = nb.cells[10], nb.cells[7]


def clear(nb):
    nb.cells[6].execution_count = None


def rerun(nb):
    nb.cells[6].execution_count = 40


def other_kernel(nb):
    nb.metadata.kernelspec.name = "conda-env-py"


def grow(nb):
    nb.cells[6].outputs[0].text = "x" * SIZE_LIMIT_BYTES


BARE_PNG = new_output("display_data", data={"image/png": PNG})
ERROR = new_output("error", ename="ValueError", evalue="bad", traceback=[])
# Built from parts, so that this file holds no such path itself.
HOME = "/".join(["", "home", "ada", "course"])
PLANTED = [
    ("title_is_a_verb_phrase", replace(0, "# Split the batch", "# Data parallelism")),
    ("title_is_a_verb_phrase", replace(0, "# Split", "Split")),
    ("title_is_a_verb_phrase", replace(7, "## Exercises", "## Exercises\n\n# Measure again")),
    ("hook_gives_time_hardware_and_neighbours", replace(0, "3 min on", "Quick on")),
    ("hook_gives_time_hardware_and_neighbours", replace(0, "CPU cores", "cores")),
    ("hook_gives_time_hardware_and_neighbours", replace(0, "[Previous](00_a.ipynb)", "Previous: 00")),
    ("has_the_fixed_sections_in_order", replace(10, "Claims on trial", "Claims")),
    ("has_the_fixed_sections_in_order", swap_sections),
    ("goals_are_three_to_five_verbs", replace(1, "- explain both", "")),
    ("goals_are_three_to_five_verbs", replace(1, "- measure time", "- the time")),
    ("what_you_learned_mirrors_the_goals", replace(11, "- both", "")),
    ("has_one_parameters_cell", tag(6, "parameters")),
    ("has_one_parameters_cell", replace(3, "NPROC = 2\n", "")),
    ("has_one_parameters_cell", replace(3, "NPROC = 2", "NPROC = 2\nprint(NPROC)")),
    ("exercises_follow_the_solutions_parameter", replace(8, ", solutions=SOLUTIONS", "")),
    ("exercises_follow_the_solutions_parameter", replace(8, "check", "print")),
    ("imports_in_one_place_and_only_from_the_course", replace(6, "run", "import labs\nrun")),
    ("imports_in_one_place_and_only_from_the_course", replace(4, "labs.kit.launch", "requests")),
    ("imports_in_one_place_and_only_from_the_course", replace(4, "labs.kit.launch", "subprocess")),
    ("predictions_are_used_in_a_later_cell", replace(6, "guess", "")),
    ("predictions_are_used_in_a_later_cell", replace(5, "guess = ", "")),
    ("predictions_are_used_in_a_later_cell", replace(8, "check", "late = predict(3, 'y')\nlate.against(3)\ncheck")),
    ("outputs_are_committed", clear),
    ("outputs_are_committed", rerun),
    ("code_is_shown_as_it_is_now", replace(6, "run.where(guess)", "show_code(launch)")),
    ("code_is_shown_as_it_is_now", replace(6, "run.where(guess)", "show_code(no_such)")),
    ("code_is_shown_as_it_is_now", replace(13, "show_code(require)", "show_code(launch)")),
    ("code_is_in_sight", replace(13, "show_code(require)", "1")),
    ("code_is_in_sight", replace(12, "editable.compare(train)", "")),
    ("no_error_outputs", output(6, ERROR)),
    ("no_shell_escapes", replace(6, "run", "!torchrun -m labs.ddp\nrun")),
    ("no_shell_escapes", replace(6, "run", "%%bash\nrun")),
    ("no_shell_escapes", replace(6, "run", "x = !ls\nrun")),
    ("is_small", grow),
    ("cells_have_unique_ids", set_id),
    ("kernel_is_python3", other_kernel),
    ("nbval_compares_most_cells", lambda nb: [tag(i, "nbval-ignore-output")(nb) for i in (6, 8, 9)]),
    ("strict_outputs_show_no_machine", output(6, printed("run on 2026-11-21"))),
    (
        "strict_outputs_show_no_machine",
        output(6, printed("21. 11. at 18:46 or Nov 21")),
    ),
    (
        "strict_outputs_show_no_machine",
        output(6, printed("on an Imaginary 9000 here")),
    ),
    ("strict_outputs_show_no_machine", output(6, printed("built as 2.13.0+cpu"))),
    ("strict_outputs_show_no_machine", output(6, html(FIGURE.format(title="measured here on Imaginary 9000")))),
    ("strict_outputs_show_no_machine", output(6, html(FIGURE.replace(' title="{title}"', "")))),
    ("no_cell_may_fail_or_be_skipped", tag(6, "raises-exception")),
    ("no_cell_may_fail_or_be_skipped", tag(6, "nbval-skip")),
    ("no_cell_may_fail_or_be_skipped", replace(6, "run", "# NBVAL_SKIP\nrun")),
    ("cells_are_short", replace(6, "run", "x = 1\n" * 12 + "run")),
    ("cells_are_short", replace(12, "editable", "x = 1\n" * EDITABLE_LINES + "editable")),
    ("texts_are_short", replace(10, "Claims on trial", "Claims on trial\n\n" + "word " * CELL_WORDS)),
    ("pictures_have_alt_text", output(6, BARE_PNG)),
    ("pictures_have_alt_text", output(6, html(f'<img src="data:image/png;base64,{PNG}">'))),
    ("pictures_have_alt_text", output(6, html("<svg viewBox='0 0 1 1'><path/></svg>"))),
    ("pictures_have_alt_text", replace(10, "Claims on trial", "Claims on trial\n\n![](a.png)")),
    ("no_path_of_one_machine", replace(6, "run", f'open("{HOME}/x")\nrun')),
    ("no_path_of_one_machine", output(6, new_output("stream", name="stderr", text=f"{HOME}/x.py:3: Warning"))),
    ("links_resolve", replace(2, "00_a.ipynb#top", "04_gone.ipynb")),
]


@pytest.mark.parametrize(("rule", "plant"), PLANTED)
def test_rule_notices(good, rule, plant):
    notebook, path = good
    plant(notebook)
    path.write_text(json.dumps(notebook))
    assert RULES[rule](notebook, path)


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, _ in PLANTED} == set(RULES)


def test_rules_do_not_depend_on_the_way_a_heading_is_written(good):
    notebook, path = good
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^## (.*)$", r"**\1**", cell.source, flags=re.MULTILINE)
    assert {name: found for name, rule in RULES.items() if (found := rule(notebook, path))} == {}
