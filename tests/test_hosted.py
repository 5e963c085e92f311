"""labs/hosted.py: a machine that has a torch of its own keeps it; what cannot work is one line."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from fakes import FakeNvml, card
from processes import SLOWER
from test_machine_checks import BUILD, facts, one, trouble

from labs import hosted, start
from labs.kit import hardware, requirements

ROOT = Path(__file__).parents[1]
COURSE = requirements.project()["tool"]["course"]
README = (ROOT / "README.md").read_text("utf-8")
PIN = requirements.needed()["torch"]
EVERYTHING = requirements.tested()


def here(**changes) -> dict[str, str | None]:
    """The packages of a machine that has all in the tested versions, changed."""
    return {name: EVERYTHING[name] for name in requirements.needed()} | {
        name.replace("_", "-"): version for name, version in changes.items()
    }


def plan(in_kernel=True, **changes):
    return hosted.make_plan(requirements.needed(), EVERYTHING, here(**changes), COURSE, in_kernel)


# -- what pyproject.toml says


def test_every_dependency_has_an_oldest_version_that_can_be_read():
    """hosted.py has no library to read requirements with: a line of another form would be left out in silence."""
    lines = requirements.project()["project"]["dependencies"]
    assert len(requirements.needed()) == len(lines) and set(requirements.needed()) <= set(EVERYTHING)
    assert set(COURSE["front-end"]) | set(COURSE["tests"]) <= set(requirements.needed())


def test_the_oldest_python_and_torch_are_told_once():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert asked == f">={'.'.join(map(str, hosted.OLDEST_PYTHON))}"
    assert f"torch {COURSE['oldest-torch']}" in README
    assert requirements.numbers(COURSE["oldest-torch"]) <= requirements.numbers(PIN)


@pytest.mark.long
def test_what_notebooks_run_needs_nothing_that_a_hosted_machine_goes_without():
    """A kernel there has neither the tests' packages nor JupyterLab: other front ends start kernels, too."""
    without = {*COURSE["tests"], "jupyterlab", "jupyterlab-server", "papermill"}
    owners = importlib.metadata.packages_distributions()
    files = [p for p in (ROOT / "labs").rglob("*.py") if p.parts[-2] != "classroom"]
    for path in files:
        tree = ast.parse(path.read_text("utf-8"))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        packages = {owner.lower() for name in names for owner in owners.get(name.partition(".")[0], ())}
        assert packages & without == set() or path.stem in ("course", "start"), path


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.9.1+cu128", (2, 9, 1)), ("2.10.0", (2, 10)), ("2.9.0a0+50eac811.nv25.09", (2, 9)), ("unknown", ())],
)
def test_versions_are_compared_as_numbers(version, numbers):
    assert requirements.numbers(version) == numbers


# -- the plan


def test_the_torch_that_is_there_stays_whatever_its_build():
    made = plan(torch="2.99.0+cu999")
    assert made.install == {} and made.stay["torch"] == "2.99.0+cu999"
    assert str(made).endswith(
        f"; torch 2.99.0+cu999 stays (the course was tested with {PIN}); nothing else is missing."
    )
    assert "(" not in str(plan(torch=f"{PIN}+cu130"))


def test_without_a_torch_the_tested_one_is_installed():
    made = plan(torch=None)
    assert made.install == {"torch": PIN} and "torch" not in made.stay
    assert f"no torch: pip installs {PIN}" in str(made)


def test_what_is_missing_or_too_old_is_installed_as_tested_and_the_rest_left_alone():
    made = plan(tyro=None, psutil="5.9.5", numpy="2.0.2")
    assert made.install == {name: EVERYTHING[name] for name in ("tyro", "psutil")} and made.old == {"psutil": "5.9.5"}
    assert str(made).endswith("pip installs tyro and replaces psutil 5.9.5, too old.")


def test_the_page_keeps_its_own_front_end_and_needs_no_other():
    made = plan(ipython="7.34.0", ipykernel="6.17.1", jupyterlab=None, pytest=None)
    assert made.install == {} and made.stay["ipython"] == "7.34.0"
    in_a_shell = plan(in_kernel=False, jupyterlab=None, pytest=None)
    assert list(in_a_shell.install) == ["jupyterlab"], "a shell has no page yet; nobody tests there"


@pytest.mark.parametrize(
    ("names", "text"),
    [("a", "a"), ("ab", "a and b"), ("abcde", "a, b, c, d and e"), ("abcdefg", "a, b, c, d and 3 more")],
)
def test_a_list_stays_one_line(names, text):
    assert hosted.listed(list(names)) == text


# -- what cannot work, in one line


def test_an_old_python_is_told_before_anything_else():
    assert hosted.python_problem((3, 11)) == hosted.python_problem((3, 14)) == ""
    assert "Python 3.10 is older than 3.11" in hosted.python_problem((3, 10))


def test_a_look_at_pip_leaves_setuptools_importable():
    """Notebook 01 imports it in the kernel in which hosted.py has looked: torch.utils.benchmark does."""
    look = "from labs import hosted; print(hosted.pip_problem('/', None, False, '')); import setuptools"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"purelib": "{closed}", "user_site": "{open}/lib"}, ""),
        ({"purelib": "{closed}", "user_site": "{closed}/lib"}, "nothing can be installed in {closed} or {closed}/lib"),
        ({"purelib": "{closed}", "user_site": "{open}", "in_venv": True}, "nothing can be installed in {closed}:"),
        ({"managed": "{open}"}, "belongs to the system"),
        ({"managed": "{open}", "in_venv": True}, ""),
    ],
)
def test_a_python_that_takes_no_packages_gets_an_environment_beside_it(tmp_path, monkeypatch, changes, words):
    places = {"open": str(tmp_path / "open"), "closed": str(tmp_path / "closed")}
    for place in places.values():
        Path(place).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(places["closed"]))  # root may always
    asked = {"purelib": "{open}", "user_site": None, "in_venv": False, "managed": "{open}/none"} | changes
    filled = {key: value.format(**places) if isinstance(value, str) else value for key, value in asked.items()}
    problem = hosted.pip_problem(**filled)
    assert words.format(**places) in problem and bool(problem) == bool(words)
    assert not problem or "-m venv --system-site-packages" in problem


def test_a_small_shm_and_a_closed_home_are_told(tmp_path, monkeypatch):
    assert list(hosted.warnings(2**31, tmp_path)) == list(hosted.warnings(None, tmp_path)) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    shm, home = hosted.warnings(64 * 2**20, tmp_path)
    assert "/dev/shm has 64 MiB" in shm and "--shm-size=2g" in shm and "export HOME=" in home


def test_too_old_a_torch_ends_the_start_before_jupyterlab_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "installed", lambda name: "2.0.1+cu118")
    monkeypatch.setattr(start, "opened", lambda name: pytest.fail("it went on"))
    monkeypatch.setattr(sys, "argv", ["labs.start"])
    with pytest.raises(SystemExit, match="2"):
        start.main()
    said = capsys.readouterr().err
    assert said.startswith("python -m labs.start: torch 2.0.1+cu118 is older than") and said.count("\n") == 1


def test_a_torch_without_an_installer_is_found_by_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\n__version__ = '2.9.0a0+git1a2b'\n")
    asked = "from labs.kit import requirements; print(requirements.installed('torch'))"
    command = [sys.executable, "-S", "-c", asked]
    done = subprocess.run(command, env=paths(tmp_path, ROOT), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2.9.0a0+git1a2b"


def test_without_its_repository_nobody_knows_the_oldest_torch(tmp_path):
    assert requirements.torch_problem("1.0", tmp_path) == ""


# -- two T4, as on Kaggle


def two_t4() -> FakeNvml:
    return FakeNvml([card(f"GPU-000{n}", "Tesla T4", capability=(7, 5)) for n in (1, 2)])


def build(torch: str) -> dict:
    return BUILD | {"torch": torch, "arch_list": ["sm_75", "sm_80", "sm_90"]}


def test_the_preflight_goes_on_with_another_torch_and_ends_with_one_too_old():
    status, detail = one(facts(two_t4(), build("2.11.0+cu128"), require_gpus=2))
    assert status == "warn" and f"2.11.0+cu128, tested with {PIN}" in detail
    assert trouble(facts(two_t4(), build(PIN), require_gpus=2)) == {}
    status, detail = one(facts(two_t4(), build("2.0.1+cu118"), require_gpus=2))
    assert status == "fail" and "is older than" in detail


def test_ranks_get_a_t4_each(monkeypatch):
    monkeypatch.setattr(hardware, "visible_gpu_names", lambda: ["Tesla T4"] * 2)
    assert [(d.kind, d.index) for d in hardware.place(2, "auto", False)] == [("cuda", 0), ("cuda", 1)]


# -- the program itself, with a pip that writes down what it is asked for

PIP = """
import json, os, sys
words = sys.argv[1:]
constraints = open(words[words.index("-c") + 1]).read() if "-c" in words else ""
with open(os.environ["ASKED"], "a") as f:
    f.write(json.dumps([words, constraints]) + "\\n")
if os.environ.get("PIP_FAILS"):
    sys.exit("WARNING: a\\nERROR: No matching distribution found\\nafter")
"""


@pytest.fixture
def machine(tmp_path):
    """A folder of packages: a pip of ours, a torch of the owner's, an old psutil, and nothing else."""
    for name, version in {"torch": "2.11.0+cu128", "psutil": "5.9.5", "ipython": "7.34.0"}.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    return tmp_path


def paths(*folders: Path, **more: str) -> dict[str, str]:
    """An environment without the caller's packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(machine: Path, *words: str, **more: str) -> subprocess.CompletedProcess:
    """`python labs/hosted.py` on that machine; -S hides the packages of this Python."""
    command = [sys.executable, "-S", str(ROOT / "labs" / "hosted.py"), *words]
    environment = paths(machine, ASKED=str(machine / "asked"), **more)
    return subprocess.run(command, cwd=machine, env=environment, capture_output=True, text=True)


def asked(machine: Path) -> list:
    path = machine / "asked"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_one_line_says_what_is_done_and_pip_may_not_touch_torch(machine):
    done = run(machine, "--extra-index-url", "https://example.org/whl")
    assert done.returncode == 0, done.stderr
    line = r"Python 3\.\d+; torch 2\.11\.0\+cu128 stays .*; pip installs .* and replaces psutil 5\.9\.5, too old\."
    assert re.match(line, done.stdout)
    assert done.stdout.splitlines()[-1].startswith("Ready.")
    (packages, stay), (course, _) = asked(machine)
    assert "torch==2.11.0+cu128\n" in stay and "ipython==7.34.0\n" in stay
    wanted = [word for word in packages if "==" in word]
    assert f"psutil=={EVERYTHING['psutil']}" in wanted and f"jupyterlab=={EVERYTHING['jupyterlab']}" in wanted
    assert not [word for word in wanted if word.startswith(("torch", "ipython=", "pytest"))]
    assert "--extra-index-url" in packages and "--extra-index-url" in course
    assert course[-3:] == ["--no-deps", "-e", str(ROOT)]


def test_a_course_that_is_installed_already_is_not_installed_again(machine):
    (info := machine / "gpu_training_course-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-training-course\nVersion: 0.1.0\n")
    for folder, times in ((ROOT, 0), (machine, 1)):
        (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
        (machine / "asked").unlink(missing_ok=True)
        assert run(machine).returncode == 0
        assert len([words for words, _ in asked(machine) if "-e" in words]) == times


def test_without_torch_pip_is_asked_for_the_tested_one(machine):
    shutil.rmtree(next(machine.glob("torch-*")))
    done = run(machine)
    assert done.returncode == 0 and f"no torch: pip installs {PIN}" in done.stdout
    assert f"torch=={PIN}" in asked(machine)[0][0] and "torch" not in asked(machine)[0][1]


def test_too_old_a_torch_is_one_line_and_asks_pip_for_nothing(machine):
    info = next(machine.glob("torch-*"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    info.rename(machine / "torch-1.13.1.dist-info")
    done = run(machine)
    assert done.returncode == 2 and asked(machine) == [] and done.stdout == ""
    assert done.stderr.startswith("labs/hosted.py: torch 1.13.1 is older than") and done.stderr.count("\n") == 1


def test_a_pip_that_fails_is_one_line_with_its_reason(machine):
    done = run(machine, PIP_FAILS="1")
    assert done.returncode == 1 and "Ready" not in done.stdout
    assert "ERROR: No matching distribution found" in done.stderr and done.stderr.count("\n") == 1


def test_a_torch_that_was_replaced_all_the_same_is_told(machine, monkeypatch):
    found = iter(["2.12.0"])
    monkeypatch.setattr(requirements, "installed", lambda name: next(found))
    monkeypatch.setattr(hosted, "pip", lambda arguments: None)
    with pytest.raises(hosted.Stop, match=re.escape("replaced torch 2.11.0 by 2.12.0")):
        hosted.install(hosted.Plan("2.11.0", PIN), [])


def test_what_a_kernel_holds_in_its_old_version_needs_a_restart(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "papermill", raising=False)
    assert hosted.loaded_before({"nvidia-ml-py": "1", "papermill": "2"}) == ["nvidia-ml-py"]


# -- a real pip


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """The smallest wheel that pip takes."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {n}\n" for n in needs)
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}.py", "")
        packed.writestr(f"{info}/METADATA", metadata)
        packed.writestr(f"{info}/WHEEL", tag)
        packed.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(("asks", "wins"), [("torch>=2", True), ("torch>=2.99", False)])
def test_a_package_that_asks_for_a_newer_torch_is_refused_and_torch_stays(tmp_path, asks, wins):
    """The one thing that must not happen on a machine with GPUs: another build of torch, by way of a dependency."""
    (wheels := tmp_path / "wheels").mkdir()
    wheel(wheels, "torch", "2.11.0")
    wheel(wheels, "torch", "2.99.0")
    wheel(wheels, "tyro", EVERYTHING["tyro"], asks)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "pip").symlink_to(Path(importlib.machinery.PathFinder.find_spec("pip").origin).parent)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from labs import hosted
offline = ["--no-index", "--find-links", {str(wheels)!r}]
hosted.pip([*offline, "torch==2.11.0"])
real = hosted.pip
hosted.pip = lambda words: None if "-e" in words else real(words)  # the course itself is built with the network's help
plan = hosted.Plan("2.11.0", {PIN!r}, {{"tyro": {EVERYTHING["tyro"]!r}}}, {{}}, {{"torch": "2.11.0"}})
try:
    hosted.install(plan, offline)
finally:
    from labs.kit.requirements import installed
    print(installed("torch"), installed("tyro"))
"""
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=paths(tmp_path / "tools"))
    assert done.stdout.split() == ["2.11.0", EVERYTHING["tyro"] if wins else "None"], done.stderr
    assert wins or "ERROR" in done.stderr


# -- what the page says


def cell() -> str:
    return re.search(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_cell_of_the_page_makes_labs_importable_in_its_kernel(machine, tmp_path):
    """As on Colab: an IPython of the host's, another folder, a clone; only pip is ours."""
    (work := tmp_path / "content").mkdir()
    (origin := tmp_path / "origin").mkdir()
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "labs/__init__.py",
        "labs/hosted.py",
        "labs/kit/__init__.py",
        "labs/kit/requirements.py",
    ):
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, origin / name)
    as_somebody = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*as_somebody, *words], check=True)
    for info in machine.glob("*.dist-info"):
        shutil.rmtree(info)
    lines = [cell().replace("https://github.com/OWNER/NAME", origin.as_uri())]
    lines += ["import labs.kit.requirements as r; print('from', r.__file__)"]
    script = "from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
    script += "".join(f"assert shell.run_cell({line!r}).success\n" for line in lines)
    environment = paths(machine, ASKED=str(machine / "asked"), IPYTHONDIR=str(tmp_path / "ipython"))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=250 * SLOWER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from {work / 'course' / 'labs' / 'kit' / 'requirements.py'}" in done.stdout
    assert f"torch {importlib.metadata.version('torch')} stays" in done.stdout
    assert asked(machine)[-1][0][-1] == str(work / "course")


@pytest.mark.parametrize("url", ["https://github.com/ada/gpu.course", "git@github.com:ada/gpu.course.git\n"])
def test_links_are_those_of_the_page_for_any_clone(url):
    found = hosted.links(url)
    assert set(found) == {"Colab", "Kaggle", "Codespaces", "Binder"}
    for place, address in found.items():
        row = next(line for line in README.splitlines() if line.startswith(f"| {place} "))
        assert address.replace("ada/gpu.course", "OWNER/NAME") in row, place
        named = re.search(r"/((?:notebooks|my)/(\w+)\.ipynb)$", address)
        assert named is None or (ROOT / "notebooks" / f"{named[2]}.ipynb").is_file()


def test_links_of_something_else_are_refused_in_one_line(capsys):
    assert hosted.main(["--links", "https://example.org/ada/course"]) == 2
    assert "no clone of a repository on GitHub" in capsys.readouterr().err


def test_codespaces_installs_as_the_makefile_does():
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    make, copies = found["onCreateCommand"].split(" && ")
    assert make == "make .venv/.ready" and "\nREADY := .venv/.ready\n" in (ROOT / "Makefile").read_text()
    assert copies == ".venv/bin/python -m labs.kit.copies"
    assert f"python:{'.'.join(map(str, hosted.OLDEST_PYTHON))}" in found["image"], "the version that was tested"
    (first,) = found["customizations"]["codespaces"]["openFiles"]
    assert first == f"my/{hosted.FIRST}.ipynb" and "--shm-size=2g" in found["runArgs"]


def test_binder_takes_conda_for_torch_and_this_program_for_the_rest():
    dependencies = yaml.safe_load((ROOT / ".binder" / "environment.yml").read_text())["dependencies"]
    assert {"pip", "pytorch-cpu"} < set(dependencies)
    script = ROOT / ".binder" / "postBuild"
    assert os.access(script, os.X_OK) and subprocess.run(["bash", "-n", script]).returncode == 0
    for words in (line.split() for line in script.read_text().splitlines() if line.startswith("python ")):
        target = ROOT / words[1] if words[1] != "-m" else ROOT / (words[2].replace(".", "/") + ".py")
        assert target.is_file(), words
