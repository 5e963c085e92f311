"""Every notebook is whole: it has outputs of one run, no errors, nothing of one machine, and links that resolve.

Each rule takes a notebook and its path and returns what is wrong with it.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labs.kit.notebook_report import pictures

Rule = Callable[[NotebookNode, Path], list[str]]
RULES: dict[str, Rule] = {}

SIZE_LIMIT_BYTES = 500_000  # repository pages show a notebook of up to about 1 MB
# The standard library is for exercises; ranks and other processes are started by launch() alone.
IMPORTS = set("labs torch numpy pandas matplotlib scipy IPython PIL psutil pynvml".split()) | sys.stdlib_module_names
IMPORTS -= {"subprocess", "multiprocessing", "concurrent", "threading"}
MORE_IMPORTS = {"08_scaling_out": {"subprocess"}}  # its program is two torchruns, which end by themselves
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def rule(function: Rule) -> Rule:
    """Register a rule of the contract."""
    RULES[function.__name__] = function
    return function


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """The code cells that contain anything."""
    return [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]


def markdown(nb: NotebookNode) -> str:
    return "\n\n".join(c.source for c in nb.cells if c.cell_type == "markdown")


def parsed(cell: NotebookNode) -> ast.Module:
    """The cell's syntax tree, without lines of magics."""
    return ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))


def calls(nb: NotebookNode, name: str) -> Iterator[ast.Call]:
    """Calls of the function `name` in the notebook's code."""
    for cell in code_cells(nb):
        for node in ast.walk(parsed(cell)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield node


@rule
def has_one_parameters_cell(nb: NotebookNode, path: Path) -> list[str]:
    cells = [c for c in code_cells(nb) if "parameters" in tags(c)]
    if len(cells) != 1:
        return [f"{len(cells)} cells are tagged 'parameters', not 1"]
    body = parsed(cells[0]).body
    if not all(isinstance(node, ast.Assign | ast.AnnAssign) for node in body):
        return ["the parameters cell does more than assign"]
    names = {t.id for n in body for t in (n.targets if isinstance(n, ast.Assign) else [n.target])}
    needs = {"NPROC": "launch", "SOLUTIONS": "check"}
    return [f"calls {f}() but has no parameter {p}" for p, f in needs.items() if any(calls(nb, f)) and p not in names]


@rule
def exercises_follow_the_solutions_parameter(nb: NotebookNode, path: Path) -> list[str]:
    wrong = [
        c
        for c in calls(nb, "check")
        if not any(ast.unparse(a) == "SOLUTIONS" for a in [*c.args, *(k.value for k in c.keywords)])
    ]
    return [f"{ast.unparse(c)} does not pass SOLUTIONS" for c in wrong]


@rule
def imports_only_from_the_course(nb: NotebookNode, path: Path) -> list[str]:
    problems = []
    written = {m for c in code_cells(nb) for m in re.findall(r"^%%writefile (\w+)\.py$", c.source, re.MULTILINE)}
    for node in (n for c in code_cells(nb) for n in ast.walk(parsed(c))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        allowed = IMPORTS | MORE_IMPORTS.get(path.stem, set()) | written
        problems += [f"imports {m}" for m in modules if m.partition(".")[0] not in allowed]
    return problems


@rule
def outputs_are_committed(nb: NotebookNode, path: Path) -> list[str]:
    counts = [c.execution_count for c in code_cells(nb)]
    if None in counts:
        return [f"{counts.count(None)} code cells have not been run"]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"not run once, top to bottom: {counts}"]


@rule
def no_error_outputs(nb: NotebookNode, path: Path) -> list[str]:
    outputs = [o for c in code_cells(nb) for o in c.outputs]
    return [f"error output: {o.ename}: {o.evalue}"[:120] for o in outputs if o.output_type == "error"]


@rule
def no_shell_escapes(nb: NotebookNode, path: Path) -> list[str]:
    shell = r"^\s*(?:!|%%?(?:bash|sh|script|sx|system|!)\b)|\bos\.system\(|\bget_ipython\(\)\.system|=\s*!"
    lines = [line for c in code_cells(nb) for line in c.source.splitlines()]
    return [f"shell escape: {line.strip()}" for line in lines if re.search(shell, line)]


@rule
def is_small(nb: NotebookNode, path: Path) -> list[str]:
    size = path.stat().st_size
    return [] if size < SIZE_LIMIT_BYTES else [f"{size:,} bytes; the limit is {SIZE_LIMIT_BYTES:,}"]


@rule
def cells_have_unique_ids(nb: NotebookNode, path: Path) -> list[str]:
    ids = [c.get("id") for c in json.loads(path.read_text())["cells"]]  # nbformat mends ids as it reads
    return [f"cell id {i!r} is missing or not unique" for i in dict.fromkeys(ids) if not i or ids.count(i) > 1]


@rule
def kernel_is_python3(nb: NotebookNode, path: Path) -> list[str]:
    name = nb.metadata.get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"kernelspec is {name!r}, not 'python3'"]


SHOWS_A_MACHINE = {
    "a date": r"\b(?:19|20)\d\d-[01]\d-[0-3]\d\b|\b[0-3]?\d[./][01]?\d[./](?:19|20)\d\d\b"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* [0-3]?\d\b",
    "a time of day": r"\b[0-2]\d:[0-5]\d\b",
    "a number measured here": r"\bmeasured here\b",
    "a build of torch": r"\btorch \d|\+(?:cpu|cu\d+|rocm[\d.]+)\b",
}


@rule
def strict_outputs_show_no_machine(nb: NotebookNode, path: Path) -> list[str]:
    """What nbval compares must be the same on any machine and day. Recorded runs are files of this repository."""
    here = nb.metadata.get("course_run", {})
    named = {"this processor": here.get("cpu"), "this Python": here.get("python"), "this torch": here.get("torch")}
    named |= {f"GPU {n} of this machine": name for n, name in enumerate(here.get("gpus", []))}
    shows = SHOWS_A_MACHINE | {what: re.escape(name) for what, name in named.items() if name}
    problems = []
    for cell in code_cells(nb):
        if "nbval-ignore-output" in tags(cell):
            continue
        where = f"cell {cell.get('id')} is compared by nbval, and"
        problems += [
            f"{where} its picture has no title that says where its numbers come from"
            for picture in pictures(cell)
            if not picture.title
        ]
        given = r"data:image/png;base64,[\w+/=]+|\brecorded on [^;\"']*"
        text = re.sub(given, "", "\n".join(map(str, cell.outputs)), flags=re.IGNORECASE)
        problems += [f"{where} shows {what}: {m[0]!r}" for what, form in shows.items() if (m := re.search(form, text))]
    return problems


@rule
def no_cell_may_fail_or_be_skipped(nb: NotebookNode, path: Path) -> list[str]:
    banned = {"raises-exception", "nbval-skip", "nbval-raises-exception", "skip-execution"}
    tagged = [f"cell {c.get('id')} is tagged {t}" for c in nb.cells for t in tags(c) if t in banned]
    comment = r"#\s*(NBVAL_(SKIP|RAISES_EXCEPTION)|PYTEST_VALIDATE_IGNORE_OUTPUT)"
    return tagged + [f"cell {c.get('id')} has an nbval comment" for c in code_cells(nb) if re.search(comment, c.source)]


@rule
def pictures_have_alt_text(nb: NotebookNode, path: Path) -> list[str]:
    found = [(c.get("id"), p.alt) for c in code_cells(nb) for p in pictures(c)]
    found += [("markdown", alt) for alt in re.findall(r"!\[([^]]*)\]\(", markdown(nb))]
    problems = [f"a picture of cell {where} has no alt text of use: {alt!r}" for where, alt in found if len(alt) < 10]
    html = ["".join(o.get("data", {}).get("text/html", "")) for c in code_cells(nb) for o in c.outputs]
    bare = [svg for text in html for svg in re.findall(r"<svg\b.*?</svg>", text, re.DOTALL)]
    return problems + ["an inline SVG has no <title>" for svg in bare if not re.search(r"<title>\w|aria-label=", svg)]


@rule
def no_path_of_one_machine(nb: NotebookNode, path: Path) -> list[str]:
    outputs = [str(dict(o)) for c in code_cells(nb) for o in c.outputs]
    text = re.sub(r"""data:[\w/+;,-]+[^"'\s)]*""", "", "\n".join([c.source for c in nb.cells] + outputs))
    system = r"(?:sys|proc|dev|etc|usr)/"
    found = re.findall(rf"(?<![\w<.:/)\]}}~-])/(?!{system})(?:[\w.-]+/)+[\w.-]+", text)
    found += re.findall(r"\b[A-Z]:\\+Users\\+\w+", text)
    return [f"path of one machine: {p}" for p in dict.fromkeys(found)]


@rule
def links_resolve(nb: NotebookNode, path: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", markdown(nb)) + re.findall(r'(?:href|src)="([^"]+)"', markdown(nb))
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#|attachment:", t)]
    return [f"broken link: {t}" for t in local if t and not (path.parent / t).exists()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_keeps_all_rules(path):
    notebook = nbformat.read(path, as_version=4)
    problems = [f"{name}: {problem}" for name, rule in RULES.items() for problem in rule(notebook, path)]
    assert not problems, "\n".join(problems)
