"""Can the course run on this machine, with the torch that its owner has installed?

    ![ -d course ] || git clone -q --depth 1 https://github.com/OWNER/NAME course
    %run course/labs/hosted.py                 # the two lines of a cell on Colab or Kaggle, above all others

    python labs/hosted.py                      # in a shell; further options go to pip, such as --extra-index-url URL
    python labs/hosted.py --links              # links that open this repository on Colab, Kaggle, Codespaces and Binder

Says in one line what is here and what it will do, has pip install what is missing or too old, and makes `import labs`
work. A torch that is here stays, and so does what the page that you are looking at is made of (IPython, ipykernel).
Without a torch, pip installs the tested one. Standard library only. Exit code: 0 ready, 1 pip failed, 2 it cannot work
here: one line says why and what to do.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROG = "labs/hosted.py"
OLDEST_PYTHON = (3, 11)  # pyproject.toml says it, too, but an older Python cannot read that: a test compares them
SMALL_SHM_BYTES = 2**29  # as labs.kit.preflight
NAMES_SHOWN = 5
FIRST = "00_gpu_checks"
QUIET = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore"]
PLACES = {
    "Colab": "https://colab.research.google.com/github/{name}/blob/main/notebooks/{first}.ipynb",
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{name}/blob/main/notebooks/{first}.ipynb",
    "Codespaces": "https://codespaces.new/{name}",
    "Binder": "https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/my/{first}.ipynb",
}


class Stop(Exception):
    """Ends the program with one line and an exit code."""

    def __init__(self, line: str, code: int = 2) -> None:
        super().__init__(line)
        self.code = code


@dataclass
class Plan:
    """What pip is asked for on this machine: {package: version}."""

    torch: str | None
    """The torch that is here."""
    pin: str
    """The torch that the course was tested with."""
    install: dict[str, str] = field(default_factory=dict)
    """Missing or too old: the version to install."""
    old: dict[str, str] = field(default_factory=dict)
    """Of these, the ones that are here: their version, which is too old."""
    stay: dict[str, str] = field(default_factory=dict)
    """What pip must not change: torch, and what the page in front of the learner is made of."""

    def __str__(self) -> str:
        """The one line that says what is here and what will be done."""
        python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
        torch = f"no torch: pip installs {self.pin}, which takes some minutes"
        if self.torch is not None:
            other = "" if self.torch.partition("+")[0] == self.pin else f" (the course was tested with {self.pin})"
            torch = f"torch {self.torch} stays{other}"
        missing = sorted(set(self.install) - set(self.old) - {"torch"})
        steps = [f"installs {listed(missing)}"] if missing else []
        old = [f"{name} {version}" for name, version in sorted(self.old.items())]
        steps += [f"replaces {listed(old)}, too old"] if old else []
        return f"{python}; {torch}; {'pip ' + ' and '.join(steps) if steps else 'nothing else is missing'}."


def listed(names: Sequence[str]) -> str:
    """ "a, b and c", or the first few and how many more."""
    more = len(names) - NAMES_SHOWN + 1
    shown = list(names) if more <= 1 else [*names[: NAMES_SHOWN - 1], f"{more} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[:-1] else shown)


def make_plan(
    needed: Mapping[str, str],
    tested: Mapping[str, str],
    here: Mapping[str, str | None],
    course: Mapping[str, Any],
    in_kernel: bool,
) -> Plan:
    """What to do on a machine with the packages `here`.

    `needed` holds the oldest version that will do of each, `tested` those of constraints.txt, `course` [tool.course] of
    pyproject.toml. In a running kernel there is a page already, so that JupyterLab is not missed.
    """
    from labs.kit.requirements import numbers

    plan = Plan(here.get("torch"), needed["torch"])
    for name, oldest in needed.items():
        version, front_end = here.get(name), name in course["front-end"]
        if name in course["tests"] or (version is None and front_end and in_kernel):
            continue
        if version is not None and (front_end or name == "torch"):
            plan.stay[name] = version
        elif version is None or numbers(version) < numbers(oldest):
            plan.install[name] = tested[name]
            plan.old.update({} if version is None else {name: version})
    return plan


def python_problem(version: Sequence[int]) -> str:
    """Why a Python of this (major, minor) version cannot be used; "" if it can."""
    if tuple(version) >= OLDEST_PYTHON:
        return ""
    have, want = (".".join(map(str, v)) for v in (version, OLDEST_PYTHON))
    return f"Python {have} is older than {want}, which the course needs: take a newer image of this machine"


def pip_problem(purelib: str, user_site: str | None, in_venv: bool, managed: str) -> str:
    """Why pip cannot install into this Python; "" if it can.

    `purelib` and `user_site` are the folders for packages, the second for those of one user. `managed` is the file by
    which a system keeps pip out of its own Python (PEP 668).
    """
    own = os.path.join(tempfile.gettempdir(), "course")
    remedy = (
        f"make an environment that sees the same torch: {sys.executable} -m venv --system-site-packages {own} && "
        f"{own}/bin/python {ROOT / 'labs' / 'hosted.py'}"
    )
    # Python's own finder: setuptools' hook, asked for pip, takes its distutils out of this process, and what imports
    # setuptools later, as torch.utils.benchmark does, fails (Python 3.11).
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        return f"this Python has no pip: {remedy}"
    if not in_venv and os.path.exists(managed):
        return f"this Python belongs to the system, which keeps pip out: {remedy}"
    folders = [purelib] if in_venv or user_site is None else [purelib, user_site]
    if not any(map(takes_files, folders)):
        return f"nothing can be installed in {' or '.join(folders)}: {remedy}"
    return ""


def takes_files(folder: str | Path) -> bool:
    """Whether something can be written into `folder`, or into the one in which it would be made."""
    folder = Path(folder)
    return os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK)


def warnings(shm_bytes: int | None, home: Path) -> Iterator[str]:
    """What will be in the way later, a line for each: a small /dev/shm, a home that takes no files."""
    if shm_bytes is not None and shm_bytes < SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has {shm_bytes / 2**20:.0f} MiB: DataLoader workers (notebook 02) may die of a bus error. "
            "If you start the container yourself, add --shm-size=2g."
        )
    if not takes_files(home):
        yield (
            f"{home} takes no files, and Jupyter, matplotlib and torch keep some there: "
            "run `export HOME=$(mktemp -d)` in the shell before you start them."
        )


def install(plan: Plan, options: Sequence[str]) -> None:
    """Have pip do what the plan says. Stop if it cannot, and if torch is another one afterwards."""
    from labs.kit import requirements

    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        stay = Path(folder) / "stay.txt"
        stay.write_text("".join(f"{name}=={version}\n" for name, version in plan.stay.items()), encoding="utf-8")
        if plan.install:
            pip([*options, "-c", str(stay), *(f"{name}=={version}" for name, version in plan.install.items())])
        if not course_is_installed():
            pip([*options, "--no-deps", "-e", str(ROOT)])  # of itself it would ask for the tested torch
    importlib.invalidate_caches()
    now = requirements.installed("torch")
    if plan.torch is not None and now != plan.torch:
        raise Stop(f"pip has replaced torch {plan.torch} by {now}: python -m pip install torch=={plan.torch}", 1)


def course_is_installed() -> bool:
    """Whether this Python finds this very folder already."""
    # pip leaves an egg-info in the clone itself, which says nothing of where it was installed: look at all
    found = importlib.metadata.distributions(name="gpu-training-course")
    sources = (json.loads(d.read_text("direct_url.json") or "{}") for d in found)
    return any(source.get("url") == ROOT.as_uri() for source in sources)


def pip(arguments: Sequence[str]) -> None:
    """`pip install` in this Python. Stop with its last words if it fails."""
    command = [sys.executable, "-m", "pip", "install", *QUIET, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()
        last = [line for line in said if line.startswith("ERROR")][-1:] or said[-1:]
        raise Stop(
            f"pip could not install, {last[0]}: let this machine reach the network, or look at what "
            f"`{' '.join(command)}` says",
            1,
        )


def loaded_before(old: Mapping[str, str]) -> list[str]:
    """Of the packages that were replaced, those of which this process holds the older version."""
    modules = importlib.metadata.packages_distributions()
    of = {owner.lower().replace("_", "-"): module for module, owners in modules.items() for owner in owners}
    return sorted(name for name in old if of.get(name, name) in sys.modules)


def links(url: str) -> dict[str, str]:
    """{place: address that opens a repository of GitHub there}. Stop for any other."""
    found = re.search(r"github\.com[/:]([\w.-]+)/([\w.-]+?)(?:\.git)?/?$", url.strip())
    if not found:
        what = url.strip() or "this folder"
        raise Stop(f"{what} is no clone of a repository on GitHub: name one, --links https://github.com/OWNER/NAME")
    name = f"{found[1]}/{found[2]}"
    return {place: address.format(name=name, first=FIRST) for place, address in PLACES.items()}


def origin() -> str:
    """The address that this folder was cloned from; "" if git does not know."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    done = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout if done and done.returncode == 0 else ""


def shm_bytes() -> int | None:
    """Size of /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def prepare(options: Sequence[str]) -> None:
    """Look, say, install, say what is left to do. Stop if it cannot work."""
    if problem := python_problem(sys.version_info[:2]):
        raise Stop(problem)
    sys.path.insert(0, str(ROOT))  # for this process; what pip does counts from the next start of Python on
    from labs.kit import requirements

    needed = requirements.needed()
    here = {name: requirements.installed(name) for name in needed}
    if here["torch"] is not None and (problem := requirements.torch_problem(here["torch"])):
        raise Stop(problem)
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    forced = "--break-system-packages" in options
    managed = "" if forced else os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if problem := pip_problem(sysconfig.get_path("purelib"), user_site, sys.prefix != sys.base_prefix, managed):
        raise Stop(problem)
    course, in_kernel = requirements.project()["tool"]["course"], "ipykernel" in sys.modules
    plan = make_plan(needed, requirements.tested(), here, course, in_kernel)
    print(plan, flush=True)
    install(plan, options)
    for line in warnings(shm_bytes(), Path.home()):
        print(f"Warning: {line}")
    if stale := loaded_before(plan.old):
        print(f"Restart the kernel and run this cell again: it holds the older version of {listed(stale)}.")
    elif in_kernel:
        print("Ready: the next cell can import labs.")
    else:
        print("Ready. `python -m labs.hardware_probe --preflight`, in the folder of the course, checks the rest.")


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    try:
        if words[:1] == ["--links"]:
            for place, address in links(words[1] if len(words) > 1 else origin()).items():
                print(f"{place:<10}  {address}")
        else:
            prepare(words)
    except Stop as e:
        print(f"{PROG}: {e}", file=sys.stderr)
        return e.code
    return 0


if __name__ == "__main__":
    if code := main():  # without an exit, so that a cell goes on quietly where all is well
        sys.exit(code)
