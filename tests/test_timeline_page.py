"""The page of a merged timeline in a real browser: without a network, by keys and by mouse, light and dark."""

import chromium
import pytest
from made_traces import made, written
from playwright.sync_api import sync_playwright

from labs import rank_timeline

pytestmark = pytest.mark.skipif(not chromium.executable(), reason=chromium.MISSING)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    paths = written(folder, made(2, steps=6, late={1: 0.03}))
    return rank_timeline.write(rank_timeline.read_traces(paths), folder / "out", paths)[0]


@pytest.fixture(params=["light", "dark"])
def page(request, file):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.executable(), args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(color_scheme=request.param, offline=True, viewport={"width": 1100, "height": 800})
        found = context.new_page()
        problems = []
        found.on("console", lambda message: problems.append(message.text))
        found.on("pageerror", lambda error: problems.append(str(error)))
        found.goto(file.as_uri())
        found.wait_for_selector("#view rect.l2")
        yield found
        browser.close()
        assert problems == []


one_theme = pytest.mark.parametrize("page", ["light", pytest.param("dark", marks=pytest.mark.long)], indirect=True)


def shown_ms(page):
    """(first, last) time on the axis, in ms."""
    ticks = page.eval_on_selector_all("#view text", "all => all.map(e => e.textContent)")
    times = [float(t.removesuffix(" ms").replace(",", "")) for t in ticks if t.endswith(" ms")]
    return times[0], times[-1]


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@one_theme
def test_keys_zoom_pan_and_tell(page):
    page.focus("#view")
    whole = shown_ms(page)
    press(page, "+", "+")
    near = shown_ms(page)
    assert near[1] - near[0] < 0.5 * (whole[1] - whole[0])
    press(page, "ArrowRight")
    assert shown_ms(page)[0] > near[0]
    press(page, "Home")
    assert shown_ms(page) == whole
    press(page, "s", "n")
    assert "rank 0, data" in page.inner_text("#told")
    for _ in range(40):
        press(page, "n")
    assert "rank 0" in page.inner_text("#told") and len(page.query_selector_all("rect.chosen")) == 1


@one_theme
def test_mouse_and_buttons(page):
    whole = shown_ms(page)
    page.click("#in")
    press(page)
    assert shown_ms(page)[1] < whole[1]
    page.click("#all")
    box = page.query_selector("#view").bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 100)
    for _ in range(3):
        page.mouse.wheel(0, -100)
    press(page)
    assert shown_ms(page)[1] - shown_ms(page)[0] < whole[1] - whole[0]


def test_it_is_readable_in_both_themes_and_without_the_picture(page):
    """The lettering differs from its ground, bars from theirs; a table says the same in numbers."""
    colors = page.evaluate("""() => {
        const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
        return [of("body", "backgroundColor"), of("#view text", "fill"), of("#view rect.band", "fill"),
                ...[...Array(6).keys()].map(k => of("#view rect.l" + k, "fill"))]; }""")
    light = [sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(", "))) for c in colors]
    assert abs(light[0] - light[1]) > 400 and len(set(colors)) == len(colors)
    assert all(abs(bar - light[2]) > 90 for bar in light[3:])
    rows = page.eval_on_selector_all("tbody tr", "all => all.map(e => e.innerText)")
    assert len(rows) == 2 and rows[0].startswith("rank 0")
