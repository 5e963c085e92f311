"""PyTorch's private API is touched in one place, and what is used there exists."""

import re
from pathlib import Path

import pytest
import torch

from labs.kit import _compat

LABS = Path(_compat.__file__).parents[1]
PRIVATE = re.compile(r"torch[.]_[A-Za-z]|from torch[a-z_.]*[.]_|distributed_c10d[.]_|from torch[a-z_.]* import _")
OF_A_LEARNER = {"doctor/scripts/train_text.py", "symptom/drills_machine.py"}  # programs that are run as a learner's


def test_no_other_file_touches_private_api():
    files = [p for p in LABS.rglob("*.py") if p.name != "_compat.py" and "recipes" not in p.parts]
    found = {p.relative_to(LABS).as_posix() for p in files if PRIVATE.search(p.read_text())}
    assert found <= OF_A_LEARNER


@pytest.mark.parametrize("name", sorted(_compat.PLACES))
def test_this_torch_has_it(name):
    if name in ("compile_fx", "inductor_config", "GraphLowering"):
        pytest.skip("takes seconds to import; test_compiled_step uses it")
    if name in ("cuda_arch_flags", "cudnn_version") and not torch.backends.cuda.is_built():
        pytest.skip("a CUDA build has it")
    assert getattr(_compat, name) is not None


def test_another_torch_gives_one_clear_error(monkeypatch):
    monkeypatch.setitem(_compat.PLACES, "moved", "torch._C:_moved_away")
    with pytest.raises(_compat.PrivateApiChanged, match=r"^torch \S+ has no torch\._C\._moved_away, "):
        _ = _compat.moved
    with pytest.raises(AttributeError):
        _ = _compat.never_there
