"""Who may import whom: kit, models and data < labs < exercises, claims and figures; no cycles."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Labs that others build on, by name.
BUILDING_BLOCKS = {"labs.ddp_training"}

# What labs stand on, and what stands on them.
LOW = ("labs.kit", "labs.models", "labs.data")
HIGH = ("labs.exercises", "labs.solutions", "labs.claims", "labs.figures")


def within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run on import: not those in functions, nor those for type checkers only."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.append(node)
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            found += top_level(node.body)
    return found


def graph(root: Path, *, lazy: bool) -> dict[str, set[str]]:
    """Modules of labs and the labs modules that each imports; with `lazy` also inside functions."""
    files = {module_name(p, root): p for p in (root / "labs").rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        nodes = ast.walk(tree) if lazy else top_level(tree.body)
        edges[name] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                edges[name] |= {a.name for a in node.names if a.name in files}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                parts = {f"{node.module}.{a.name}" for a in node.names} & set(files)
                edges[name] |= parts or ({node.module} & set(files))
    return {name: targets - {name} for name, targets in edges.items()}


def labs_of(root: Path) -> set[str]:
    """The lab modules: those with a run function."""
    return {f"labs.{p.stem}" for p in (root / "labs").glob("*.py") if "\ndef run(" in p.read_text()}


def violations(root: Path) -> list[str]:
    """Imports that the layers forbid, as "module imports module"."""
    labs, found = labs_of(root), []
    for name, targets in graph(root, lazy=True).items():
        for target in targets - {"labs"}:
            wrong = within(name, *LOW) and not within(target, *LOW)
            wrong |= name in labs and target in labs - BUILDING_BLOCKS
            wrong |= name in labs and within(target, *HIGH)
            found += [f"{name} imports {target}"] if wrong else []
    return found


def test_layers_are_kept():
    assert labs_of(ROOT)
    assert violations(ROOT) == []


def test_there_are_no_cycles():
    TopologicalSorter(graph(ROOT, lazy=False)).prepare()


@pytest.fixture
def planted(tmp_path):
    def plant(**sources: str) -> Path:
        for name, source in {"one": "\ndef run(config, rank): ...", **sources}.items():
            path = tmp_path / "labs" / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path

    return plant


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kit__launch", "def f():\n    from labs import one"),
        ("models", "import labs.one"),
        ("data__tiles", "from labs import one"),
        ("two", "from labs import one\ndef run(config, rank): ..."),
        ("exercises__nb01", ""),
    ],
)
def test_a_forbidden_import_is_found(planted, name, source):
    root = planted(**{name: source})
    if name.startswith("exercises"):
        (root / "labs" / "one.py").write_text("from labs.exercises import nb01\ndef run(config, rank): ...")
    assert len(violations(root)) == 1


def test_a_cycle_is_found(planted):
    root = planted(a="import labs.b", b="from labs import a")
    with pytest.raises(CycleError):
        TopologicalSorter(graph(root, lazy=False)).prepare()
