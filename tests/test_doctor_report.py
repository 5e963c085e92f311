"""The doctor's pages: what they say first, that a script's text is text in them, and what --compare reads."""

import json
import re
import xml.etree.ElementTree as ET

import chromium
import pytest
from doctor_profiles import STARVED, STEP_S, made

from labs.doctor import report
from labs.doctor.bottlenecks import Match
from labs.doctor.profile import Line
from labs.kit.errors import BadInput

EVIL = 'print(f"<script>alert(1)</script> & {loss!r}") # {{ 7 * 7 }} \u2028 ]]>'


def sick(**more):
    """It waits for data, prints, and has a line of each kind that is hard to write down."""
    hit = Match("evil", f"because {EVIL}", EVIL, "/x/train.py", 3, EVIL, {}, wrong=False, notebook="01")
    noted = Line("print", "print", "/x/train.py", 3, EVIL, 1.0, 5.0)
    modes = {"same batch again": STEP_S / 2, "no buffer broadcast": STEP_S}
    facts = made(STARVED, modes, lines=[noted], not_tried={"no exchange": "<b>none</b>"}, **more)
    return report.make([facts], [hit])


def test_the_page_says_the_largest_problem_first_and_fits_a_terminal():
    found = sick()
    lines = report.page(found).splitlines()
    assert lines[0].startswith("SLOW: each step waits 25.") and "Estimated gain 2.0" in " ".join(lines[:2])
    assert len(lines) <= 40 and max(map(len, lines)) <= report.COLUMNS
    waits = next(line for line in lines if "waiting for data" in line)
    assert "50 %" in waits and waits.count("#") == 25
    rest = report.page(found, everything=True)
    assert "no buffer broadcast: no gain that this run can show" in rest and "not tried: no exchange" in rest
    assert "not tried" not in "\n".join(lines)


def test_four_problems_are_shown_and_the_others_counted():
    modes = dict.fromkeys(("no waiting line", "no buffer broadcast"), STEP_S / 1.4)
    profile = made(STARVED, modes | {"same batch again": STEP_S / 2}, machine={"cores": 2, "threads": 4})
    profile.training["anomaly"] = True
    found = report.make([profile])
    assert len(found.problems) == 5
    page = report.page(found)
    assert "4. slow" in page and "5. slow" not in page and "1 more: --all" in page
    assert "MORE FINDINGS" in report.page(found, everything=True)


def test_a_healthy_script_is_told_so_in_one_line():
    modes = {"same batch again": STEP_S, "no buffer broadcast": STEP_S / 1.1}
    first = report.headline(report.make([made(modes=modes)]))
    assert first.startswith("train.py: no wrong result and no bottleneck was found") and "buffers" in first
    assert "No fix was tried" in report.headline(report.make([made()]))


@pytest.mark.parametrize(("told", "joined", "sees_all"), [(1, [1, 2], False), (4, [0, 1], False), (2, [0, 2], True)])
def test_there_is_no_verdict_on_ranks_that_the_doctor_does_not_see(told, joined, sees_all):
    facts = [made(modes={"same batch again": STEP_S}, rank=rank, ranks=told) for rank in range(told)]
    for f in facts:
        f.training["group"] = joined
    assert report.page(report.make(facts)).startswith("No verdict") != sees_all


def test_ranks_are_shown_side_by_side_only_if_they_differ():
    alike = [made(rank=rank, ranks=2) for rank in range(2)]
    assert report.rank_table(alike) == ([], [])
    header, rows = report.rank_table([made(ranks=2), made(STARVED, rank=1, ranks=2)])
    assert header[1:] == ["rank 0", "rank 1"]
    data = next(row[1:] for row in rows if row[0] == "waiting for data")
    assert [float(x) for x in data] == pytest.approx([1, 25], rel=0.02)


def test_the_html_is_well_formed_loads_nothing_and_holds_the_scripts_text_as_text():
    text = report.html(sick())
    tree = ET.fromstring(re.sub(r"<meta[^>]*>", "", text.removeprefix("<!DOCTYPE html>")))  # the rest of it is XML, too
    assert {e.tag for e in tree.iter()} & {"script", "img", "link", "iframe", "b"} == set()
    assert not [e for e in tree.iter() if {"src", "href", "onclick", "srcset"} & set(e.attrib)]
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    told = " ".join(tree.itertext())
    assert "<script>alert(1)</script>" in told and "{{ 7 * 7 }}" in told  # and not what a template makes of it


def test_json_comes_back_as_it_was(tmp_path):
    found = report.make([made(STARVED, {"same batch again": STEP_S / 2}, rank=rank, ranks=2) for rank in range(2)])
    path, page = report.save(found, tmp_path / "new" / "folder")
    assert report.load(path) == found and report.page(report.load(path)) == report.page(found)
    assert page.name == "report.html" and json.loads(path.read_text())["provenance"]["torch"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"doctor": 1}', '{"doctor": 3, "profiles": [{"x": 1}]}'])
def test_a_bad_file_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "before.json").write_text(text)
    with pytest.raises(BadInput) as refused:
        report.load(tmp_path / "before.json")
    message = str(refused.value)
    assert "before.json" in message and "\n" not in message and len(message) < 400


@pytest.mark.skipif(not chromium.executable(), reason=chromium.MISSING)
def test_in_a_browser_it_fits_a_phone_follows_the_theme_and_asks_for_nothing(tmp_path):
    from playwright.sync_api import sync_playwright

    path = tmp_path / "page.html"
    path.write_text(report.html(sick()))
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
