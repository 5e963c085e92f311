"""JupyterLab in a real browser, as a learner sees it: figures, progress, interrupt.

`python -m labs.start` in a fresh checkout opens the learner's copy of a notebook, cut after its first figure. It is run
by "Run All Cells", saved and read again: its pictures are shown, and no error.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chromium
import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Page, expect, sync_playwright
from processes import SURVIVAL_S, is_backstage, new_environment, wait_for

from labs.kit import copies
from labs.kit.notebook_report import pictures

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = NOTEBOOKS[0].name
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSER_ARGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
# windowingMode: by default JupyterLab takes cells out of the page that are not on the screen.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {
        "windowingMode": "none",
        "autoStartDefaultKernel": True,
    },
}
RUN_S = 400
expect.set_options(timeout=60_000)
# A traceback of IPython's own is an "error"; one that an exception renders itself comes as "stderr".
ERRORS = ", ".join(
    f'.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr")
)
ERRORS += ", .jp-RenderedMarkdown mjx-merror"  # a formula with a mistake

pytestmark = [
    pytest.mark.timeout(RUN_S + 120),
    pytest.mark.skipif(not chromium.executable() and not os.environ.get("CI"), reason=chromium.MISSING),
]

LONG = """from labs.kit.launch import launch
launch("data_parallel", nproc=2, rounds=1_000_000, timeout_s=300, smoke=False)"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The course as it comes, in a folder with a space in its name; its first notebook ends with its first figure."""
    root = tmp_path_factory.mktemp("lab") / "my course"
    for name in ("notebooks", "labs", "records"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "GLOSSARY.md", root)
    notebook = nbformat.read(root / "notebooks" / FIRST, as_version=4)
    last = next(n for n, c in enumerate(notebook.cells, start=1) if c.cell_type == "code" and pictures(c))
    notebook.cells = notebook.cells[:last]
    nbformat.write(notebook, root / "notebooks" / FIRST)
    return root


@pytest.fixture(scope="module")
def server(checkout):
    """`python -m labs.start` of that checkout, with smoke runs; yields its URL, token and process."""
    home = checkout.parent / "home"
    home.mkdir()
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serving(["-m", "labs.start"], home, PYTHONPATH=path) as server:
        yield server


@contextlib.contextmanager
def serving(options: list[str], home: Path, **more: str) -> Iterator[tuple[str, str, psutil.Process]]:
    """What Python starts with these options, which end in JupyterLab: its URL, token and process."""
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    names += ("JUPYTERLAB_WORKSPACES_DIR", "JUPYTERLAB_SETTINGS_DIR")
    environment = new_environment(COURSE_SMOKE="1", **{name: str(home / name) for name in names}, **more)
    for name, values in SETTINGS.items():
        (home / "JUPYTERLAB_SETTINGS_DIR" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "JUPYTERLAB_SETTINGS_DIR" / name).write_text(json.dumps(values))
    command = [sys.executable, *options, "--no-browser", "--ServerApp.port=0", "--ip=127.0.0.1"]
    command += ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []
    with open(home / "server.log", "w") as log:
        process = psutil.Popen(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = wait_for(lambda: list((home / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json")), what="JupyterLab")
        details = wait_for(lambda: _whole_json(found[0]), what="its address")
        wait_for(lambda: _listens(details["port"]), what="its port")  # JupyterLab binds it after it wrote that file
        yield details["url"], details["token"], process
    finally:
        family = [process, *process.children(recursive=True)]
        process.terminate()
        for left in psutil.wait_procs(family, timeout=10)[1]:
            left.kill()


def _whole_json(path: Path) -> dict | None:
    """What the file holds; None while it is being written."""
    with contextlib.suppress(ValueError):
        return json.loads(path.read_text())
    return None


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.executable(), args=BROWSER_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server, request):
    """A page; how it looked when the test ended is kept as a picture, and its kernel is ended."""
    url, token, _ = server
    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    page.on("dialog", lambda dialog: dialog.accept())
    yield page
    screenshot(page, re.sub(r"\W+", "-", request.node.name).strip("-"))
    for session in page.request.get(f"{url}api/sessions?token={token}").json():
        page.request.delete(f"{url}api/sessions/{session['id']}?token={token}")
    page.close()


def open_notebook(page: Page, server, name: str) -> None:
    url, token, _ = server
    page.goto(f"{url}lab/tree/{name}?token={token}&reset")
    expect(page.locator(".jp-Notebook")).to_be_visible()
    # Cells that are run before the kernel is connected do nothing, without a word.
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [c for c in notebook.cells if c.cell_type == "code"]


def run_all(page: Page) -> None:
    """Choose Run All Cells from the menu, as a person does."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def prompts(page: Page) -> list[str]:
    """The prompt of each code cell that contains anything: "[ ]:", "[*]:" or "[3]:"."""
    return page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()


def pictures_shown(page: Page) -> list[dict]:
    return page.locator(".jp-OutputArea-output img").evaluate_all(
        "images => images.map(i => ({alt: i.alt, width: i.naturalWidth, shown: i.getBoundingClientRect().width}))"
    )


def wait_until_done(page: Page) -> bool:
    """Wait until every cell has run; whether a launch's progress was seen meanwhile."""
    seen = False

    def done() -> bool:
        nonlocal seen
        seen = seen or page.locator(".labs-progress", has_text="running").count() > 0
        page.wait_for_timeout(100)
        return all(re.search(r"\d", prompt) for prompt in prompts(page)) or has_error(page)

    wait_for(done, RUN_S, "all cells to run")
    return seen


def has_error(page: Page) -> bool:
    return page.locator(ERRORS).count() > 0


def assert_no_error(page: Page) -> None:
    assert not has_error(page), page.locator(ERRORS).all_inner_texts()


def assert_pictures(page: Page, notebook: nbformat.NotebookNode) -> None:
    """Those of the file, loaded, not hidden, each with a text for who cannot see it."""
    wait_for(lambda: all(p["width"] > 0 for p in pictures_shown(page)), what="pictures to be decoded")
    shown = pictures_shown(page)
    assert shown and all(p["shown"] > 0 and len(p["alt"]) >= 10 for p in shown)
    assert [p["alt"] for p in shown] == [p.alt for c in code_cells(notebook) for p in pictures(c)]


def test_a_learner_runs_a_fresh_copy(page, server, checkout):
    url, token, _ = server
    mine = checkout / "my" / FIRST
    page.goto(f"{url}?token={token}")
    first = page.locator(".jp-Notebook")
    expect(first.locator("h1")).to_contain_text("Is this machine ready")
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")
    assert page.locator(".jp-OutputArea-output").count() == 0 and first.locator(".jp-CodeCell").count() > 3
    assert not any(re.search(r"\d", prompt) for prompt in prompts(page))
    expect(page.locator(".jp-DirListing-item")).to_have_count(len(NOTEBOOKS))
    page.locator(".jp-CodeCell .jp-InputArea-editor").first.click()
    page.keyboard.press("Control+Home")
    page.keyboard.type("# mine\n")
    run_all(page)
    progress_seen = wait_until_done(page)
    assert_no_error(page)
    assert progress_seen, "no launch showed its progress while it ran"
    page.keyboard.press("Control+s")
    saved = wait_for(lambda: run_completely(mine), what="the notebook to be saved")
    assert_pictures(page, saved)
    first.get_by_role("link", name=re.compile("^Next: measure time")).click()
    expect(page.locator(".jp-Notebook:visible h1")).to_contain_text("How fast is it really?")
    page.locator('.jp-Notebook:visible a[href*="labs/timing.py"]').first.click()
    expect(page.locator(".jp-FileEditor:visible")).to_contain_text("python -m labs.timing")
    assert "# mine" in mine.read_text() and copies.read(mine).made_of, "JupyterLab dropped what the copy says of itself"
    assert {f.state for f in copies.update(root=checkout)} == {"current"}


def run_completely(path: Path) -> nbformat.NotebookNode | None:
    """The notebook in the file once all its cells have been run; None while it is being written, too."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except ValueError:
        return None
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    return notebook if all(c.execution_count for c in cells) else None


@pytest.mark.drill
def test_interrupting_a_launch_leaves_nothing(page, server, checkout):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# Wait"), new_code_cell(LONG), new_code_cell("print('still' + ' here')")]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), checkout / "my" / "long.ipynb")
    open_notebook(page, server, "my/long.ipynb")
    page.locator(".jp-CodeCell .jp-InputArea-editor").first.click()
    page.keyboard.press("Shift+Enter")
    expect(page.locator(".labs-progress", has_text="running")).to_be_visible()
    kernel = next(p for p in server[2].children(recursive=True) if ranks(p) and "ipykernel_launcher" in p.cmdline())
    running = ranks(kernel)
    assert len(running) >= 2
    page.locator('[data-command="notebook:interrupt-kernel"], [title^="Interrupt the kernel"]').first.click()
    _, left = psutil.wait_procs(running, timeout=SURVIVAL_S)
    assert left == [] and ranks(kernel) == []
    expect(page.locator(".jp-OutputArea-output").last).to_contain_text("KeyboardInterrupt")
    expect(page.locator(".labs-progress")).to_contain_text("stopped")
    page.locator(".jp-CodeCell .jp-InputArea-editor").last.click()
    page.keyboard.press("Shift+Enter")
    expect(page.locator(".jp-CodeCell", has_text="'still'")).to_contain_text("still here")


def ranks(kernel: psutil.Process) -> list[psutil.Process]:
    """Processes of a kernel's running launch."""
    children = kernel.children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and not is_backstage(p, kernel.pid)]
