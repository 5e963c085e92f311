"""PyTorch's private API is touched in one place, and what is used there exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from labs.kit import _compat

LABS = Path(_compat.__file__).parents[1]
PRIVATE = re.compile(
    r"torch(\.[a-z_]+)*\._[A-Za-z]|from torch[a-z_.]*\._|from torch[a-z_.]* import .*\b_[a-z]|distributed_c10d[.]_"
)
FILES = {
    p.relative_to(LABS).as_posix(): p.read_text()
    for p in LABS.rglob("*.py")
    if p.name != "_compat.py" and "recipes" not in p.parts
}
KNOWN = set(re.findall(r"\b_[A-Za-z]\w+", Path(_compat.__file__).read_text())) - set(vars(_compat))  # its own


def test_no_other_file_touches_private_api():
    assert not {name for name, text in FILES.items() if PRIVATE.search(text)}
    private = KNOWN | {"_buffers", "_modules", "_parameters"}
    for name, text in FILES.items():
        read = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute) and n.attr in private]
        assert [ast.unparse(n) for n in read if ast.unparse(n.value) not in ("self", "cls")] == [], name


@pytest.mark.parametrize("name", sorted(_compat.PLACES | _compat.ATTRIBUTES))
def test_this_torch_has_it(name):
    if name == "inductor_config":
        pytest.skip("takes seconds to import; test_compiled_step uses it")
    if name in ("cuda_arch_flags", "cudnn_version") and not torch.backends.cuda.is_built():
        pytest.skip("a CUDA build has it")
    assert getattr(_compat, name) is not None


def test_functions_work_with_this_torch():
    x, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert _compat.storage_key(x[:1].untyped_storage()) == _compat.storage_key(x.untyped_storage())
    assert _compat.times_written(x.add_(1)) == 1
    _compat.call_through(module, lambda given: "through")
    assert module(x) == "through" and _compat.compiled_call(module)(x) == "through"
    _compat.call_through(module, None)
    assert torch.equal(module(x), _compat.plain_call(module)(x))
    assert len(_compat.tensors_of_scaler(torch.amp.GradScaler("cpu"))) == 0  # unused so far
    batches = iter(DataLoader([1, 2]))
    assert isinstance(batches, _compat.loaded_loader_iterator())
    _compat.end_workers(batches)
    assert list(_compat.flight_recorders()) and _compat.flight_recorders_in_json()
    _compat.preload_dynamo()
    assert _compat.compiled_graphs() >= 0


def test_it_imports_no_torch():
    program = (
        "import sys; from labs.kit import _compat as c; c.loaded_loader_iterator(), c.flight_recorders_in_json()\n"
        "import labs.doctor.__main__, labs.watch.__main__, labs.watch.activity_probe; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=LABS.parent)


def test_another_torch_gives_one_clear_error(monkeypatch):
    monkeypatch.delattr("torch._C._current_graph_task_id")
    monkeypatch.delitem(vars(_compat), "graph_task", raising=False)
    with pytest.raises(_compat.PrivateApiChanged, match=r"^torch \S+ has no torch\._C\._current_graph_task_id: "):
        _ = _compat.graph_task
    with pytest.raises(AttributeError):
        _ = _compat.never_there
