"""JupyterLab in a real browser, as a learner sees it: run all cells, watch progress and figures, interrupt."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chromium
import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Page, expect, sync_playwright
from processes import SURVIVAL_S, is_backstage, new_environment, wait_for

from labs.kit.course_page import pictures

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSER_ARGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
# windowingMode: by default JupyterLab takes cells out of the page that are not on the screen.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {
        "windowingMode": "none",
        "autoStartDefaultKernel": True,
    },
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
}
ENCRYPTED = "--KernelManager.transport_encryption=auto"  # as in `make lab`
RUN_S = 400
expect.set_options(timeout=60_000)
# A traceback of IPython's own is an "error"; one that an exception renders itself comes as "stderr".
ERRORS = ", ".join(
    f'.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.{kind}"]' for kind in ("error", "stderr")
)

pytestmark = [
    pytest.mark.timeout(RUN_S + 120),
    pytest.mark.skipif(not chromium.executable() and not os.environ.get("CI"), reason=chromium.MISSING),
]

LONG = """from labs.kit.launch import launch
launch("data_parallel", nproc=2, rounds=1_000_000, timeout_s=300)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the notebooks without their outputs, one whose cell runs until it is stopped, one that fails."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".*"))
    for path in folder.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# Wait"), new_code_cell(LONG), new_code_cell("print('still' + ' here')")]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "long.ipynb")
    cells = [new_markdown_cell("# Fail"), new_code_cell("1 / 0"), new_code_cell("1 + 1")]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "failing.ipynb")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """JupyterLab on a free port, with settings of its own; yields its URL, token and process."""
    home = folder.parent
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    names += ("JUPYTERLAB_WORKSPACES_DIR", "JUPYTERLAB_SETTINGS_DIR")
    environment = new_environment(**{name: str(home / name) for name in names})
    for name, values in SETTINGS.items():
        (home / "JUPYTERLAB_SETTINGS_DIR" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "JUPYTERLAB_SETTINGS_DIR" / name).write_text(json.dumps(values))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port=0", "--ip=127.0.0.1", ENCRYPTED]
    command += [
        f"--ServerApp.root_dir={folder}",
        *(["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []),
    ]
    with open(home / "server.log", "w") as log:
        process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = wait_for(lambda: list((home / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json")), what="JupyterLab")
        details = wait_for(lambda: (text := found[0].read_text()) and json.loads(text), what="its address")
        yield details["url"], details["token"], process
    finally:
        family = [process, *process.children(recursive=True)]
        process.terminate()
        for left in psutil.wait_procs(family, timeout=10)[1]:
            left.kill()


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium.executable(), args=BROWSER_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    """A page; how it looked when the test ended is kept as a picture."""
    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    page.on("dialog", lambda dialog: dialog.accept())
    yield page
    screenshot(page, re.sub(r"\W+", "-", request.node.name).strip("-"))
    page.close()


def open_notebook(page: Page, server, name: str) -> None:
    url, token, _ = server
    page.goto(f"{url}lab/tree/{name}?token={token}&reset")
    expect(page.locator(".jp-Notebook")).to_be_visible()
    # Cells that are run before the kernel is connected do nothing, without a word.
    expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")


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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_learner_runs_the_notebook(page, server, folder, path):
    open_notebook(page, server, path.name)
    run_all(page)
    progress_seen = wait_until_done(page)
    assert not has_error(page), page.locator(ERRORS).all_inner_texts()
    shown = pictures_shown(page)
    assert shown and all(p["width"] > 0 and p["shown"] > 0 and len(p["alt"]) >= 10 for p in shown)
    assert progress_seen or "launch(" not in path.read_text(), "no launch showed its progress while it ran"
    page.keyboard.press("Control+s")
    saved = wait_for(lambda: run_completely(folder / path.name), what="the notebook to be saved")
    assert sum(len(pictures(c)) for c in saved.cells if c.cell_type == "code") == len(shown)
    for number, picture in enumerate(p for p in shown if p["width"] > 300):
        figure = page.locator(f'.jp-OutputArea-output img[alt="{picture["alt"]}"]').first
        figure.screenshot(path=SCREENSHOTS / f"{path.stem}-figure-{number}.png")


def test_an_error_is_noticed(page, server):
    open_notebook(page, server, "failing.ipynb")
    run_all(page)
    wait_until_done(page)
    assert has_error(page)


def run_completely(path: Path) -> nbformat.NotebookNode | None:
    """The notebook in the file once all its cells have been run; None while it is being written, too."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except ValueError:
        return None
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    return notebook if all(c.execution_count for c in cells) else None


def test_interrupting_a_launch_leaves_nothing(page, server):
    open_notebook(page, server, "long.ipynb")
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
