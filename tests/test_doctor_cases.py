"""Patients of the doctor's trial: one line is changed, it is there once, and what trains learns."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import assert_no_survivors, new_environment

from labs.doctor import static_rules
from labs.doctor.bottlenecks import BOTTLENECKS
from labs.doctor.profile import AS_IS
from labs.doctor_trial.cases import BY_NAME, BY_READING, HEALTHY, SICK, gains
from labs.doctor_trial.in_turn import Script, ScriptFailed, environment, free_port, take_turns


@pytest.mark.parametrize("case", HEALTHY + SICK, ids=lambda case: case.name)
def test_an_illness_is_one_line_of_a_program(case):
    compile(case.text, case.name, "exec")
    sick, well = case.text.splitlines(), case.cured.splitlines()
    assert len(sick) == len(well), "a line is changed, none is added"
    assert sum(a != b for a, b in zip(sick, well, strict=True)) == int(case.is_ill)
    assert bool(case.names) == case.is_ill
    assert case.is_ill or case.base.startswith("train_")


def test_what_names_an_illness_is_something_that_the_doctor_can_say():
    said = {b.name for b in BOTTLENECKS} | set(static_rules.RULES)
    for case in SICK:
        assert set(case.names) & said, case.name
    unknown = {name for case in SICK for name in case.names} - said
    assert not unknown


READ = [c.name for c in SICK if c.by == BY_READING and set(static_rules.RULES) & set(c.names)]


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_read_in_the_sick_script_and_not_in_the_cured_one(name, tmp_path):
    case = BY_NAME[name]
    for cured in (False, True):
        script = case.write(tmp_path / str(cured), cured=cured)
        hits = {hit.rule for hit in static_rules.check(Path(script.argv[0]))}
        assert bool(hits & set(case.names)) != cured, hits


def test_a_gain_is_taken_round_by_round():
    assert gains({AS_IS: [2.0, 4.0], "a": [1.0, 1.0]}) == {"a": (2.0, 4.0)}


LIMIT_S = 500
"""Alone, 5 s of the processor for most; for `recompiles`, which makes a graph in nearly each of its steps, 16 s."""


def losses(case, folder) -> list[float]:
    """What 40 steps of it print."""
    script = case.write(folder)
    argv = [*script.argv]
    argv += ["--steps", "40"] if "--steps" not in argv else []
    argv = ["40" if before == "--steps" else a for before, a in zip(["", *argv], argv, strict=False)]
    argv += ["--log-every", "4"] if case.base not in OWN else []
    port, ended = str(free_port()), []
    for rank in range(case.ranks):
        ended.append(
            subprocess.Popen(
                [sys.executable, *argv],
                cwd=folder,
                env=environment(rank, case.ranks, port),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        out = [process.communicate(timeout=LIMIT_S)[0] for process in ended]
    finally:
        for process in ended:
            process.kill()
    codes = [process.returncode for process in ended]
    assert all(code >= 0 for code in codes), f"crashed below Python: {codes}"  # gloo's threads at Python's own end
    assert codes == [0] * case.ranks
    return [float(x) for x in re.findall(r"loss +([\d.]+|nan)", out[0])]


OWN = {"train_images", "train_accumulate", "train_plain", "train_text"}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 50)
@pytest.mark.parametrize("name", [n for n, case in BY_NAME.items() if case.learns])
def test_a_patient_learns(name, tmp_path):
    found = losses(BY_NAME[name], tmp_path)
    assert all(map(math.isfinite, found)) and len(found) >= 4
    assert found[-1] < found[0] - 0.02, found


# Steps in turn


STEPS = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[2])):
    model(torch.ones(5, 2)).sum().backward()
    time.sleep(float(sys.argv[1]))
    optimizer.step()
"""


def test_scripts_take_steps_in_turn_and_are_gone_then(tmp_path):
    env = new_environment()
    (tmp_path / "steps.py").write_text(STEPS)
    code = f"""
from pathlib import Path
from labs.doctor_trial.in_turn import Script, take_turns
script = r"{tmp_path / "steps.py"}"
taken = take_turns({{"slow": Script((script, "0.02", "100000")), "fast": Script((script, "0.0", "100000"))}}, 5, 3,
                   Path(r"{tmp_path}"))
assert [len(blocks) for blocks in taken.values()] == [3, 3]
assert all(b.samples == 5 and abs(sum(b.spans_s.values()) - b.step_s) < 1e-9 for of in taken.values() for b in of)
assert min(b.step_s for b in taken["slow"]) >= 0.02
assert min(b.step_s - b.spans_s["rest"] for b in taken["slow"]) < 0.02
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert_no_survivors(env["LABS_TEST_MARK"])


@pytest.mark.long
def test_a_script_that_ends_or_fails_is_named(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    argv = (str(tmp_path / "steps.py"), "0.0")
    for steps, words in (("3", "it ended before"), ("x", "ValueError")):
        with pytest.raises(ScriptFailed, match=words) as found:
            take_turns({"one": Script((*argv, steps))}, 5, 3, tmp_path)
        assert found.value.name == "one"
