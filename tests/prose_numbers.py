"""Numbers with units that stand in prose: found, and held against what may put them there.

A number that was measured belongs into a text only by way of a record. So a number that somebody typed must be
something else: a setting in sight, a published value beside its link, or one of a short list, each with its reason.
"""

import ast
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]

# Unit: (what it measures, how many of the base unit it is). Sizes in bytes, rates in bytes per second.
UNITS: dict[str, tuple[str, float]] = {
    "%": ("ratio", 1e-2),
    "percent": ("ratio", 1e-2),
    "x": ("ratio", 1),
    "×": ("ratio", 1),
    "times": ("ratio", 1),
    "points": ("points", 1),
    "ns": ("s", 1e-9),
    "us": ("s", 1e-6),
    "µs": ("s", 1e-6),
    "microseconds": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "milliseconds": ("s", 1e-3),
    "s": ("s", 1),
    "sec": ("s", 1),
    "second": ("s", 1),
    "seconds": ("s", 1),
    "min": ("s", 60),
    "minute": ("s", 60),
    "minutes": ("s", 60),
    "h": ("s", 3600),
    "hours": ("s", 3600),
    "bytes": ("B", 1),
    "kB": ("B", 1e3),
    "KB": ("B", 1e3),
    "MB": ("B", 1e6),
    "GB": ("B", 1e9),
    "TB": ("B", 1e12),
    "KiB": ("B", 2**10),
    "MiB": ("B", 2**20),
    "GiB": ("B", 2**30),
    "kB/s": ("B/s", 1e3),
    "MB/s": ("B/s", 1e6),
    "GB/s": ("B/s", 1e9),
    "TB/s": ("B/s", 1e12),
    "MiB/s": ("B/s", 2**20),
    "GiB/s": ("B/s", 2**30),
    "Mbit/s": ("B/s", 125e3),
    "Gbit/s": ("B/s", 125e6),
    "Gb/s": ("B/s", 125e6),
    "FLOP/s": ("FLOP/s", 1),
    "GFLOP/s": ("FLOP/s", 1e9),
    "TFLOP/s": ("FLOP/s", 1e12),
    "TFLOPS": ("FLOP/s", 1e12),
    "samples/s": ("samples/s", 1),
    "images/s": ("samples/s", 1),
    "tokens/s": ("tokens/s", 1),
}
WORDS = {
    "half": 1 / 2,
    "twice": 2,
    "a third": 1 / 3,
    "a quarter": 1 / 4,
    "a tenth": 1 / 10,
    "two thirds": 2 / 3,
    "two times": 2,
    "three times": 3,
    "four times": 4,
    "five times": 5,
    "ten times": 10,
    "a hundred times": 100,
}
COMPARED = (
    r"(?: as (?:fast|slow|long|quick|much|many|large|high)\w*"
    r"| (?:faster|slower|longer|shorter|more|less)\b| the (?:time|speed|memory)\b)"
)
# How names in code end that hold a quantity, without the underscore.
SUFFIXES = {
    "s": ("s", 1),
    "ms": ("s", 1e-3),
    "us": ("s", 1e-6),
    "seconds": ("s", 1),
    "minutes": ("s", 60),
    "days": ("s", 86400),
    "bytes": ("B", 1),
    "kb": ("B", 1e3),
    "mb": ("B", 1e6),
    "gb": ("B", 1e9),
    "kib": ("B", 2**10),
    "mib": ("B", 2**20),
    "gib": ("B", 2**30),
    "mb_s": ("B/s", 1e6),
    "gb_s": ("B/s", 1e9),
    "gbit_s": ("B/s", 125e6),
    "percent": ("ratio", 1e-2),
    "share": ("ratio", 1),
    "factor": ("ratio", 1),
    "ratio": ("ratio", 1),
}

_number = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_unit = "|".join(sorted((re.escape(u) for u in UNITS), key=len, reverse=True))
_second = rf"(?:\s(?:to|and|or|–)\s({_number}))?"
QUANTITY = re.compile(rf"(?<![\w.^$])({_number}){_second}(?:[ \u00a0]|-(?!s\b))?({_unit})(?![\w/^])")
IN_WORDS = re.compile(rf"\b({'|'.join(WORDS)})(?={COMPARED})", re.IGNORECASE)
# No value to compare, so such a phrase is listed or reworded.
VAGUE = re.compile(
    r"\b((?:about|nearly|almost|half) an? (?:second|minute|hour)"
    r"|(?:two|three|four|five|six|eight|ten|twenty|thirty|few|some|several) (?:micro|milli)?"
    r"(?:seconds|minutes|hours|percent))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit as it is written; `value` in the base unit of `kind`."""

    text: str
    kind: str
    value: float

    def is_one_of(self, values: Iterable[tuple[str, float]]) -> bool:
        return any(k == self.kind and math.isclose(v, self.value, rel_tol=1e-6) for k, v in values)


def quantities(text: str) -> Iterator[Quantity]:
    """The numbers of `text` that carry a unit of time, size, speed or comparison. '5 to 10 ms' are two."""
    for found in QUANTITY.finditer(text):
        kind, scale = UNITS[found[3]]
        if found[3] == "x" and re.match(r"\s*\d", text[found.end() :]):
            continue  # 224 x 224 is a shape
        for number in (found[1], found[2]):
            if number:
                yield Quantity(f"{number} {found[3]}", kind, float(number.rstrip(",").replace(",", "")) * scale)
    for found in IN_WORDS.finditer(text):
        yield Quantity(found[1].lower(), "ratio", WORDS[found[1].lower()])
    for found in VAGUE.finditer(text):
        yield Quantity(found[1].lower(), "in words", math.nan)


def sentences(text: str) -> list[str]:
    """The sentences of a markdown text, without code and formulas of their own lines, links left in."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "", text, flags=re.S)
    lines = re.sub(r"\n(?=\s*(?:[*-]|\d+\.|#+|>|\|) ?)", "\n\n", text)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", lines)]
    return [s for b in blocks for s in re.split(r"(?<=[.?!:;])\**\)?\s+(?=[\"'`*(\[A-Z\d])", b) if s]


def has_source(sentence: str) -> bool:
    """Whether it links to something outside of this course."""
    return re.search(r"\]\(https?://", sentence) is not None


def settings(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """(kind, value) of numbers whose names end in a unit: `mb_s=100`, `DELAY_MS = 5`, defaults, keys of dicts."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(k.arg, k.value) for k in node.keywords if k.arg]
        elif isinstance(node, ast.Assign):
            pairs = [(t.id, node.value) for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.arguments):
            late = node.args[len(node.args) - len(node.defaults) :]
            pairs = [(a.arg, v) for a, v in zip(late, node.defaults, strict=True)]
            pairs += [(a.arg, v) for a, v in zip(node.kwonlyargs, node.kw_defaults, strict=True) if v]
        elif isinstance(node, ast.Dict):
            pairs = [
                (k.value, v)
                for k, v in zip(node.keys, node.values, strict=True)
                if isinstance(k, ast.Constant) and isinstance(k.value, str)
            ]
        for name, value in pairs:
            yield from _with_unit(name.lower(), value)


def _with_unit(name: str, node: ast.expr) -> Iterator[tuple[str, float]]:
    """As a quantity, if the name ends in a unit; a call `field(default=...)` counts by its own keyword."""
    ends = [s for s in SUFFIXES if name == s or name.endswith(f"_{s}")]
    if not ends:
        return
    kind, scale = SUFFIXES[max(ends, key=len)]
    if isinstance(node, ast.Call):
        node = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "default"), node)
    for value in numbers(node):
        yield kind, value * scale


def numbers(node: ast.expr) -> list[float]:
    """The number, or the numbers of a tuple or list, that an expression of constants is; else none."""
    if isinstance(node, ast.Tuple | ast.List):
        return [v for n in node.elts for v in numbers(n)]
    parts = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    if not all(isinstance(n, parts) for n in ast.walk(node)):
        return []
    value = eval(compile(ast.Expression(node), "<constant>", "eval"))
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def code_of(cell: NotebookNode) -> ast.Module:
    return ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))


def launched(tree: ast.AST) -> Iterator[Path]:
    """The files of the labs that a cell launches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch" and node.args:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if (ROOT / f"labs/{name}.py").is_file():
                yield ROOT / f"labs/{name}.py"


def sections(nb: NotebookNode) -> list[list[NotebookNode]]:
    """Cells from one heading of first or second order to the next."""
    found: list[list[NotebookNode]] = [[]]
    for cell in nb.cells:
        if cell.cell_type == "markdown" and re.match(r"##? ", cell.source):
            found.append([])
        found[-1].append(cell)
    return found


def unsupported(nb: NotebookNode, listed: dict[str, dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(cell id, number, sentence) of numbers in prose without a setting in their section, a source or an entry."""
    for cells in sections(nb):
        trees = [code_of(c) for c in cells if c.cell_type == "code"]
        trees += [ast.parse(path.read_text()) for path in {p for t in trees for p in launched(t)}]
        seen = {pair for tree in trees for pair in settings(tree)}
        for cell in (c for c in cells if c.cell_type == "markdown"):
            for sentence in sentences(cell.source):
                if has_source(sentence):
                    continue
                for q in quantities(sentence):
                    if not q.is_one_of(seen) and q.text not in listed.get(cell.id, {}):
                        yield cell.id, q.text, sentence


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of a module's strings; of an f-string what is typed, with a mark for each computed part."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.JoinedStr) for n in ast.walk(f)}
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (inside | alone):
            yield node.lineno, node.value


def typed_numbers(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, number, text) of what the strings of a program say with a unit, typed instead of computed."""
    for line, text in texts(ast.parse(source)):
        for q in quantities(text):
            yield line, q.text, text
