"""The container: what can be said of the Dockerfile in seconds, and, on request, the image built and tried for real."""

import os
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "container" / "check.sh"


def test_script_is_valid_and_refuses_an_unknown_option_in_one_line():
    assert os.access(SCRIPT, os.X_OK)
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    done = subprocess.run([SCRIPT, "--frobnicate"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


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
