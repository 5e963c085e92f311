"""Steps that go wrong in every way a step can, for labs.gpu_acceptance."""

import os
import signal
import time

from labs.gpu_acceptance.evidence import Cannot, Evidence, Verdict, passed
from labs.gpu_acceptance.steps import Step


def fine(setting):
    return Evidence(setting.device, facts={"n": 1})


def crashes(setting):
    print("last words", flush=True)
    os._exit(7)


def killed(setting):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(setting):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(3600)


def raises(setting):
    raise ValueError("no such card\nsecond line")


def lacks(setting):
    raise Cannot("this needs a second GPU")


def good(evidence) -> Verdict:
    return passed(f"n is {evidence.facts['n']}")


def unjudgeable(evidence) -> Verdict:
    return passed(evidence.facts["absent"])


STEPS = {
    "crashes": Step("?", crashes, good, 60, 60),
    "killed": Step("?", killed, good, 60, 60),
    "hangs": Step("?", hangs, good, 6, 6),
    "raises": Step("?", raises, good, 60, 60),
    "lacks": Step("?", lacks, good, 60, 60),
    "unjudgeable": Step("?", fine, unjudgeable, 60, 60),
    "fine": Step("?", fine, good, 60, 60),
}
