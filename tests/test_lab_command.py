"""`make lab`, the container and conda start JupyterLab with one command: on the learner's copy, and nothing else."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from jupyterlab.commands import get_app_dir
from jupyterlab_server.settings_utils import get_settings

from labs import start
from labs.kit.errors import BadInput

ROOT = Path(__file__).parents[1]
COMMAND = "labs.start"
PLACES = {
    "make lab": re.search(r"^lab:.*\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)[0],
    "docker run": re.search(r"^CMD .*", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0],
    "conda": (ROOT / "environment.yml").read_text().splitlines()[0],
}


@pytest.fixture
def course(tmp_path):
    """The notebooks, in a folder with a space and a percent sign in its name."""
    root = tmp_path / "my 100% course"
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    return root


def test_there_is_one_way_to_start():
    assert all(COMMAND in place and "root_dir" not in place for place in PLACES.values())


def defaults(folder: Path, home: Path) -> dict:
    """What JupyterLab takes for a user who has set nothing, with `--LabApp.app_settings_dir` at `folder`."""
    name = "@jupyterlab/apputils-extension:notification"
    found, warnings = get_settings(str(folder), str(Path(get_app_dir()) / "schemas"), str(home), name)
    assert not any(warnings)
    return {key: value["default"] for key, value in found["schema"]["properties"].items()}


def option(name: str, given: list[str]) -> str:
    (found,) = (g.partition("=")[2] for g in given if g.startswith(f"--{name}="))
    return found


def test_a_new_learner_is_asked_nothing(tmp_path):
    """`--LabApp.news_url=None` does not keep JupyterLab 4.6 from asking."""
    found = defaults(Path(option("LabApp.app_settings_dir", start.arguments("my/a.ipynb"))), tmp_path)
    assert (found["fetchNews"], found["checkForUpdates"]) == ("false", False)
    assert defaults(tmp_path, tmp_path)["fetchNews"] == "none", "JupyterLab asks no longer by itself: drop the option"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("00", "my/00_gpu_checks.ipynb"),
        ("./my/../my/03_dataparallel_vs_ddp.ipynb", "my/03_dataparallel_vs_ddp.ipynb"),
    ],
)
def test_a_name_opens_the_learners_copy(course, name, path):
    found, said = start.opened(name, course)
    assert found == path and (course / path).is_file() and len(said) == 1
    assert start.opened(name, course) == (path, [])


def test_a_copy_under_a_name_of_its_own_is_opened_too(course):
    start.opened("00", course)
    (course / "my" / "00_gpu_checks.ipynb").rename(course / "my" / "my try, 50%.ipynb")
    path, _ = start.opened("my/my try, 50%.ipynb", course)
    assert option("LabApp.default_url", start.arguments(path, course)) == "/lab/tree/my/my%20try%2C%2050%25.ipynb"
    assert option("ServerApp.root_dir", start.arguments(path, course)) == str(course)


def test_another_path_is_opened_as_it_stands(course):
    """For readers: nothing is written, so that it works where nothing can be written."""
    path = "notebooks/03_dataparallel_vs_ddp.ipynb"
    assert start.opened(path, course) == (path, []) and start.opened(str(course / path), course) == (path, [])
    assert not (course / "my").exists()


def test_my_may_be_a_link_to_a_folder_elsewhere(course, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (course / "my").symlink_to(tmp_path / "elsewhere")
    assert (
        start.opened("00", course)[0] == start.opened("my/00_gpu_checks.ipynb", course)[0] == "my/00_gpu_checks.ipynb"
    )
    assert (tmp_path / "elsewhere" / "00_gpu_checks.ipynb").is_file()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("77", "there is no notebook '77'; there are 00_gpu_checks, "),
        ("../secret.txt", "there is no file ../secret.txt in the course"),
        ("my/none.ipynb", "there is no file my/none.ipynb: name a notebook, such as 03"),
    ],
)
def test_what_is_not_there_is_one_line(course, name, told):
    with pytest.raises(BadInput, match=re.escape(told)):
        start.opened(name, course)


def test_bad_input_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["labs.start", "77", "--no-browser"])
    with pytest.raises(SystemExit, match="2"):
        start.main()
    assert capsys.readouterr().err.startswith("python -m labs.start: there is no notebook '77'")


def test_what_follows_the_notebook_goes_to_jupyterlab(monkeypatch):
    import jupyterlab.labapp

    asked, given = [], []
    monkeypatch.setattr(start, "opened", lambda name: asked.append(name) or (f"my/{name}.ipynb", []))
    monkeypatch.setattr(jupyterlab.labapp, "main", lambda: given.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["labs.start", "03", "--no-browser", "--port", "9000"])
    monkeypatch.setenv("JUPYTER_PATH", "elsewhere")
    monkeypatch.delenv("JUPYTER_PREFER_ENV_PATH")
    start.main()
    assert asked == ["03"] and given == [*start.arguments("my/03.ipynb"), "--no-browser", "--port", "9000"]
    assert os.environ["JUPYTER_PREFER_ENV_PATH"] == "1" and "JUPYTER_PATH" not in os.environ
