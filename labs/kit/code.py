"""Show the code that is being measured: a function, class or recipe, or the difference between two of them.

    show_code(train_ddp, accumulate)          # functions, classes, methods
    show_code("train_ddp")                    # a whole recipe, labs/recipes/train_ddp.py
    show_diff("train_single", "train_ddp")    # what the second adds to the first

The code is read from its file, not from the kernel's memory. Ranks import it again for every launch, so a cell shows
what the next launch runs. The output is Markdown, which JupyterLab, VS Code, GitHub and nbconvert colour in their own
theme, and plain text for nbval, terminals and screen readers. A difference is HTML, since JupyterLab's themes don't
colour one; where styles are stripped, + and - remain.
"""

from __future__ import annotations

import ast
import difflib
import functools
import html
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from labs.kit.errors import BadInput, require

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "labs" / "recipes"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml"}
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FOR_TOOLS = re.compile(r"[ ]*# (?:fmt: (?:skip|on|off)|noqa\b[^#\n]*|type: ignore\S*)$", re.MULTILINE)
COLORS = {"+": "rgba(46, 160, 67, 0.25)", "-": "rgba(248, 81, 73, 0.25)", "@": "rgba(56, 139, 253, 0.15)"}


@dataclass(frozen=True)
class Source:
    place: str
    """Path relative to the repository or to site-packages, or a description"""
    text: str
    """Dedented, without a final line break"""
    in_repository: bool
    language: str = "python"

    @property
    def link(self) -> str:
        """The place as a Markdown link. notebooks/ and my/ (the learner's copies) are one folder below the root."""
        return f"[{self.place}](../{self.place})" if self.in_repository else self.place

    @property
    def anchor(self) -> str:
        """The place as an HTML link."""
        return f'<a href="../{self.place}">{self.place}</a>' if self.in_repository else html.escape(self.place)


def show_code(*parts: Callable[..., Any] | type | str) -> None:
    """Show the source of functions, classes and methods, or of whole recipes by name, each with its file.

    Neighbours from the same file share a block. Raises BadInput if there is no Python source, or no such recipe.
    """
    _display(code_shown(*parts))


def show_diff(a: Callable[..., Any] | type | str, b: Callable[..., Any] | type | str) -> None:
    """Show which lines to add to `a` and remove from it to get `b`. Raises BadInput as `show_code` does."""
    _display(diff_shown(a, b))


def code_shown(*parts: Callable[..., Any] | type | str) -> dict[str, str]:
    """Return what `show_code` displays, by MIME type."""
    require(bool(parts), 'show_code needs something to show: a function, a class, or a recipe such as "train_ddp"')
    blocks: list[Source] = []
    for source in map(source_of, parts):
        if blocks and blocks[-1].place == source.place:
            text = f"{blocks[-1].text}\n\n\n{source.text}"
            blocks[-1] = Source(source.place, text, source.in_repository, source.language)
        else:
            blocks.append(source)
    return {
        "text/markdown": "\n\n".join(f"{b.link}\n\n{_fenced(b.text, b.language)}" for b in blocks),
        "text/plain": "\n\n\n".join(f"# {b.place}\n{b.text}" for b in blocks),
    }


def diff_shown(a: Callable[..., Any] | type | str, b: Callable[..., Any] | type | str) -> dict[str, str]:
    """Return what `show_diff` displays, by MIME type."""
    old, new = source_of(a), source_of(b)
    lines = list(difflib.unified_diff(old.text.split("\n"), new.text.split("\n"), lineterm=""))[2:]
    lines = ["@@" if line.startswith("@@") else line for line in lines]  # drop line numbers
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    words = f"{added} line{'s' if added != 1 else ''} added, {removed} removed"
    coloured = "".join(map(_coloured, lines))
    return {
        "text/html": f'<p>{old.anchor} → {new.anchor}: {words}</p>\n<pre class="labs-diff">{coloured}</pre>',
        "text/plain": "\n".join([f"# {old.place} -> {new.place}: {words}", *lines]),
    }


def _coloured(line: str) -> str:
    """Return one line of a difference as HTML. Its colours are translucent, for light and dark pages."""
    text = html.escape(line, quote=False)
    color = COLORS.get(line[0]) if line else None
    return (f'<span style="background-color: {color}">{text}</span>' if color else text) + "\n"


def source_of(part: Callable[..., Any] | type | str) -> Source:
    """Return a function's, class's, method's or recipe's lines as its file has them now. Raises BadInput if none."""
    if isinstance(part, str):
        return _recipe(part)
    part = _plain(part)
    named = inspect.isfunction(part) or inspect.isclass(part)
    require(named, f"show_code cannot show {_name(part)}: it has no Python source: pass a Python function or class")
    try:
        path = Path(inspect.getsourcefile(part) or "")
        if _is_cell(path):
            return Source("in this notebook", textwrap.dedent(inspect.getsource(part)).rstrip(), False)
        text = path.read_text("utf-8").replace("\r\n", "\n")
    except (OSError, TypeError):
        raise BadInput(f"show_code cannot show {_name(part)}: its source is not in a file") from None
    place, in_repository = _place(path.resolve())
    return Source(place, _definition(text, part, place), in_repository)


def _plain(part: Any) -> Any:
    """Return the function inside a method, property, partial or decorator's wrapper."""
    if isinstance(part, property):
        part = part.fget
    if isinstance(part, functools.partial):
        part = part.func
    part = getattr(part, "__func__", part)
    return inspect.unwrap(part) if callable(part) else part


def _name(part: Any) -> str:
    if isinstance(part, ModuleType):
        return f"the module {part.__name__}"
    return getattr(part, "__qualname__", None) or f"an object of type {type(part).__name__}"


def _is_cell(path: Path) -> bool:
    """Return whether a path is a notebook cell, which ipykernel keeps in a temporary file."""
    return "ipykernel_" in str(path) or path.name.startswith("<")


def _definition(text: str, part: Any, place: str) -> str:
    """Return the lines of `text` that define `part`, without comments for linters.

    Finds them by name, since edits move lines while the kernel runs. Of several definitions with one name, takes the
    one nearest to the line that the kernel read.
    """
    found: list[Any] = [ast.parse(text)]
    for name in part.__qualname__.replace("<locals>.", "").split("."):
        found = [n for outer in found for n in ast.walk(outer) if isinstance(n, DEFINED) and n.name == name]
    require(bool(found), f"{place} has no {part.__qualname__} any more: restart the kernel")
    line = getattr(getattr(part, "__code__", None), "co_firstlineno", 1)
    starts = {min([n.lineno, *(d.lineno for d in n.decorator_list)]): n for n in found}
    start = min(starts, key=lambda s: abs(s - line))
    lines = "\n".join(text.split("\n")[start - 1 : starts[start].end_lineno])
    return FOR_TOOLS.sub("", textwrap.dedent(lines)).rstrip()


def _place(path: Path) -> tuple[str, bool]:
    """Return a file's path, the same on every machine, and whether it is in this repository."""
    installed = [i for i, part in enumerate(path.parts) if part in ("site-packages", "dist-packages")]
    if installed:
        return "/".join(path.parts[installed[-1] + 1 :]), False
    inside = path.is_relative_to(ROOT)
    return path.relative_to(ROOT).as_posix() if inside else path.name, inside


def _recipe(name: str) -> Source:
    known = sorted(p.name for p in RECIPES.glob("*") if p.suffix in LANGUAGES and p.stem != "__init__")
    file = name if name in known else f"{name}.py"
    there = ", ".join(n.removesuffix(".py") for n in known) or "none in this copy of the course"
    require(file in known, f"there is no recipe {name!r}; the recipes are {there}")
    text = (RECIPES / file).read_text("utf-8").replace("\r\n", "\n").rstrip()
    return Source(f"labs/recipes/{file}", text, True, LANGUAGES[Path(file).suffix])


def _fenced(text: str, language: str) -> str:
    """Return a Markdown code block with a fence longer than any in the text."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text}\n{fence}"


def _display(shown: dict[str, str]) -> None:
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(shown["text/plain"])
    else:
        display(shown, raw=True)
