"""Run a script in this process as `python script.py` would, or `python -m module`: name, arguments, imports."""

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

IN_PLACE = "the module of -m"  # a word that no script has


def typed(command: str, module: str) -> str:
    """What the user has typed, for messages: the command that pip has made, or `python -m module`."""
    return command if Path(sys.argv[0]).name == command else f"python -m {module}"


def examples(text: str, module: str, prog: str) -> str:
    """A module's docstring with `prog` in place of `python -m module`; comments stay below each other."""
    said = f"python -m {module}"
    gap = " " * (len(said) - len(prog))
    return re.sub(rf"{re.escape(said)}(.*?)(?=  +#)", rf"{prog}\1{gap}", text).replace(said, prog)


def run(argv: list[str], module: str = "") -> None:
    """`argv`: the script's path, then its own arguments. Raises what the script raises, SystemExit among it.

    `module`: its full name, if it is run by that, as `module_file` has found it.
    """
    path = os.path.abspath(argv[0])
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(path))
    spec = importlib.util.find_spec(module) if module else None  # imports the packages around it, as `python -m` does
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
    """(options of `parser`, path of the script and its arguments, full name of the module that it is or "").

    A script ends the options, and so does -m: all that follows the module's name is its own. BadInput for a module that
    is not there, and for a script that would import this `labs` in place of its own.
    """
    parser.add_argument("-m", metavar="MODULE", help="in place of a script, run as `python -m MODULE` would")
    parser.add_argument("script", type=Path, help="the training, run as `python train.py` would")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own")
    if "-m" in args:
        at = args.index("-m")
        given, own = parser.parse_args([*args[:at], IN_PLACE]), args[at + 1 :]
        if str(given.script) == IN_PLACE:  # else this -m is the script's own
            require(bool(own), "-m needs the name of a module")
            if sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])):  # of a command that pip has made
                sys.path[0] = os.getcwd()  # as `python -m` has it
            name, path = module_file(own[0])
            _check_name(Path.cwd())
            return given, [path, *own[1:]], name
    given = parser.parse_args(args)
    _check_name(given.script.resolve().parent)
    return given, [str(given.script), *given.args], ""


def _check_name(folder: Path) -> None:
    """Refuse a folder of scripts that has a `labs` of its own: the script would get this package in its place."""
    package = folder / "labs"
    inits = [package / "__init__.py", *sorted(package.glob("*.py"))[:1]]  # without the first, modules are found as well
    for path in (folder / "labs.py", *inits):
        ours = path.parent == Path(__file__).parents[1]
        require(ours or not path.exists(), f"{path} has the name of this command's own package: rename it")


def module_file(name: str) -> tuple[str, str]:
    """(full name, path) of what `python -m name` would run: of a package its __main__. Nothing is imported for that."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)  # also in this folder: `parse` sees to it
    except ValueError:  # a name that Python keeps for itself
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
    raise BadInput(f"-m: there is no {name} to run that is written in Python: {first} is {spec.origin or 'a folder'}")


def exit_code(ended: SystemExit) -> int:
    """What a shell sees of it."""
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def of_script(trace: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """Without the frames that came before the script's own. None for an error in its syntax."""
    path = os.path.abspath(path)
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace
