"""What to teach in half a day, one day, two days and two more: the sections of the course in the order of the day.

"03/1, 2, 03.1" are sections 1 and 2 and exercise 03.1 of notebook 03. Minutes come from labs.classroom.agenda.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """Minutes without a notebook."""

    what: str
    minutes: int


COFFEE, LUNCH = Break("break", 15), Break("lunch", 60)
WELCOME, CLOSE = Break("welcome, preflight of every machine", 15), Break("the room's figures, questions", 15)

# Half a day answers one question: why are two devices not twice as fast? Each longer plan repeats nothing and
# leaves out least: what the shorter one drops is named in INSTRUCTOR.md.
PLANS: dict[str, list[list[str | Break]]] = {
    "half": [
        [
            WELCOME,
            "00/Introduction, 1, 2, 3",
            "01/Introduction, 1, 2, 01.1",
            COFFEE,
            "03/Introduction, 1, 2, 03.1",
            "03/3, 4",
            CLOSE,
        ],
    ],
    "one": [
        [
            WELCOME,
            "00/Introduction, 1, 2, 3",
            "01/Introduction, 1, 2, 01.1",
            COFFEE,
            "02/Introduction, 1, 2",
            LUNCH,
            "03/Introduction, 1, 2, 3, 03.1",
            "03/4",
            COFFEE,
            "04/Introduction, 1, 4",
            "05/Introduction, 1, 2",
            CLOSE,
        ],
    ],
    "two": [
        [
            WELCOME,
            "00/Introduction, 1, 2, 3, 4, 5",
            "01/Introduction, 1, 2, 01.1",
            COFFEE,
            "01/4",
            "02/Introduction, 1, 2, 02.1",
            LUNCH,
            "02/4",
            "03/Introduction, 1, 2, 3, 03.1",
            COFFEE,
            "03/4, 5",
            CLOSE,
        ],
        [
            "04/Introduction, 1, 2, 3",
            "04/4, 04.1",
            COFFEE,
            "05/Introduction, 1, 2",
            LUNCH,
            "05/4, 5, 05.3",
            "06/Introduction, 1, 2, 06.1",
            COFFEE,
            "06/3, 4, 5, 6, Claims on trial",
            CLOSE,
        ],
    ],
    "more": [
        [
            WELCOME,
            "07/Introduction, 1, 2, 3",
            COFFEE,
            "07/4, 5, 07.3",
            LUNCH,
            "08/Introduction, 1, A machine dies, 2, 5",
            COFFEE,
            "08/6, 7, 08.3",
            CLOSE,
        ],
        [
            "09/Introduction, 1, 2, 5, 09.1",
            COFFEE,
            "10/Introduction, 1, 3, 5, 10.1",
            LUNCH,
            "11/Introduction, 1, 2, 3, 4",
            COFFEE,
            "12/Introduction, 1, 2, 3",
            CLOSE,
        ],
    ],
}
