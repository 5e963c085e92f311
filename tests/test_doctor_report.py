"""The doctor's pages: what they say first, that a script's text is text in them, and what --compare reads."""

import html
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import chromium
import pytest
from doctor_facts import STARVED, STEP_S, made

from labs import doctor
from labs.kit.errors import BadInput
from labs.parts.doctor import report
from labs.parts.doctor.facts import Facts, Line

EVIL = 'print(f"<script>alert(1)</script> & {loss!r}") # {{ 7 * 7 }} \u2028 ]]>'


def sick(**more):
    """It waits for data, prints, and has a line of each kind that is hard to write down."""
    hit = SimpleNamespace(
        rule="evil",
        file="/x/train.py",
        line=3,
        code=EVIL,
        why=f"Because {EVIL}.",
        notebook="01",
        section="1",
        certainty="costs",
        source="https://example.org",
        cure=f"--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-{EVIL}\n+pass\n",
    )
    noted = Line("print", "print", "/x/train.py", 3, EVIL, 1.0, 5.0)
    modes = {"same batch again": STEP_S / 2, "no printing": 0.9 * STEP_S, "half precision": STEP_S}
    facts = made(STARVED, modes, lines=[noted], not_tried={"compiled": "<b>no compiler</b>"}, **more)
    return report.make([facts], [hit])


def test_the_page_says_first_what_holds_it_back_most_and_fits_a_terminal():
    lines = report.page(sick()).splitlines()
    assert lines[0].startswith("Each step waits 25.") and "at most 2.0" in " ".join(lines[:2])
    assert len(lines) <= 60 and max(map(len, lines)) <= report.COLUMNS
    text = "\n".join(lines)
    for words in (
        "half precision: no difference that this run can show",
        "not tried: compiled",
        "num_workers=2",
        "+pass",
    ):
        assert words in text
    waits = next(line for line in lines if "waiting for data" in line)
    assert "50 %" in waits and waits.count("#") == 25


def test_a_healthy_training_is_told_so():
    modes = dict.fromkeys(("same batch again", "no printing"), STEP_S)
    assert report.answer(report.make([made(modes=modes)])).startswith("Nothing that was tried holds train.py back")
    assert "says little" in report.answer(report.make([made(rounds=0)]))


def test_a_page_with_everything_still_fits():
    """Every cause, with lines, on eight ranks."""
    from labs.parts.doctor.causes import CAUSES

    modes = {c.mode: STEP_S / 2 for c in CAUSES}
    facts = [
        made({**STARVED, "rest": 0.1 * rank}, modes, rank=rank, ranks=8, not_tried={"x": "y" * 200})
        for rank in range(8)
    ]
    lines = report.page(report.make(facts)).splitlines()
    assert len(lines) <= 90 and max(map(len, lines)) <= report.COLUMNS
    assert any(line.split()[:4] == ["ms", "per", "step", "rank"] for line in lines)


ENDS = {
    "silent": (
        {"error": "it stands in train.py:9"},
        "no step of an optimizer was seen: the script took no step for too long, and was ended (it stands in train.py",
    ),
    "killed": ({"exit_code": -9, "steps": 3}, "killed by SIGKILL after 3 steps"),
    "stopped": (
        {"exit_code": -15, "error": "SIGINT", "steps": 3},
        "train.py: the run was stopped from outside by SIGINT after 3 steps, and the first ones only warm up",
    ),
    "stopped ": (
        {"ended": "stopped", "error": "SIGTERM", "steps": 5379},
        "stopped from outside by SIGTERM after 5379 steps, before all that --steps asks for were taken.",
    ),
    "error": ({"exit_code": 1, "error": "ValueError: <b> (train.py:3)"}, "failed: ValueError: <b> (train.py:3)"),
    "error ": (
        {"ended": "error", "steps": 3, "error": "ValueError (train.py:3)"},
        "failed: ValueError (train.py:3) after 3",
    ),
    "script ended": ({"exit_code": 0, "steps": 4}, "ended by itself after 4 steps"),
    "exit": ({"exit_code": 3}, "left with exit code 3"),
    "exit ": ({"ended": "exit", "exit_code": 1, "steps": 3}, "left with exit code 1 after 3 steps"),
    "exit  ": ({"ended": "exit", "exit_code": 0, "steps": 3}, "left with exit code 0 after 3 steps"),
    "running": ({"trying": "compiled"}, "ended from outside, while 'compiled' was tried"),
}


@pytest.mark.parametrize("ended", ENDS)
def test_a_run_without_steps_says_how_it_ended(ended, tmp_path):
    more, words = ENDS[ended]
    found = report.make([Facts("/x/train.py", ["/x/train.py"], **{"ended": ended, **more})])
    assert words in report.answer(found) and words in " ".join(report.page(found).split())
    advised = "train longer" in report.answer(found)
    assert advised == (ended in ("script ended", "exit  ")), "no advice where it did not end by itself"
    assert len(report.page(found).splitlines()) < 15
    path = report.write_html(found, tmp_path / "page.html")
    assert "Where a step goes" not in path.read_text("utf-8")


def test_where_ranks_were_apart_before_any_step_was_looked_at_it_says_so():
    found = report.make([Facts("/x/train.py", ["/x/train.py"], ended="done", steps=12, error="ranks are apart")])
    assert report.answer(found) == "train.py: no step could be looked at: ranks are apart."


@pytest.mark.parametrize("code", [0, 2])
def test_where_a_script_has_refused_its_options_nothing_is_said_of_steps(code):
    found = report.make([Facts("/x/train.py", ["/x/train.py"], ended="exit", exit_code=code)])
    assert ("A step is a call of" in report.page(found)) == (code == 0)


def test_what_is_wrong_in_the_source_is_told_at_the_top_even_if_nothing_ran():
    wrong = SimpleNamespace(
        rule="x",
        file="/x/train.py",
        line=3,
        code="y",
        why="z",
        notebook="01",
        section="1",
        cure="",
        certainty="wrong",
        source="",
    )
    for facts in ([made()], [Facts("/x/train.py", ["/x/train.py"], ended="exit", exit_code=3)]):
        lines = report.page(report.make(facts, [wrong])).splitlines()
        assert any("wrong, see below: train.py:3" in line for line in lines[:4])
        assert "Cure: none is known" in "\n".join(lines)


def test_lines_of_which_the_same_is_to_be_told_are_one_entry(tmp_path):
    def hit(line, cure="Read it later."):
        return SimpleNamespace(
            rule="reads",
            file="/x/train.py",
            line=line,
            code=f"{line}.item()",
            why="It waits.",
            notebook="01",
            section="1",
            cure=cure,
            certainty="costs",
            source="",
        )

    found = report.make([made()], [hit(3), hit(5), hit(7, "Another one.")])
    for told in (report.page(found), _html(found, tmp_path)):
        assert told.count("It waits") == 2 and told.count("Read it later") == 1
        assert [told.count(f"train.py:{line}") for line in (3, 5, 7)] == [1, 1, 1]
    assert len(found.findings) == 3  # of each line in the JSON


def test_a_name_in_code_keeps_its_small_letter():
    assert report.capital("nn.DataParallel copies") == "nn.DataParallel copies"
    assert report.capital("it waits") == "It waits"


def test_no_rank_left_anything():
    assert "No rank has left anything" in report.page(report.make([]))


def test_a_run_that_ended_in_its_counterfactuals_says_so_beside_what_it_has():
    found = report.make([made(STARVED, ended="killed", exit_code=-11, trying="compiled")])
    text = " ".join(report.page(found).split())
    assert "Each step waits" in text and "killed by SIGSEGV after 100 steps, while 'compiled' was tried" in text


def test_what_other_programs_took_is_told_with_what_it_means_for_the_bounds(tmp_path):
    def lines(**machine):
        found = report.make([made(noise=0.6, machine={"cores": 2, "threads": 1} | machine)])
        assert all(text in html.unescape(_html(found, tmp_path)) for text in report.summary(found))
        return found, " ".join(report.page(found).split())

    found, busy = lines(others_percent=46.2)
    assert "Other programs took 46 % of the CPU during this run" in busy and "Bounds, taken in turn, hold" in busy
    assert "perhaps" not in busy
    assert json.loads(report.write_json(found, tmp_path / "x.json").read_text())["facts"][0]["machine"] == {
        "cores": 2,
        "threads": 1,
        "others_percent": 46.2,
    }
    quiet = lines(others_percent=3.1)[1]
    assert "disturbed" not in quiet and "Steps scatter" in quiet and "other programs took 3 % of the CPU" in quiet
    assert "other programs on this machine, perhaps" in lines()[1]


def test_missing_ranks_are_named():
    facts = [made(rank=rank, ranks=4) for rank in (0, 2)] + [Facts("train.py", ["train.py"], rank=3, ranks=4, steps=2)]
    text = report.page(report.make(facts))
    assert "ranks that left nothing: 1 of 4" in text and "ranks whose steps were not seen: 3" in text


def test_ranks_of_another_machine_cannot_have_left_anything_here():
    here = [replace(made(rank=rank, ranks=8), local_ranks=4) for rank in range(4, 8)]
    text = " ".join(report.page(report.make(here)).split())
    assert "what 4 ranks elsewhere did" in text and "left nothing" not in text
    assert (
        "samples/s" in text
        and "; 4 of 8 ranks, whose numbers these are, on cpu." in text
        and "memory of rank 4: param" in text
    )
    text = " ".join(report.page(report.make(here[:3])).split())
    assert "what 4 ranks elsewhere did" in text and "1 of this machine's 4 ranks did: they left nothing" in text


@pytest.mark.parametrize(
    ("told", "joined", "words"),
    [
        (1, [1, 2], "No verdict: torch.distributed joins 2 ranks, and the doctor was told of 1 rank by what started"),
        (4, [0, 1], "No verdict: there are 4 ranks by what started them, and torch.distributed joins 1 rank."),
        (1, None, "Nothing that was tried holds"),
        (2, [0, 2], "Nothing that was tried holds"),
    ],
)
def test_there_is_no_verdict_on_ranks_that_the_doctor_does_not_see(told, joined, words, tmp_path):
    facts = [made(modes={"no printing": STEP_S}, rank=rank, ranks=told) for rank in range(told)]
    for f in facts:
        f.training["group"] = joined
    found = report.make(facts)
    assert report.page(found).startswith(words) and words in _html(found, tmp_path)


def test_ranks_are_shown_side_by_side_only_if_they_differ():
    alike = [made(rank=rank, ranks=2) for rank in range(2)]
    assert report.rank_table(alike) == ([], [])
    header, rows = report.rank_table([made(ranks=2), made(STARVED, rank=1, ranks=2)])
    assert header[1:] == ["rank 0", "rank 1"]
    assert [float(x) for x in next(row[1:] for row in rows if row[0] == "waiting for data")] == pytest.approx(
        [1, 25], rel=0.02
    )


def _html(found, tmp_path):
    return report.write_html(found, tmp_path / "page.html").read_text("utf-8")


def test_the_html_is_well_formed_loads_nothing_and_holds_the_scripts_text_as_text(tmp_path):
    text = _html(sick(error=EVIL), tmp_path)
    tree = ET.fromstring(re.sub(r"<meta[^>]*>", "", text.removeprefix("<!DOCTYPE html>")))  # the rest of it is XML, too
    assert {e.tag for e in tree.iter()} & {"script", "img", "link", "iframe", "b"} == set()
    assert not [e for e in tree.iter() if {"src", "href", "onclick", "srcset"} & set(e.attrib)]
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    told = " ".join(tree.itertext())
    assert EVIL in told and "{{ 7 * 7 }}" in told  # and not what a template makes of it


def test_the_html_says_what_the_terminal_says(tmp_path):
    found = sick()
    told = " ".join(" ".join(ET.fromstring(re.sub(r"<meta[^>]*>", "", _html(found, tmp_path)[15:])).itertext()).split())
    for text in (report.answer(found), *report.summary(found), *found.healthy, *found.unknown, report.method(found)):
        assert " ".join(text.split()) in told
    for finding in found.findings:
        assert " ".join(finding.what.split())[1:] in told and " ".join(finding.cure.split()) in told
        assert finding.bound is None or str(finding.bound) in told


def test_json_comes_back_as_it_was(tmp_path):
    found = report.make([made(STARVED, {"same batch again": STEP_S / 2}, rank=rank, ranks=2) for rank in range(2)])
    path, page = report.save(found, tmp_path / "new" / "folder")
    assert report.load(path) == found and report.page(report.load(path)) == report.page(found)
    assert page.name == "report.html" and json.loads(path.read_text())["provenance"]["torch"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "report.json"]


def _damaged():
    def at(*keys, value):
        def change(row):
            for key in keys[:-1]:
                row = row[key]
            row[keys[-1]] = value

        return change

    yield "not JSON", "{"
    yield "not JSON", "[" * 5000
    yield "no report", "[1, 2]"
    yield "no report", '{"doctor": 0}'
    yield "field 'facts'", at("facts", value={})
    yield "field 'facts'", at("facts", 0, "step_s", value=["x"])
    yield "field 'facts'", at("facts", 0, "step_s", value=[-1.0])
    yield "field 'facts'", at("facts", 0, "turns_s", value={"as it is": [0.1]})
    yield "field 'facts'", at("facts", 0, "lines", value=[{"kind": "print"}])
    yield "field 'facts'", at("facts", 0, "samples", value="many")
    yield "field 'facts'", at("facts", 0, "samples_factor", value={"larger batch": None})
    yield "field 'facts'", at("facts", 0, "unheard_of", value=1)
    yield "field 'findings'", at("findings", 0, "bound", value={"value": "x", "low": 1, "high": 2, "n": 8})
    yield "field 'findings'", at("findings", 0, "name", value=7)
    yield "field 'findings'", lambda row: row["findings"][0].pop("what")
    yield "field 'healthy'", at("healthy", value=[1])
    yield "field 'unknown'", lambda row: row.pop("unknown")
    yield "field 'provenance'", at("provenance", value="here")


@pytest.mark.parametrize(("words", "damage"), [*_damaged()])
def test_a_bad_file_is_refused_in_one_line(words, damage, tmp_path):
    path = report.write_json(sick(), tmp_path / "before.json")
    if isinstance(damage, str):
        path.write_text(damage)
    else:
        row = json.loads(path.read_text())
        damage(row)
        path.write_text(json.dumps(row))
    with pytest.raises(BadInput) as refused:
        report.load(path)
    message = str(refused.value)
    assert words in message and "before.json" in message and "\n" not in message and len(message) < 400


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(BadInput, match="cannot be read"):
            report.load(path)


@pytest.mark.skipif(not chromium.executable(), reason=chromium.MISSING)
def test_in_a_browser_it_fits_a_phone_follows_the_theme_and_asks_for_nothing(tmp_path):
    from playwright.sync_api import sync_playwright

    path = report.write_html(sick(), tmp_path / "page.html")
    asked, shades = [], {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.executable(), args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: asked.append(message.text))
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            shades[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.close()
        browser.close()
    assert asked == [path.as_uri()] * 2 and shades["light"] != shades["dark"]


@pytest.mark.parametrize(
    ("error", "let_it_write", "asked"),
    [
        ("OSError: no terminal (train.py:3)", False, True),
        ("OSError: no terminal (train.py:3)", True, False),
        ("ModuleNotFoundError: No module named 'timm' (train.py:3)", False, False),
        ("EOFError: EOF when reading a line (train.py:3)", False, False),
    ],
)
def test_only_what_the_scratch_folder_may_have_caused_is_asked_about(error, let_it_write, asked):
    facts, order = made(), SimpleNamespace(let_it_write=let_it_write)
    facts.ended, facts.error = "error", error
    assert any("--let-it-write" in line for line in doctor.last_words([facts], order)) is asked
