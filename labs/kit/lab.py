"""Find a lab's module, reload it after edits, and make its Config from a caller's values."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import operator
import os
import sys
import time
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from labs.kit import record
from labs.kit.errors import BadInput, brief, did_you_mean, require
from labs.kit.record import plain


def lab_module(name: str) -> ModuleType:
    """Import a lab: "data_parallel" for one in labs/, "my_package.my_lab" for your own. Edits take effect.

    BadInput lists the labs, or says what the module lacks.
    """
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(_no_lab(name))
    full = name if "." in name or (not _is_there(f"labs.{name}") and _is_there(name)) else f"labs.{name}"
    try:
        lab = _fresh(full)
    except ModuleNotFoundError as e:
        require(e.name == f"labs.{name}", f"cannot import lab {name!r}: {e}")
        raise BadInput(_no_lab(name)) from None
    if not (hasattr(lab, "run") and hasattr(lab, "Config")):
        raise BadInput(_no_lab(name) if "." not in name else f"{name} is not a lab: it needs a Config and a run()")
    return lab


def _is_there(full: str) -> bool:
    return full not in sys.stdlib_module_names and importlib.util.find_spec(full) is not None


def _no_lab(name: str) -> str:
    known = [name for name, path in experiments().items() if "\ndef run(config" in path.read_text()]
    return f"there is no lab {name!r}: {did_you_mean(name, known)}The labs are {', '.join(known)}."


def experiments(labs: Path = Path(__file__).parents[1]) -> dict[str, Path]:
    """Return what can be run as `python -m labs.NAME`: each name, sorted, with the file that describes it.

    A package that can be run has a __main__.py. The larger of that and __init__.py describes it.
    """
    files = {p.stem: p for p in labs.glob("[!_]*.py")}
    for main in labs.glob("*/__main__.py"):
        package = main.with_name("__init__.py")
        files[main.parent.name] = max(package, main, key=lambda path: path.stat().st_size)
    return dict(sorted(files.items()))


def short_name(full: str) -> str:
    """Return a lab's name for records and `launch`: without "labs." for a module in labs/ itself."""
    package, _, name = full.rpartition(".")
    return name if package == "labs" else full


_times_ns: dict[str, int] = {}  # each module's file time when a launch last checked
_START_NS = time.time_ns()  # a file not checked before, but changed after this, may be newer than its loaded module


def _fresh(full: str) -> ModuleType:
    """Import a module; reload it, and the modules of labs it may use, if their files were edited.

    labs.kit isn't reloaded. Ranks are forked from a process that has loaded it, so edits there need a new kernel.
    """
    edited = [n for n in sorted(sys.modules) if _is_lab_code(n) and n != full and _is_edited(sys.modules[n])]
    known = sys.modules.get(full)
    reloaded = [*edited, full] if known is not None and (edited or _is_edited(known)) else edited
    _times_ns.update((name, _time_ns(sys.modules[name])) for name in reloaded)  # before reading, so no edit is missed
    for name in reloaded:
        importlib.reload(sys.modules[name])
    lab = importlib.import_module(full)
    for name in [n for n in list(sys.modules) if (_is_lab_code(n) or n == full) and n not in _times_ns]:
        _times_ns[name] = _time_ns(sys.modules[name])
    return lab


def _is_lab_code(name: str) -> bool:
    return name.startswith("labs.") and not name.startswith("labs.kit")


def _is_edited(module: ModuleType) -> bool:
    """Return whether the file time differs from the last check. Earlier counts: a file server's clock may be off."""
    now, before = _time_ns(module), _times_ns.get(module.__name__)
    return now > _START_NS if before is None else now != before


def _time_ns(module: ModuleType) -> int:
    """Return when the module's file changed; 0 if it has none or it is gone."""
    try:
        return os.stat(module.__file__).st_mtime_ns
    except (OSError, TypeError):
        return 0


def require_findable(name: str, what: str) -> None:
    """Raise BadInput unless `name`, "package.module:factory", exists. Reads its module quickly, without running it.

    Cases that need running, such as a name imported with *, are left to `imported`.
    """
    module, _, attribute = name.partition(":")
    require(bool(module and attribute), f"{what} {name!r} must be package.module:factory")
    if module in sys.modules or (module == CELL and attribute in cell_functions):
        return
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as e:  # from a parent package
        raise BadInput(f"{what} {name!r} cannot be imported: {e}") from None
    require(spec is not None, f"{what} {name!r} cannot be imported: No module named {module!r}")
    try:
        tree = ast.parse(Path(spec.origin or "").read_bytes())
    except (OSError, SyntaxError, ValueError):  # no source file, or a broken one
        return
    defined = set(_names(tree))
    told = bool({"*", "__getattr__", "globals", "setattr"} & defined) or attribute in defined
    require(told, f"{what} {name!r} cannot be imported: module {module!r} has no attribute {attribute!r}")


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield every name in a module's source."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.alias():
                yield node.asname or node.name


CELL = "cell"
cell_functions: dict[str, Any] = {}
"""Functions and classes that a notebook cell passes to `launch`, by name. A Config refers to one as "cell:mlp"."""


def named_functions(parameters: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `parameters` with each function or class replaced by a name such as "cell:mlp", and these by name."""
    functions = {value.__name__: value for value in parameters.values() if callable(value)}
    named = {key: f"{CELL}:{value.__name__}" if callable(value) else value for key, value in parameters.items()}
    cell_functions.update(functions)
    return named, functions


def imported(name: str, what: str) -> Any:
    """Return what `name`, "package.module:factory" or "cell:function", refers to. BadInput says `what` it is for."""
    module, _, attribute = name.partition(":")
    if module == CELL and attribute in cell_functions:
        return cell_functions[attribute]
    require(bool(module and attribute), f"{what} {name!r} must be package.module:factory")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise BadInput(f"{what} {name!r} cannot be imported: {e}") from None


def make_config(lab: ModuleType, values: dict[str, Any]) -> Any:
    """Return `lab.Config(**values)` after checking names and types. BadInput names the parameter and the fix."""
    import typeguard

    name = short_name(lab.__name__)
    hints = typing.get_type_hints(lab.Config)
    every_item = typeguard.CollectionCheckStrategy.ALL_ITEMS  # by default, typeguard checks only the first
    for key, value in values.items():
        if key not in hints:
            hint = did_you_mean(key, hints)
            raise BadInput(f"lab {name!r} has no parameter {key!r}: {hint}It has {', '.join(hints)}.")
        try:
            typeguard.check_type(value, hints[key], collection_check_strategy=every_item)
        except typeguard.TypeCheckError:
            raise BadInput(f"{key} of lab {name!r} must be {_in_words(hints[key])}, not {brief(value)}") from None
    try:
        return recordable(lab.Config(**values))
    except CANNOT_BE_JUDGED as e:
        raise cannot_be_judged(e, values) from None


CANNOT_BE_JUDGED = (ArithmeticError, OSError, ValueError)
"""Exceptions from a Config's own checks: a number too large to compute with, an impossible file name."""


def recordable(config: Any) -> Any:
    """Return `config`. Raises BadInput if a value is outside its limits or can't be written to a record (inf)."""
    require_limits(config)
    for name, value in dataclasses.asdict(config).items():
        try:
            problem = record.json_problem(plain(value))
        except ValueError as e:  # an integer of thousands of digits
            problem = str(e)
        require(not problem, f"{name}: {brief(value)} cannot be written to a record")
    return config


def require_limits(config: Any) -> None:
    """Raise BadInput for the first value outside the limits of its annotation, such as `Annotated[int, Ge(1)]`.

    Limits are annotated_types' Ge, Gt, Le and Lt.
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        for limit in getattr(hint, "__metadata__", ()) if value is not None else ():
            for attribute, (words, holds) in LIMITS.items():
                bound = getattr(limit, attribute, None)
                require(bound is None or holds(value, bound), f"{name} must be {words} {bound}, not {brief(value)}")


LIMITS = {
    "ge": ("at least", operator.ge),
    "gt": ("more than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}


def cannot_be_judged(error: Exception, names: Iterable[str]) -> BadInput:
    """Turn an error that a Config raised for these parameters into a BadInput."""
    if isinstance(error, BadInput):
        return error
    return BadInput(f"{', '.join(names)}: {getattr(error, 'strerror', None) or error}")


def for_smoke(lab: ModuleType, config: Any) -> Any:
    """Return `config`; for a smoke run, with the values of `lab.SMOKE` in place of defaults.

    This shortens smoke runs from a shell: fewer models, sizes or parts. Those from a notebook stay unchanged, because
    they must produce what the notebook shows.
    """
    if not getattr(config, "smoke", False):
        return config
    asked_for = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}
    shorter = {name: value for name, value in getattr(lab, "SMOKE", {}).items() if name not in asked_for}
    return dataclasses.replace(config, **shorter)


def check_layout(lab: ModuleType, config: Any, world_size: int) -> None:
    """Let a lab's `check_layout(config, world_size)`, if it has one, reject this many ranks with BadInput."""
    if check := getattr(lab, "check_layout", None):
        check(config, world_size)


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    plain = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if plain else str(hint).replace("typing.", "")
