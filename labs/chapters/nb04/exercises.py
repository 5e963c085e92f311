"""Exercises of notebook 04; each has a file of its own."""

from __future__ import annotations

from labs.chapters.nb04 import solutions as solution
from labs.chapters.nb04.exercise_amp import check_train_epoch
from labs.chapters.nb04.exercise_log import check_diagnose
from labs.kit.check import Exercise

EXERCISES = {
    "04.1": Exercise("an epoch in FP16 or BF16", check_train_epoch, solution.train_epoch),
    "04.3": Exercise("what a training log says of its scaler", check_diagnose, solution.diagnose),
}
