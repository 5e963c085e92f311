"""A deprecation that the course's own code causes is an error, in each Python process that a test starts.

Python imports this file by its name when it starts, since tests/conftest.py puts its folder onto PYTHONPATH. In
PYTHONWARNINGS each of the course's modules would need filters of its own, and reading them takes longer than Python.
"""

import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=kind, module=r"labs(\.|$)")

# The system's own file of this name, which this one has hidden.
here = str(Path(__file__).parent)
if spec := PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != here]):
    spec.loader.exec_module(module_from_spec(spec))
