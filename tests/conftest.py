"""What holds for all tests: kernels run in this Python, and our own deprecation warnings are errors."""

import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path

if os.environ.get("PYTEST_XDIST_WORKER"):
    # More processes than cores: torch's threads would spend most of their time on waiting for each other with a busy
    # core. Read once, when torch is imported. Tests that measure run alone, and have the usual policy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import chromium
import hypothesis
import pytest
from processes import MARK, SLOWER

from labs.kit.course import use_own_kernel

ROOT = Path(__file__).parents[1]
LONGEST = """browser exercises doctor recipes explorers oracle commands gpu_acceptance notebooks rank_timeline
    doctor_cases doctor_trial doctor_counterfactuals fully_sharded ddp_facts editable_rounds many_ranks
    mixed_precision elastic_restart two_nodes training_checkpoint copies elsewhere smoke properties_checks
    exercise_deadlock clinic communication""".split()
"""Files of tests that take longest: side by side they start first, so that in the end no process is left alone."""


def pytest_configure(config):
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # tests of one worker look for what they left, not others
        os.environ[MARK] = uuid.uuid4().hex
        config.own_folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"{worker}-")
        Path(config.own_folder).chmod(0o755)  # tests/elsewhere works below it as another user
    use_own_kernel()
    # Images for containers often set this: then each of the workers compiles all tests, each command all of the course.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # An example that takes 0.2 s on a busy machine is no failure.
    hypothesis.settings.register_profile("course", deadline=None)
    hypothesis.settings.load_profile("course")
    for name in ("COURSE_ROOM", "COURSE_NAME", "COURSE_QUEUE", "COURSE_QUEUE_SCOPE"):  # tests are no learner in a room
        os.environ.pop(name, None)
    # A shell without job control starts `make test &` with SIGINT ignored, and all that tests start inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # For ranks, kernels and command lines that tests start; pyproject.toml says it for this process. The
    # module part of such a filter matches one whole name, so each module is named. __main__ is what runs in a
    # notebook's cells and under `python -m`.
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "labs").rglob("*.py")]
    modules = [".".join(p.parts).removesuffix(".__init__") for p in files]
    modules.append("__main__")
    kinds = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    os.environ["PYTHONWARNINGS"] = ",".join(f"error::{k.__name__}:{m}" for m in modules for k in kinds)


def pytest_unconfigure(config):
    if folder := getattr(config, "own_folder", None):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """COURSE_SMOKE=1 is for the notebooks' kernels: what a test launches is as long as that test says."""
    smoke = os.environ.pop("COURSE_SMOKE", None) if Path(__file__).parent in item.path.parents else None
    try:
        return (yield)
    finally:
        if smoke is not None:
            os.environ["COURSE_SMOKE"] = smoke


def pytest_collection_modifyitems(items):
    """COURSE_TESTS_SLOWER=6 multiplies the time limits that tests set themselves: tests/elsewhere is slow.

    Notebooks measure, so that their cells are marked `quiet`, which nbval does not let them do themselves. With smoke
    runs in place of their experiments two of them may run side by side: `notebook` chooses them.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("quiet")
            item.add_marker("notebook")
        if SLOWER != 1 and (mark := item.get_closest_marker("timeout")):
            item.add_marker(pytest.mark.timeout(mark.args[0] * SLOWER), append=False)


def pytest_report_header():
    return f"browser: {chromium.executable() or chromium.MISSING}"
