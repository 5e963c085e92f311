"""The disguise of each Python process of a run elsewhere: its date, the cores it may use, the GPUs that NVML reports.

Python imports this file by its name when it starts, since tests/elsewhere puts its folder onto PYTHONPATH.
"""

import json
import os
import sys
import time
from multiprocessing import context
from pathlib import Path

import time_machine

MASK = json.loads(os.environ["ELSEWHERE"])
AFFINITY = "ELSEWHERE_AFFINITY"  # of this process and those that it starts

# Clocks that only go forward (monotonic, perf_counter) and times of files stay as they are. A datetime in place of a
# number would also change the time zone. Processes must agree to the millisecond: what start() took is made up for,
# by a reading that nothing interrupted.
ahead_s = 86_400 * MASK["days"]
clock = time_machine.travel(time.time() + ahead_s, tick=True).start()
real = time_machine.escape_hatch.time.time
readings = [(real(), time.time(), real()) for _ in range(20)]
before, shown, after = min(readings, key=lambda r: r[2] - r[0])
clock.shift((before + after) / 2 + ahead_s - shown)

# What multiprocessing does where nobody says how processes start: the one setting that labs cannot undo.
if MASK["start_method"]:
    context._default_context._default_context = context._concrete_contexts[MASK["start_method"]]

if MASK["gpus"]:
    sys.path.append(str(Path(__file__).parents[2]))  # after everything else: tests/ holds the stand-in
    from fakes import FakeNvml, card

    sys.path.pop()
    sys.modules["pynvml"] = FakeNvml([card(f"GPU-{n:04}", name) for n, name in enumerate(MASK["gpus"])])

if hasattr(os, "sched_getaffinity") and MASK["usable"] > len(MASK["here"]):
    pin = os.sched_setaffinity
    mine = set(json.loads(os.environ.get(AFFINITY, "[]")))  # of whoever started this; tests put environments back
    if not mine or os.sched_getaffinity(0) == set(MASK["here"]):  # it was unpinned
        mine = set(range(MASK["usable"]))

    def sched_getaffinity(pid):
        return set(mine)

    def sched_setaffinity(pid, cpus):
        global mine
        cpus = set(cpus) & set(range(MASK["usable"]))
        if not cpus:
            raise OSError(22, "Invalid argument")
        pin(pid, {MASK["here"][cpu % len(MASK["here"])] for cpu in cpus})
        mine, os.environ[AFFINITY] = cpus, json.dumps(sorted(cpus))

    os.sched_getaffinity, os.sched_setaffinity = sched_getaffinity, sched_setaffinity
