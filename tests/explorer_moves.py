"""How long is a move of a knob? `python tests/explorer_moves.py` on a quiet machine: the aim is below 100 ms.

From the moment in which the kernel is told the knob's new value to the finished picture, in its markup: medians over
moves along each explorer's first knob, and the slowest tenth. What the page takes to show it is not in it.
"""

import itertools
import statistics
import time

import ipywidgets
from test_explorers import OPENED

from labs.kit import explore

MOVES = 30


def main() -> None:
    """A line for each explorer."""
    explore._display = lambda *args, **kwargs: None  # there is no page
    for name, (draw, controls) in OPENED.items():
        box = explore.knobs(ipywidgets, draw, controls, "picture")
        knob, values = box.children[0], list(next(iter(controls.values())).values)
        spent = []
        for value in itertools.islice(itertools.cycle(values), MOVES + len(values)):
            start, cpu = time.perf_counter(), time.process_time()
            knob.value = value
            spent.append((time.perf_counter() - start, time.process_time() - cpu))
        clock, cpu = zip(*spent[len(values) :], strict=True)  # the first round fills caches
        slow = statistics.quantiles(clock, n=10)[-1]
        print(
            f"{name:16} {1e3 * statistics.median(clock):4.0f} ms by the clock (nine in ten below {1e3 * slow:.0f}), "
            f"{1e3 * statistics.median(cpu):4.0f} ms of CPU"
        )


if __name__ == "__main__":
    main()
