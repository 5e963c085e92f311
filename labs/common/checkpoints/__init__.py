"""Checkpoints that survive what happens to files: `save`, `load`, `load_latest`, and what belongs in them.

python -m labs.checkpoints FOLDER        lists the checkpoints of a folder, each with its verdict
"""

from labs.common.checkpoints.data import ResumableLoader
from labs.common.checkpoints.files import Damaged, checkpoints, load, load_latest, save
from labs.common.checkpoints.state import random_state, restore, set_random_state, training_state

__all__ = [
    "Damaged",
    "ResumableLoader",
    "checkpoints",
    "load",
    "load_latest",
    "random_state",
    "restore",
    "save",
    "set_random_state",
    "training_state",
]
