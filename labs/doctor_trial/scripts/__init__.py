"""Trainings that the doctor is tried on: whole programs that are run or read, never imported."""
