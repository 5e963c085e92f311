"""Short hashes that identify a version of the course, independent of machine, Python version and line endings.

    course()             all notebooks and all of labs/: what an instructor and a room compare
    notebook(path)       one notebook's cells, without outputs
    code_behind(path)    the code of labs/ that a notebook runs, without comments and docstrings

`make notebooks` writes the last two into each notebook it runs. A test compares them, and so finds outputs that came
from other code than the repository's.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGITS = 12
SHEETS = re.compile(r"^(?:changes|command) = .*\n", re.MULTILINE)
"""Lines of claims.toml that no notebook uses, only `python -m labs.claims`."""
DATA = ("labs/kit/gpus.toml", "labs/claims/claims.toml", "labs/common/data/SHA256SUMS")  # read by code that cells run


def course(root: Path = ROOT) -> str:
    """Return 12 hex digits of all notebooks' cells, without outputs, and all modules of labs/ below `root`. Keeps
    comments, because removing them takes longer than `import torch`. FileNotFoundError if there are no notebooks."""
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    if not notebooks:
        raise FileNotFoundError(f"there are no notebooks in {root / 'notebooks'}")
    modules = sorted((root / "labs").rglob("*.py"))
    return _hash([*map(notebook, notebooks), *(_text(p.read_text("utf-8")) for p in modules)])


def notebook(path: Path) -> str:
    """Return 12 hex digits of a notebook's cells: kind, source and tags. ValueError if the file isn't a notebook."""
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        parts = [[c["cell_type"], _text(c["source"]), sorted(c["metadata"].get("tags", []))] for c in cells]
        return _hash([json.dumps(parts)])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a notebook") from None


def code_behind(path: Path) -> str:
    """Return 12 hex digits of the modules of labs/ that a notebook imports or launches, what they import, and DATA."""
    modules = modules_behind(path)
    texts = [without_comments(_module_file(m).read_text("utf-8")) for m in sorted(modules)]
    data = [SHEETS.sub("", _text((ROOT / name).read_text("utf-8"))) for name in DATA]
    return _hash([*texts, *data])


def modules_behind(path: Path) -> set[str]:
    """Return the modules of labs/ that a notebook needs, including its exercises and claims."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    source = "\n".join(
        re.sub(r"^[%!].*$", "", _text(c["source"]), flags=re.M) for c in cells if c["cell_type"] == "code"
    )
    number = path.name[:2]
    own = {f"labs.exercises.nb{number}", f"labs.claims.nb{number}"}
    if "labs.claims" in source:  # it finds the judges of all notebooks by name
        own |= {f"labs.claims.{p.stem}" for p in (ROOT / "labs" / "claims").glob("nb*.py")}
    todo, found = {*_uses(source, ""), *(m for m in own if _module_file(m))}, set()
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= _uses(_module_file(name).read_text("utf-8"), name) - found
    return found


@cache  # most modules are used by several notebooks
def _uses(source: str, module: str) -> frozenset[str]:
    """Return the modules of labs/ that `source` imports anywhere or launches, and their packages."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch" and node.args:
            names = [f"labs.{node.args[0].value}"] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            found |= {p for p in _with_parents(name) if p.startswith("labs") and p != module and _module_file(p)}
    return frozenset(found)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts) + 1))


@cache
def _module_file(name: str) -> Path | None:
    """Return the file of a module in this repository; None if there is no such module."""
    path = ROOT.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def without_comments(source: str) -> str:
    """Return Python source without comments, docstrings, blank lines and trailing spaces."""
    lines, body = source.replace("\r\n", "\n").split("\n"), ast.parse(source).body
    begun = 0
    for statement in body:  # one at a time: tokenizing is the slow part, and most statements hold no #
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]) - 1
        _cut_comments(lines, begun, first)
        _cut_comments(lines, max(begun, first), statement.end_lineno)
        begun = max(begun, statement.end_lineno)
    _cut_comments(lines, begun, len(lines))
    for node in _statements(body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(kept for line in lines if (kept := line.rstrip()))


def _cut_comments(lines: list[str], first: int, end: int) -> None:
    """Cut comments off lines[first:end], which start and end with a statement."""
    text = "\n".join(lines[first:end])
    if "#" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[first + row - 1] = lines[first + row - 1][:column]


def _statements(body: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield all statements in `body`, nested ones included, without visiting expressions."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inner := getattr(node, name, None), list):
                yield from _statements(inner)


def _text(source: str | list[str]) -> str:
    return "".join(source).replace("\r\n", "\n")


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]
