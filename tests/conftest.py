"""What holds for all tests: kernels run in this Python, and our own deprecation warnings are errors."""

import gc
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
from processes import MARK

from labs.kit.course import use_own_kernel

ROOT = Path(__file__).parents[1]
LONGEST = """test_browser test_exercises test_recipes test_explorers test_commands test_oracle
    test_doctor test_exercise_capstone test_nan_clinic test_gpu test_notebooks
    test_rank_timeline test_doctor_trial test_doctor_counterfactuals test_fully_sharded
    test_many_ranks test_mixed_precision test_elastic_restart test_two_nodes
    test_copies test_smoke test_exercise_deadlock
    test_clinic test_communication test_code test_room_preflight 05_checkpointing 10_troubleshooting
    08_scaling_out""".split()
"""Files that take longest: side by side they start first, so that in the end no process is left alone."""


def pytest_configure(config):
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # tests of one worker look for what they left, not others
        os.environ[MARK] = uuid.uuid4().hex
        config.own_folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"{worker}-")
    use_own_kernel()
    # Images for containers often set this: then each of the workers compiles all tests, each command all of the course.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # An example that takes 0.2 s on a busy machine is no failure.
    hypothesis.settings.register_profile("course", deadline=None)
    hypothesis.settings.load_profile("course")
    for name in ("COURSE_ROOM", "COURSE_NAME"):  # tests are no learner in a room
        os.environ.pop(name, None)
    # A shell without job control starts `make test &` with SIGINT ignored, and all that tests start inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # For ranks, kernels and command lines that tests start; pyproject.toml says it for this process. IPython looks
    # whether anything stands in PYTHONWARNINGS: otherwise a deprecation in a cell would be shown there and no error.
    kinds = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    os.environ["PYTHONWARNINGS"] = ",".join(f"error::{k.__name__}:__main__" for k in kinds)
    path = [str(Path(__file__).parent / "strict"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


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
    """Notebooks measure, so that their cells are marked `quiet`, which nbval does not let them do themselves.

    With smoke runs in place of their experiments two of them may run side by side: `notebook` chooses them.
    """
    if os.environ.get("PYTEST_XDIST_WORKER"):
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("quiet")
            item.add_marker("notebook")


def pytest_collection_finish():
    """Thousands of tests stay for the whole run: no later collection looks through them again, nor does a fork's."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    return f"browser: {chromium.executable() or chromium.MISSING}"
