"""How long a script may take no step, and what is said while its first one is waited for."""

from __future__ import annotations

FIRST_S = 900.0
"""Until the first step: imports from a network disk, other nodes that have not come, weights, a cold compilation."""
LEAST_S = 120.0
TIMES_LONGEST = 10  # Between two steps: so many times the longest that was seen, a validation or a save in it
SAY_S = 60.0  # From one word about a first step that has not come to the next


class StepTimeout:
    """Of a run that begins at `now`, in s of one clock. `given_s`: between any two steps, and until the first."""

    def __init__(self, given_s: float | None, now: float) -> None:
        self.given_s, self.begun, self.moved, self._said = given_s, now, now, now
        self.steps, self.longest_s = 0, 0.0

    def saw(self, steps: int, now: float) -> None:
        """How many have been taken so far. As it is looked at now and then, several may have been."""
        if steps != self.steps:
            if self.steps:
                self.longest_s = max(self.longest_s, now - self.moved)
            self.steps, self.moved = steps, now

    @property
    def limit_s(self) -> float:
        """Without a step, from the last one on."""
        if self.given_s is not None:
            return self.given_s
        return max(LEAST_S, TIMES_LONGEST * self.longest_s) if self.steps else FIRST_S

    def is_over(self, now: float) -> bool:
        """Whether it is to be ended."""
        return now - self.moved > self.limit_s

    def is_to_say(self, now: float) -> bool:
        """Whether it is time for a word about the first step; asked again, no more until SAY_S later."""
        due = not self.steps and now - self._said >= SAY_S
        self._said = now if due else self._said
        return due

    def words(self, now: float, stands: str) -> str:
        """For whoever looks at a terminal in which nothing happens."""
        where = f"; the script stands in {stands}" if stands else ""
        return (
            f"no step of an optimizer for {now - self.begun:.0f} s, the first is waited for up to "
            f"{self.limit_s:g} s (--timeout){where}; steps of ranks that it starts itself (mp.spawn) are "
            "not seen: then end this, and start them by torchrun"
        )
