"""The repository around the notebooks: one list of dependencies, honest instructions, nothing of one machine."""

import ast
import importlib.metadata
import importlib.util
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
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
REQUIREMENTS = {canonicalize_name(r.name): r for r in [*BASE, *EXTRAS]}
# Dependencies that are run, not imported.
TOOLS = set("jupyterlab ipykernel jsonschema nbval pytest-rerunfailures pytest-timeout pytest-xdist ruff".split())
# What torch brings for CUDA, and pins itself.
CUDA = re.compile(r"nvidia-(?!ml-py)|triton|cuda-")
INSTALL = "-c constraints.txt -e .[course]"
# In parts, so that this file passes its own test.
HOSTS = [".".join(p) for p in (("pypi", "org"), ("pythonhosted", "org"), ("deb", "debian", "org"), ("npmjs", "org"))]
HOSTS += [".".join(p) for p in (("anaconda", "org"), ("download", "pytorch", "org"), ("crates", "io"))]
MACHINE_PATHS = ["/".join(["", *p, ""]) for p in (("root",), ("work",), ("farm",), ("Users",), ("home", "user"))]


def tracked() -> list[Path]:
    """The repository's own files: tracked, or new and not ignored."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    if listed is None or listed.returncode:  # a container without git, an archive without .git
        skip = {".venv", ".venv-book", "my", "build", ".cache", "__pycache__", ".pytest_cache", ".ruff_cache"}
        skip.add("gpu_training_course.egg-info")
        return [p for p in ROOT.rglob("*") if p.is_file() and not skip & set(p.relative_to(ROOT).parts)]
    return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]


def pins() -> dict[str, str]:
    """Exact versions in constraints.txt by canonical name."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


# -- one list of dependencies


def test_constraints_pin_every_dependency_within_its_bounds():
    versions = pins()
    for name, requirement in REQUIREMENTS.items():
        assert name in versions, f"{name} has no exact version: run `make constraints`"
        assert requirement.specifier.contains(versions[name]), f"{name}=={versions[name]} is out of bounds"
    assert "+" not in "".join(versions.values()), "a local version would forbid the CUDA build"


@pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] != (3, 11), reason="versions are tested on Linux, Python 3.11"
)
def test_constraints_pin_everything_that_is_installed_along():
    versions, todo, seen = pins(), list(REQUIREMENTS.values()), set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or CUDA.match(name):
            continue
        seen.add((name, *requirement.extras))
        installed = importlib.metadata.version(name).partition("+")[0]
        assert versions.get(name) == installed, f"{name} {installed} is not the version of constraints.txt"
        needs = map(Requirement, importlib.metadata.requires(name) or [])
        extras = requirement.extras or {""}
        todo += [r for r in needs if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)]


def imported(tree: ast.AST) -> set[str]:
    """Names of all modules that a syntax tree imports."""
    nodes = list(ast.walk(tree))
    plain = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return plain | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}


def test_dependencies_are_those_that_the_code_imports():
    files = [*(ROOT / "labs").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    modules = {m.partition(".")[0] for f in files for m in imported(ast.parse(f.read_text()))}
    own = {"labs"} | {p.stem for folder in ("tests", "book") for p in (ROOT / folder).iterdir()}
    owners = importlib.metadata.packages_distributions()
    third_party = modules - own - set(sys.stdlib_module_names)
    needed = {canonicalize_name(owners[m][0]) for m in third_party if m in owners}
    assert {m for m in third_party if m not in owners} <= {"apex"}, "imports that no installed package provides"
    assert needed - set(REQUIREMENTS) == set(), "imported, but not in pyproject.toml"
    assert set(REQUIREMENTS) - needed - TOOLS == set(), "in pyproject.toml, but not imported"


def test_environment_yml_holds_python_and_the_list():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(d["pip"] for d in dependencies if isinstance(d, dict))
    assert " ".join(pip) == INSTALL
    names = [d for d in dependencies if isinstance(d, str)]
    assert [n.partition("=")[0] for n in names] == ["python", "pip"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(names[0].partition("=")[2] + ".0")


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (INSTRUCTION, arguments), comments gone and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(w[0].upper(), w[1]) for line in text.splitlines() if (w := line.split(None, 1))]


def test_dockerfile_installs_the_list_as_a_user_without_privileges():
    steps = instructions()
    assert [name for name, _ in steps[:2]] == ["ARG", "FROM"] and steps[1][1] == "${BASE}"
    base = steps[0][1].removeprefix("BASE=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(re.search(r"python:(\d+\.\d+)", base)[1] + ".0")
    installs = [value for name, value in steps if name == "RUN" and "pip install" in value]
    extras = next(value for name, value in steps if value.startswith("EXTRAS="))
    shown = [i.partition("pip install ")[2].replace('"', "").replace("${EXTRAS}", extras[7:]) for i in installs]
    assert shown == ["${PIP_ARGS} " + INSTALL]
    users = [(index, value) for index, (name, value) in enumerate(steps) if name == "USER"]
    assert users and all(value not in {"root", "0"} for _, value in users)
    assert users[0][0] < min(i for i, (_, value) in enumerate(steps) if "pip install" in value)
    assert steps[-1][0] == "CMD" and "labs.start" in steps[-1][1]
    code = "\n".join(value for _, value in steps)
    assert not re.search(r"token|password|allow.root|disable_check_xsrf", code, re.IGNORECASE), "the token stays on"


WITHOUT_VERSIONS = ["Makefile", "Dockerfile", "environment.yml", ".ci/run"]
WITHOUT_VERSIONS += [".github/workflows/ci.yml", ".github/workflows/book.yml"]


def test_wheel_holds_all_modules_and_data(tmp_path):
    for path in tracked():
        inside = path.relative_to(ROOT)
        if inside.parts[0] in {"labs", "pyproject.toml", "README.md", "LICENSE"}:
            (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / inside).write_bytes(path.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path, tmp_path]
    subprocess.run([*map(str, build)], check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {p for f in tracked() if (p := f.relative_to(ROOT).as_posix()).startswith("labs/")} - packed == set()


# -- commands


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))} | variables
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_commands_of_the_pages_exist():
    pages = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/COMMANDS.md", "docs/WATCH.md"))
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.MULTILINE))
    assert {"lab", "course", "test", "test-all"} <= targets <= makefile_targets()
    modules = set(re.findall(r"-m (labs\.[\w.]+)", pages))
    assert modules and [m for m in modules if importlib.util.find_spec(m) is None] == []


def test_make_says_in_one_line_that_python_is_missing():
    done = make("-B", ".venv/.ready", PYTHON="no-such-python")
    assert done.returncode != 0
    assert "Python 3.11 or later is needed (no-such-python is absent or older)" in done.stderr.splitlines()[0]


# -- text


def test_links_resolve():
    broken = []
    for path in (p for p in tracked() if p.suffix == ".md"):
        targets = [t for t in re.findall(r"\]\(([^)#\s]+)", path.read_text()) if not re.match(r"[a-z]+:", t)]
        broken += [f"{path.relative_to(ROOT)}: {t}" for t in targets if not (path.parent / t).exists()]
    assert broken == []


def test_no_word_of_a_registry_or_of_one_machine():
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {w}" for w in [*HOSTS, *MACHINE_PATHS] if w in text]
    assert found == []
