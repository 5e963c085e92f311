"""JupyterLab opens a notebook and nothing else: no popup asks for consent to news or speaks of updates."""

import re
from pathlib import Path

import pytest
from jupyterlab.commands import get_app_dir
from jupyterlab_server.settings_utils import get_settings

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "make lab": re.search(r"^lab:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)[0],
    "docker run": re.search(r"^CMD (?:.*\\\n)*.*", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0],
}


def defaults(folder: Path, home: Path) -> dict:
    """What JupyterLab takes for a user who has set nothing, with `--LabApp.app_settings_dir` at `folder`."""
    name = "@jupyterlab/apputils-extension:notification"
    found, warnings = get_settings(str(folder), str(Path(get_app_dir()) / "schemas"), str(home), name)
    assert not any(warnings)
    return {key: value["default"] for key, value in found["schema"]["properties"].items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_new_learner_is_asked_nothing(command, tmp_path):
    """`--LabApp.news_url=None` does not keep JupyterLab 4.6 from asking."""
    folders = re.findall(r"--LabApp\.app_settings_dir=([\w/.-]+)", COMMANDS[command])
    assert len(folders) == 1
    found = defaults(ROOT / folders[0], tmp_path)
    assert (found["fetchNews"], found["checkForUpdates"]) == ("false", False)
    assert defaults(tmp_path, tmp_path)["fetchNews"] == "none", "JupyterLab asks no longer by itself: drop the option"
