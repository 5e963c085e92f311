"""Checkpoints that survive crashes and detect damage: `save`, `load`, `load_latest`, and the state to put in them.

python -m labs.checkpoints FOLDER        lists a folder's checkpoints and says which are good
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
