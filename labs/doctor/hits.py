"""What a static rule is, what it finds, and cures as a diff of the learner's own lines."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labs.doctor.syntax import File, Program, statement_of
from labs.doctor.training_loops import Training

CERTAINTIES = ("wrong", "outdated", "costs", "look at it")
"""wrong: it does not do what it seems to; outdated: there is a newer way that torch's documentation wants; costs: time
or memory for nothing; look at it: right in some trainings and wrong in others, which the source does not tell."""


@dataclass(frozen=True)
class Hit:
    """A line that a rule has found."""

    rule: str
    file: str
    line: int
    """0: the file as a whole."""
    code: str
    """The line itself, without spaces around it."""
    why: str
    cure: str
    """A unified diff that `patch` takes, or words where no line can be written for the learner."""
    notebook: str
    """"04"; "" if none teaches it."""
    section: str
    """Its heading."""
    certainty: str
    """One of CERTAINTIES."""
    source: str
    """An address, or the notebook's experiment."""


@dataclass(frozen=True)
class Found:
    """Where, and how it could be changed."""

    node: ast.AST
    change: Change | None = None
    why: str = ""
    """In place of the rule's."""
    certainty: str = ""
    """In place of the rule's."""


@dataclass(frozen=True)
class Rule:
    """A pattern: what it is, why it matters, who teaches it, and code that has it and code that has not."""

    name: str
    certainty: str
    why: str
    cure: str
    """In words, where no diff can be made."""
    notebook: str
    section: str
    source: str
    find: Callable[[Program, Training], Iterator[Found]]
    ill: tuple[str, ...]
    """Each has exactly this hit, at the line marked `# <-`, and no other that is certain."""
    healthy: tuple[str, ...]


def rule(name: str, certainty: str, **rest: Any) -> Callable[[Callable], Rule]:
    """The function that stands below finds the rule's pattern."""

    def made(find: Callable[[Program, Training], Iterator[Found]]) -> Rule:
        parts = {k: (v,) if k in ("ill", "healthy") and isinstance(v, str) else v for k, v in rest.items()}
        return Rule(name, certainty, find=find, **parts)

    return made


def changed(example: str, *pairs: tuple[str, str]) -> str:
    """An example with other lines: each pair is what stands there and what is to. ValueError if it does not."""
    for old, new in pairs:
        if old not in example:
            raise ValueError(f"the example has no {old!r}")
        example = example.replace(old, new)
    return example


# Changes of the learner's text


@dataclass(frozen=True)
class Change:
    """Pieces of a file's text, from and to an offset, and what stands there instead."""

    file: File
    pieces: tuple[tuple[int, int, str], ...]

    def __add__(self, other: Change | None) -> Change | None:
        """Both, or none of them."""
        return Change(self.file, self.pieces + other.pieces) if other and other.file is self.file else None

    def text(self) -> str:
        """The file after it."""
        text = self.file.text
        for start, end, new in sorted(self.pieces, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def diff(self) -> str:
        """ "" if what comes out is no Python."""
        try:
            ast.parse(self.text())
        except (SyntaxError, ValueError):
            return ""
        old, new = (text.rstrip("\n").split("\n") for text in (self.file.text, self.text()))
        name = self.file.path.name
        return "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", n=1, lineterm="")) + "\n"


def _offset(file: File, line: int, column: int) -> int:
    """Of a place of `ast`, whose columns are bytes, in the text."""
    start = file.starts[line - 1]
    text = file.text[start : file.starts[line]]
    return start + len(text.encode()[:column].decode(errors="ignore"))


def span(node: ast.AST) -> tuple[int, int]:
    """Offsets of a node in its file's text."""
    file = node.file
    return _offset(file, node.lineno, node.col_offset), _offset(file, node.end_lineno, node.end_col_offset)


def source_of(node: ast.AST) -> str:
    """Its text as the learner has written it."""
    start, end = span(node)
    return node.file.text[start:end]


def replaced(node: ast.AST, new: str) -> Change:
    """Another text in a node's place."""
    return Change(node.file, ((*span(node), new),))


def with_argument(call: ast.Call, name: str, value: str) -> Change:
    """`name=value` in a call, added or changed."""
    for k in call.keywords:
        if k.arg == name:
            return replaced(k.value, value)
    given = [*call.args, *call.keywords]
    if not given:
        end = span(call)[1] - 1
        return Change(call.file, ((end, end, f"{name}={value}"),))
    end = max(span(g)[1] for g in given)
    if len(call.args) == 1 and isinstance(call.args[0], ast.GeneratorExp):
        end = span(call)[1] - 1
    return Change(call.file, ((end, end, f", {name}={value}"),))


def without_argument(call: ast.Call, name: str) -> Change | None:
    """The call without `name=`."""
    parts = sorted([*call.args, *call.keywords], key=span)
    for i, k in enumerate(parts):
        if isinstance(k, ast.keyword) and k.arg == name:
            start = span(parts[i - 1])[1] if i else span(k)[0]
            end = span(k)[1] if i or len(parts) == 1 else span(parts[1])[0]
            return Change(call.file, ((start, end, ""),))
    return None


def _lines_of(node: ast.AST) -> tuple[int, int, str] | None:
    """A statement's whole lines as offsets, and their indentation; None if it shares a line with another."""
    statement = statement_of(node)
    file, (start, end) = node.file, span(statement)
    begin, after = file.starts[statement.lineno - 1], file.starts[statement.end_lineno]
    indent, rest = file.text[begin:start], file.text[end:after].strip()
    if indent.strip() or (rest and not rest.startswith("#")):
        return None
    return begin, after, indent


def removed(node: ast.AST) -> Change | None:
    """Without the statement; with `pass` where it is the only one."""
    lines, statement = _lines_of(node), statement_of(node)
    if lines is None:
        return None
    alone = any(getattr(statement.parent, part, None) == [statement] for part in ("body", "orelse", "finalbody"))
    return Change(node.file, ((lines[0], lines[1], f"{lines[2]}pass\n" if alone else ""),))


def inserted(node: ast.AST, *new: str, after: bool = False) -> Change | None:
    """Lines before or after a statement, indented as it is."""
    lines = _lines_of(node)
    if lines is None:
        return None
    place = lines[1] if after else lines[0]
    text = "".join(f"{lines[2]}{line}\n" for line in new)
    if after and not node.file.text[: lines[1]].endswith("\n"):
        text = "\n" + text
    return Change(node.file, ((place, place, text),))


def moved(node: ast.AST, to: ast.AST, after: bool = False) -> Change | None:
    """A statement before or after another one."""
    lines, gone = _lines_of(node), removed(node)
    if lines is None or gone is None:
        return None
    text = node.file.text[lines[0] : lines[1]].rstrip("\n").split("\n")
    there = inserted(to, *(t.removeprefix(lines[2]) for t in text), after=after)
    return gone + there if there else None
