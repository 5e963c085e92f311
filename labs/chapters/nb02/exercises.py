"""Exercises of notebook 02: a loader for every rank, shards for every process."""

from __future__ import annotations

from labs.chapters.nb02 import solutions as solution
from labs.chapters.nb02.exercise_loader import check_my_shards
from labs.chapters.nb02.exercise_rank_loader import check_rank_loader
from labs.kit.check import Exercise

EXERCISES = {
    "02.1": Exercise("a loader for every rank and epoch", check_rank_loader, solution.rank_loader),
    "02.4": Exercise("shards for every worker of every rank", check_my_shards, solution.my_shards),
}
