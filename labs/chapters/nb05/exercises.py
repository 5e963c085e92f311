"""Exercises of notebook 05: a stack under a budget of bytes, a chunked loss, a complete state."""

from __future__ import annotations

from labs.chapters.nb05 import solutions as solution
from labs.chapters.nb05.exercise_loss import check_chunked_loss
from labs.chapters.nb05.exercise_recompute import check_run_stack
from labs.chapters.nb05.exercise_resume import check_resumable
from labs.kit.check import Exercise

EXERCISES = {
    "05.2": Exercise("a stack under a budget of bytes", check_run_stack, solution.run_stack),
    "05.3": Exercise("a loss without all logits", check_chunked_loss, solution.chunked_loss),
    "05.4": Exercise("a state from which training goes on exactly", check_resumable, solution.Resumable),
}
