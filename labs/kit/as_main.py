"""Run a script in this process as `python script.py` or `python -m module` would: same name, arguments and imports."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from labs.kit.errors import BadInput, require

IN_PLACE = "the module of -m"  # no script has this name


def typed(command: str, module: str) -> str:
    """Return what the user typed, for messages: the command that pip installed, or `python -m module`."""
    return command if Path(sys.argv[0]).name == command else f"python -m {module}"


def examples(text: str, module: str, prog: str) -> str:
    """Return a docstring with `prog` in place of `python -m module`, keeping its comments aligned."""
    said = f"python -m {module}"
    gap = " " * (len(said) - len(prog))
    return re.sub(rf"{re.escape(said)}(.*?)(?=  +#)", rf"{prog}\1{gap}", text).replace(said, prog)


def run(argv: list[str], module: str = "") -> None:
    """Run a script. `argv` is its path, then its arguments. Raises what the script raises, including SystemExit.

    `module` is its full name, as `module_file` returns it, if it is run with -m.
    """
    path = os.path.abspath(argv[0])
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(path))
    spec = importlib.util.find_spec(module) if module else None  # imports the parent packages, as `python -m` does
    loader = spec.loader if spec else SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __builtins__=__builtins__,
        __loader__=loader,
        __package__=spec.parent if spec else None,
        __spec__=spec,
        __cached__=None,
    )
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def parse(parser: argparse.ArgumentParser, args: list[str]) -> tuple[argparse.Namespace, list[str], str]:
    """Return (options of `parser`, the script's path and arguments, full name of its module or "").

    The script's name, or -m with a module's name, ends the options: the rest are the script's arguments. Raises
    BadInput if the module doesn't exist, or if the script would import this `labs` instead of the script's.
    """
    parser.add_argument("-m", metavar="MODULE", help="run a module, as `python -m MODULE` does, instead of a script")
    parser.add_argument("script", type=Path, help="your training script, run as `python train.py` does")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")
    if "-m" in args:
        at = args.index("-m")
        given, own = parser.parse_args([*args[:at], IN_PLACE]), args[at + 1 :]
        if str(given.script) == IN_PLACE:  # otherwise this -m belongs to the script
            require(bool(own), "-m needs the name of a module")
            if sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])):  # a command that pip installed
                sys.path[0] = os.getcwd()  # as under `python -m`
            name, path = module_file(own[0])
            _check_name(Path.cwd())
            return given, [path, *own[1:]], name
    given = parser.parse_args(args)
    _check_name(given.script.resolve().parent)
    return given, [str(given.script), *given.args], ""


def _check_name(folder: Path) -> None:
    """Reject a folder of scripts that has its own `labs`: the scripts would get this package instead."""
    package = folder / "labs"
    inits = [package / "__init__.py", *sorted(package.glob("*.py"))[:1]]  # a package also works without __init__.py
    for path in (folder / "labs.py", *inits):
        ours = path.parent == Path(__file__).parents[1]
        require(ours or not path.exists(), f"{path} has the same name as this command's package: rename it")


def module_file(name: str) -> tuple[str, str]:
    """Return (full name, path) of what `python -m name` runs, which for a package is its __main__. Imports nothing."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)  # `parse` has put this folder on sys.path
    except ValueError:  # a name reserved by Python
        spec = None
    require(spec is not None, f"-m: there is no module {first} in this folder, nor among the installed ones")
    if not rest and spec.origin and spec.origin.endswith(".py") and not spec.submodule_search_locations:
        return name, spec.origin
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        if rest and (path := base.with_name(base.name + ".py")).is_file():
            return name, str(path)
        if (path := base / "__main__.py").is_file():
            return f"{name}.__main__", str(path)
    raise BadInput(f"-m: {name} has no Python file to run: {first} is {spec.origin or 'a folder'}")


def exit_code(ended: SystemExit) -> int:
    """Return the exit code that a shell sees."""
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def of_script(trace: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """Drop the traceback's frames before the script's own. None for a syntax error in the script."""
    path = os.path.abspath(path)
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace
