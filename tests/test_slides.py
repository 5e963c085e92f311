"""Slides: questions before results, nothing from the network, solutions only when asked for."""

import re
import sys

import chromium
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labs.classroom.slides.__main__ import main
from labs.classroom.slides.parts import PAGE_CHARACTERS, parts_of, table_pages
from labs.kit.notebook_report import Formulas

BAR = new_output("display_data", {"text/html": '<div class="labs-progress">timing: done</div>'})
FIGURE = new_output("display_data", {"text/html": '<img alt="a figure" src="data:image/png;base64,iVBORw0KGgo=">'})
TEXT = new_output("stream", text="2 x\n")


def shown(*cells, solved=frozenset()):
    parts = parts_of(list(cells), set(solved))
    return [
        (p.metadata.slideshow.slide_type, p.source or "".join(str(o.output_type) for o in p.outputs)) for p in parts
    ]


def test_question_and_prediction_on_one_slide_results_on_the_next():
    cells = [
        new_markdown_cell("## 1. How fast?\n\nGuess."),
        new_code_cell('guess = predict(2.0, "speed-up")', outputs=[TEXT]),
        new_code_cell('run = launch("timing")\nfigures.ways(run)', outputs=[BAR, FIGURE]),
        new_code_cell("run.one()", outputs=[TEXT]),
        new_markdown_cell("Short remark."),
    ]
    assert shown(*cells) == [
        ("slide", "## 1. How fast?\n\nGuess."),
        ("-", cells[1].source),
        ("fragment", cells[2].source),
        ("subslide", "display_data"),
        ("fragment", "stream"),
        ("fragment", "Short remark."),
    ]


def test_set_up_and_hints_are_not_shown():
    parameters = new_code_cell("NPROC = 2", metadata={"tags": ["parameters"]})
    text = new_markdown_cell(
        "### 03.1 Shard\n\nWrite it.\n\n<details><summary>Hint 1</summary>\n\nUse it.\n\n</details>"
    )
    assert shown(parameters, new_code_cell("import torch\nfrom labs.kit.check import TODO"), new_code_cell("")) == []
    assert shown(text) == [("subslide", "### 03.1 Shard\n\nWrite it.")]


def test_solution_is_shown_only_when_asked_for():
    cell = new_code_cell('check("03.1", shard, solutions=SOLUTIONS)', outputs=[new_output("stream", text="to do")])
    assert shown(cell) == [("-", cell.source)]
    kinds = shown(cell, solved={"03.1"})
    assert [k for k, _ in kinds] == ["-", "subslide"] and "def shard(" in kinds[1][1]
    assert shown(cell, solved={"03.2"}) == shown(cell)


def test_an_attached_image_goes_with_its_slide():
    image = {"a.png": {"image/png": "iVBORw0KGgo="}}
    text = "## A\n\n![what it shows](attachment:a.png)\n\n## B\n\nNo image."
    parts = parts_of([new_markdown_cell(text, attachments=image)], set())
    assert [list(p.attachments) for p in parts] == [["a.png"], []]


def test_long_text_is_cut_between_paragraphs_and_never_inside_code():
    paragraph = "word " * 100
    code = "```\n" + "line\n\n" * 300 + "```"
    texts = [t for _, t in shown(new_markdown_cell("\n\n".join([paragraph] * 5 + [code])))]
    assert all(len(t) <= PAGE_CHARACTERS or "```" in t for t in texts) and len(texts) > 3
    assert all(t.count("```") % 2 == 0 for t in texts)
    assert sum(t.count("word") for t in texts) == 500


def test_long_table_is_cut_into_pages_with_the_head_on_each_and_the_notes_once():
    rows = [f"<tr><td>claim {n} {'long ' * 40}</td></tr>" for n in range(20)]
    markup = f"<table><thead><tr><th>claim</th></tr></thead><tbody>{''.join(rows)}</tbody></table><p>A: notes</p>"
    pages = table_pages(markup)
    assert len(pages) > 3 and all(p.count("<th>claim</th>") == p.count("</table>") == 1 for p in pages)
    assert [p.count("notes") for p in pages] == [0] * (len(pages) - 1) + [1]
    assert re.findall(r"claim (\d+)", "".join(pages)) == [str(n) for n in range(20)]


@pytest.mark.parametrize(
    "text, formulas",
    [
        ("costs $3 and $4", 0),
        ("$n$ ranks, $2\\frac{n-1}{n}S$ bytes", 2),
        ("`$HOME` and `$x$`", 0),
        ("```\n$x$\n```", 0),
    ],
)
def test_formulas_are_told_from_prices_and_code(text, formulas):
    store = Formulas()
    page = store.put_back(store.take_out(text))
    assert len(store.found) == page.count("<math") == formulas


def slides(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["slides", *map(str, arguments)])
    return main()


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
    bare = new_notebook(cells=[new_markdown_cell("# Run"), new_code_cell("1 + 1")])
    nbformat.write(bare, tmp_path / "00_a.ipynb")
    for arguments, words in [
        (["--source", tmp_path], "has no outputs: run `make course`, then add --source build"),
        (["--solutions", "99.9"], "there is no exercise '99.9'"),
        (["no_such"], "there is no notebook 'no_such'"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            slides(monkeypatch, *arguments, "--out", tmp_path / "out")
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not chromium.executable(), reason=chromium.MISSING)
def test_slides_in_a_browser(tmp_path, monkeypatch):
    """From the command to the last slide: all fit on the screen, nothing is requested from outside, no error."""
    from playwright.sync_api import sync_playwright

    assert slides(monkeypatch, "03_dataparallel_vs_ddp", "--out", tmp_path) == 0
    problems, heights = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.executable(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.on("request", lambda r: problems.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.on("requestfailed", lambda r: problems.append(r.url))
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.goto((tmp_path / "03_dataparallel_vs_ddp.html").as_uri())
        page.wait_for_function("typeof Reveal !== 'undefined' && Reveal.isReady()")
        while not page.evaluate("Reveal.isLastSlide()"):
            page.evaluate("Reveal.next()")
            rect = "Reveal.getCurrentSlide().getBoundingClientRect()"
            heights.append(page.evaluate(f"{rect}.bottom"))
        browser.close()
    assert problems == [] and len(heights) > 20
    assert max(heights) <= 725, "a slide is cut off at the bottom"
