"""Who may import whom: notebooks -> exercises -> experiments -> common -> kit. Imports inside functions count, too."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"claims", "common", "exercises", "explorers", "recipes", "kit", "classroom"}
# What a module may import, besides modules of its own layer. An experiment is a file or folder directly in labs/.
BELOW = {
    "kit": set(),
    "common": {"kit"},
    "classroom": {"kit"},
    "experiment": {"classroom", "common", "kit"},
    "claims": {"experiment", "common", "kit"},
    "exercises": {"experiment", "common", "kit"},
    "explorers": {"experiment", "common", "kit"},
}
# Experiments that others build on, by name.
BUILDING_BLOCKS = {"doctor", "watch"}
# What an engineer installs without the course: these import the kit alone.
TOOLS = {"doctor", "watch"}
# Commands that stand above all: they may import anything, and nothing imports them.
COMMANDS = {
    "labs.__main__",
    "labs.figures",  # draws the README's figure with what notebook 03 draws its own with
}


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def graph(root: Path) -> dict[str, set[str]]:
    """Modules of labs and the labs modules that each imports, anywhere in it."""
    files = {module_name(p, root): p for p in (root / "labs").rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text())
        edges[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                edges[name] |= {a.name for a in node.names if a.name in files}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    both = (f"{node.module}.{alias.name}", node.module)
                    edges[name] |= set([m for m in both if m in files][:1])
    return {name: targets - {name, "labs"} for name, targets in edges.items()}


def layer(module: str, root: Path = ROOT) -> str:
    """The folder that a module of labs is in, or "experiment"."""
    first = module.split(".")[1]
    return first if (root / "labs" / first).is_dir() and first in FOLDERS else "experiment"


def violations(root: Path) -> list[str]:
    """Imports that the layers forbid, as "module imports module"."""
    found = []
    for name, targets in graph(root).items():
        for target in targets if name != "labs" else ():
            above, below = layer(name, root), layer(target, root)
            allowed = below == above or below in BELOW[above]
            own, other = name.split(".")[1], target.split(".")[1]
            allowed &= above != "experiment" or below != "experiment" or other in {own} | BUILDING_BLOCKS
            allowed &= own not in TOOLS or other in {own, "kit"}
            allowed = (allowed or name in COMMANDS) and target not in COMMANDS
            found += [] if allowed else [f"{name} imports {target}"]
    return found


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, one after the other; empty if there is none."""
    try:
        TopologicalSorter(graph(root)).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def misplaced(root: Path) -> list[str]:
    """What stands directly in labs/ and can neither be run nor is one of the folders."""
    there = [p for p in (root / "labs").iterdir() if p.name not in ("__init__.py", "__pycache__")]
    files = [
        p.name for p in there if p.is_file() and not re.search(r'^if __name__ == "__main__":', p.read_text(), re.M)
    ]
    return files + [p.name for p in there if p.is_dir() and p.name not in FOLDERS and not (p / "__main__.py").is_file()]


def test_layers_are_kept():
    assert any(layer(name) == "experiment" for name in graph(ROOT))
    assert violations(ROOT) == []


def test_directly_in_labs_is_only_what_can_be_run():
    assert misplaced(ROOT) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(ROOT) == []
