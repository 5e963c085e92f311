"""The container: what can be said of the Dockerfile in seconds, and, on request, the image built and tried for real."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "container" / "check.sh"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TEXT = SCRIPT.read_text()


def commands(text: str) -> list[str]:
    """The `docker build` and `docker run` lines of a text."""
    return re.findall(r"^[# ]*(docker (?:build|run) .+)$", text, re.MULTILINE)


def test_the_page_and_dockerfile_give_the_same_commands():
    assert len(commands(DOCKERFILE)) >= 3
    assert commands((ROOT / "docs" / "INSTALL.md").read_text()) == commands(DOCKERFILE)


def test_every_build_argument_is_explained_and_has_a_default():
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert len(arguments) == len(re.findall(r"^ARG ", DOCKERFILE, re.MULTILINE))
    comment = " ".join(re.findall(r"^# (.*)$", DOCKERFILE.partition("\nARG ")[0], re.MULTILINE))
    assert [a for a in arguments if not re.search(rf"\b{a}\b", comment)] == []


def test_script_is_valid_and_explains_itself():
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--keep" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_script_has_no_findings_of_shellcheck():
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_script_refuses_an_unknown_option_in_one_line():
    done = subprocess.run([SCRIPT, "--frobnicate"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "--keep" in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="without root, that is what it says")
@pytest.mark.parametrize(("command", "package"), re.findall(r"need (\w+) ([\w-]+)$", TEXT, re.MULTILINE))
def test_script_names_the_package_of_what_is_missing(command, package, tmp_path):
    for name in ("bash", "uname", "id", "dirname", *re.findall(r"need (\w+) ", TEXT)):
        if name != command:
            (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    environment = {k: v for k, v in os.environ.items() if k != "BASE"} | {"PATH": str(tmp_path)}
    done = subprocess.run([shutil.which("bash"), SCRIPT], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"check.sh: {command} is missing: apt-get install {package}\n"


def test_script_says_that_it_needs_root():
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("as root, and no setpriv to become somebody else")
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-s"]
    else:
        command = ["bash", "-s"]
    done = subprocess.run(command, input=TEXT, cwd="/", capture_output=True, text=True)
    assert done.returncode == 2 and "this needs root" in done.stderr


def test_script_runs_tests_that_exist():
    names = re.search(r"^QUICK=\((.*)\)$", TEXT, re.MULTILINE)[1].split()
    assert names and [n for n in names if not (ROOT / "tests" / f"test_{n}.py").exists()] == []


def test_pip_settings_of_the_host_reach_the_build(tmp_path):
    wheels, simple, certificate = tmp_path / "wheels", tmp_path / "index" / "simple", tmp_path / "ca.pem"
    wheels.mkdir(), simple.mkdir(parents=True), certificate.touch()
    listing = f"""
        :env:.find-links='{wheels}'
        global.cert='{certificate}'
        global.extra-index-url='\\nhttps://example.invalid/simple\\nfile://{simple}'
        global.find-links='/overridden/by/the/environment'
        global.target='/would/break/the/build'
        """.replace("        ", "")
    module = runpy.run_path(str(SCRIPT.parent / "host_pip.py"))
    text, mounts = module["configuration"](module["parse"](listing))
    assert mounts == {
        str(wheels): str(wheels),
        str(simple.parent): str(simple.parent),
        str(certificate): "/etc/pip-cert.pem",
    }
    assert sorted(text.splitlines()) == [
        "cert = /etc/pip-cert.pem",
        f"extra-index-url = https://example.invalid/simple file://{simple}",
        f"find-links = {wheels}",
    ]
    assert module["configuration"](module["parse"]("")) == ("", {})


@pytest.mark.skipif(os.environ.get("COURSE_CONTAINER") != "1", reason="takes minutes and root: set COURSE_CONTAINER=1")
@pytest.mark.timeout(3600)
def test_the_image_keeps_its_promises():
    subprocess.run([SCRIPT], check=True)
