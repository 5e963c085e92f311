"""`python -m labs.doctor`, which leaves the bare facts in --out instead of a report."""

import dataclasses
import json

from labs.doctor import __main__ as doctor


def tell(facts, wanted, machine, hits):
    """One file for all ranks."""
    wanted.out.mkdir(exist_ok=True)
    (wanted.out / "facts.json").write_text(json.dumps([dataclasses.asdict(f) for f in facts]))
    print("\n".join(doctor.last_words(facts)))


if __name__ == "__main__":
    doctor.tell = tell
    doctor.main()
