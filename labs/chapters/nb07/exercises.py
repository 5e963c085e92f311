"""Exercises of notebook 07: an all-reduce of few rounds, a hook with error feedback; a file for each."""

from __future__ import annotations

from labs.chapters.nb07 import solutions as solution
from labs.chapters.nb07.exercise_hook import check_eight_bits
from labs.chapters.nb07.exercise_messages import check_all_reduce_small
from labs.kit.check import Exercise

EXERCISES = {
    "07.1": Exercise("an all-reduce of few rounds, from messages", check_all_reduce_small, solution.all_reduce_small),
    "07.2": Exercise("a communication hook of 8 bits that forgets nothing", check_eight_bits, solution.eight_bits),
}
