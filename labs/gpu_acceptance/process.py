"""One step of the acceptance, in a process of its own. Started by labs.gpu_acceptance, never by hand.

    python -m labs.gpu_acceptance.process STEP FOLDER

FOLDER/request.json says on what and of which list of steps; FOLDER/verdict.json and a file of records per run are left.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from labs.gpu_acceptance import stand_in
from labs.gpu_acceptance.evidence import Cannot, Evidence, Setting, Verdict, failed
from labs.gpu_acceptance.steps import Step
from labs.kit.errors import BadInput
from labs.kit.failure import RankFailed, RankTimeout
from labs.kit.record import write_atomic

VERDICT, REQUEST = "verdict.json", "request.json"


def tried(name: str, step: Step, setting: Setting) -> tuple[Verdict, Evidence | None]:
    """Gather and judge. Whatever goes wrong is a verdict."""
    try:
        evidence = step.gather(setting)
    except Cannot as e:
        return Verdict("cannot", str(e)), None
    except RankTimeout as e:  # its last line is where a rank happened to be
        print(e)
        return failed(str(e).partition(". ")[0]), None
    except (RankFailed, BadInput) as e:
        print(e)
        return failed(last_line(str(e))), None
    except Exception as e:
        traceback.print_exc()
        return failed(f"{type(e).__name__}: {last_line(str(e))}"), None
    if setting.pretend:
        evidence = stand_in.complete(name, evidence)
    try:
        return step.judge(evidence), evidence
    except Exception as e:  # a record or a fact that is not there
        traceback.print_exc()
        return failed(f"what was found cannot be judged: {type(e).__name__}: {last_line(str(e))}"), evidence


def last_line(text: str) -> str:
    """The last line of `text` that says something, in some 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A rank's report ends with which rank it was; the exception itself stands before it.
    lines = lines[:-1] if len(lines) > 1 and lines[-1].endswith("failed first.") else lines
    return lines[-1][:300] if lines else "it says nothing"


def main() -> None:
    """Try the step that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    request = json.loads((folder / REQUEST).read_text())
    module, _, attribute = request["steps"].partition(":")
    step = getattr(importlib.import_module(module), attribute)[name]
    setting = Setting(**request["setting"])
    verdict, evidence = tried(name, step, setting)
    if evidence is not None and not setting.pretend:  # what is made up is kept nowhere
        for run_name, run in evidence.runs.items():
            words = dict.fromkeys([run[0].lab.rpartition(".")[2], name, run_name])  # "timing" once
            run.save(folder / f"{'_'.join(words)}.jsonl")
    facts = evidence.facts if evidence is not None else {}
    found = {"word": verdict.word, "reason": verdict.reason, "facts": facts}
    write_atomic(folder / VERDICT, json.dumps(found, default=str))


if __name__ == "__main__":
    main()
