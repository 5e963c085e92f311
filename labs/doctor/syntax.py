"""A script and what it imports from its own folder, as syntax trees: which name means what, and who calls whom.

Nothing is imported or run. A name is followed through `import ... as`, assignments, arguments of callers and what own
functions return. Where that ends, nothing is known, and a rule has to be silent.
"""

from __future__ import annotations

import ast
import io
import os
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MOST_FILES = 80
"""Of a script's own folder; the others are not read."""
MOST_BYTES = 2_000_000
"""Of a file."""
ENOUGH_BYTES = 1_000_000
"""Of all files together: those that would come after are not read, for some seconds are enough."""
DEPTH = 6
"""So far is a name followed."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


class Unreadable(Exception):
    """`line` and the reason."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(reason)
        self.path, self.line = path, line


class File:
    """One source file. Each node of its tree has `parent` (None at the top) and `file`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size > MOST_BYTES:
                raise Unreadable(path, 0, f"more than {MOST_BYTES / 1e6:g} MB")
            raw = path.read_bytes()
            self.tree = ast.parse(raw)
            self.text = io.TextIOWrapper(io.BytesIO(raw), tokenize.detect_encoding(io.BytesIO(raw).readline)[0]).read()
        except SyntaxError as e:
            raise Unreadable(path, e.lineno or 0, e.msg) from None
        except (OSError, ValueError, RecursionError, MemoryError) as e:
            raise Unreadable(path, 0, getattr(e, "strerror", None) or str(e) or type(e).__name__) from None
        self.lines = self.text.split("\n")
        self.starts = [0]
        """Offset of each line in the text, and that of its end."""
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.nodes: list[ast.AST] = []
        self.tree.parent = None
        self.nodes.append(self.tree)
        for node in self.nodes:  # grows
            node.file = self
            for child in ast.iter_child_nodes(node):
                child.parent = node
                self.nodes.append(child)
        self.names: dict[str, list[str]] = defaultdict(list)
        """By local name: what it was imported as, in full ("torch.cuda.amp.autocast")."""
        self.imported: list[tuple[str, str]] = []
        """Local name and full name: of `import a.b` both ("a", "a") and ("a.b", "a.b")."""
        self.own: dict[str, tuple[File, str]] = {}
        """By local name: of an own file, "" for the file itself."""
        self.assigned: dict[tuple[ast.AST | None, str], list[tuple[ast.expr, int | None]]] = defaultdict(list)
        """By scope and target ("x", "self.x"): values; the number of an element, if a call's result is unpacked."""
        self.defined: dict[tuple[ast.AST, str], Function | ast.ClassDef] = {}
        for node in self.nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, Function | ast.ClassDef):
            self.defined[scope(node.parent) or self.tree, node.name] = node
        elif isinstance(node, ast.Import):
            for a in node.names:
                top = a.name.partition(".")[0]
                self._import(a.asname or top, a.name if a.asname else top)
                if not a.asname:
                    self.imported.append((a.name, a.name))
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            for a in node.names:
                self._import(a.asname or a.name, base + a.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value)
        elif isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr)):
            self._assign(node.target, node.value)  # state |= {...} too
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr)

    def _import(self, local: str, full: str) -> None:
        self.names[local].append(full)
        self.imported.append((local, full))

    def _assign(self, target: ast.AST, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for i, part in enumerate(target.elts):
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                    self._assign(part, value.elts[i])
                elif isinstance(value, ast.Call) and (text := dotted(part)):
                    self.assigned[self._scope_of(part, text), text].append((value, i))
        elif text := dotted(target):
            self.assigned[self._scope_of(target, text), text].append((value, None))

    def _scope_of(self, node: ast.AST, text: str) -> ast.AST | None:
        return class_of(node) if text.startswith("self.") else function_of(node)


def above(node: ast.AST) -> Iterator[ast.AST]:
    """Parents, nearest first."""
    while (node := node.parent) is not None:
        yield node


def scope(node: ast.AST | None) -> ast.AST | None:
    """The nearest function or class from `node` on."""
    while node is not None and not isinstance(node, Function | ast.ClassDef):
        node = node.parent
    return node


def function_of(node: ast.AST) -> Function | None:
    """That it stands in."""
    return next((n for n in above(node) if isinstance(n, Function)), None)


def class_of(node: ast.AST) -> ast.ClassDef | None:
    """That it stands in."""
    return next((n for n in above(node) if isinstance(n, ast.ClassDef)), None)


def statement_of(node: ast.AST) -> ast.stmt:
    """That it is a part of."""
    while not isinstance(node, ast.stmt):
        node = node.parent
    return node


def dotted(node: ast.AST | None) -> str:
    """ "self.model.module" of names and attributes; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def last(text: str) -> str:
    """ "optimizer" of "self.optimizer"."""
    return text.rpartition(".")[2]


def method(call: ast.Call) -> str:
    """ "step" of `optimizer.step()`, "print" of `print()`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by its name, or by its position."""
    for k in call.keywords:
        if k.arg == name:
            return k.value
    if position is not None and position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return None


def open_ended(call: ast.Call) -> bool:
    """Whether there are `**options`, which may hold anything."""
    return any(k.arg is None for k in call.keywords)


def constant(node: ast.AST | None) -> object:
    """A literal's value; None of anything else."""
    return node.value if isinstance(node, ast.Constant) else None


class Program:
    """The script first, then what it imports from its own folder."""

    def __init__(self, script: Path) -> None:
        self.root = script.resolve().parent
        self.problems: list[Unreadable] = []
        self.files: list[File] = []
        self.left_out = 0
        """Files that are not looked at, for there are too many."""
        self._read: dict[Path, File | None] = {}
        self._torch: dict[ast.AST, frozenset[str]] = {}
        self._full: dict[ast.AST, list[str]] = {}
        self._made_from: dict[ast.AST, list[ast.ClassDef]] | None = None
        self._returned: dict[Function, list[ast.expr]] = {}
        self._load(Path(os.path.abspath(script)))
        for file in self.files:  # grows
            self._imports(file)
        self.calls = [n for f in self.files for n in f.nodes if isinstance(n, ast.Call)]
        self.methods = {name for f in self.files for owner, name in f.defined if isinstance(owner, ast.ClassDef)}
        self._by_method: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            self._by_method[method(call)].append(call)
        self.callers: dict[Function, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            for function in self.targets(call):
                self.callers[function].append(call)
            for given in call.args:  # mp.spawn(work, ...), Thread(target=work)
                if isinstance(given, ast.Name) and isinstance(found := self.definition(given), Function):
                    self.callers[found].append(call)

    # Reading

    def _load(self, path: Path) -> File | None:
        key = path.resolve()
        if key in self._read:
            return self._read[key]
        self._read[key] = None
        if len(self.files) >= MOST_FILES or sum(len(f.text) for f in self.files) > ENOUGH_BYTES:
            self.left_out += 1
            return None
        try:
            self._read[key] = File(path)
            self.files.append(self._read[key])
        except Unreadable as e:
            self.problems.append(e)
        return self._read[key]

    def _imports(self, file: File) -> None:
        folders = file.path.resolve().parents
        for local, full in file.imported:
            dots = len(full) - len(full.lstrip("."))
            base = self.root if not dots else folders[dots - 1] if dots <= len(folders) else None
            if base is not None and (found := self._own(base, full.lstrip(".").split("."))) is not None:
                file.own[local] = found

    def _own(self, base: Path, parts: list[str]) -> tuple[File, str] | None:
        """The file that these names lead to, and what is left of them."""
        if not (base / parts[0]).is_dir() and not (base / f"{parts[0]}.py").is_file():
            return None
        if not base.is_relative_to(self.root):
            return None
        for n in range(len(parts), 0, -1):
            place = base.joinpath(*parts[:n])
            for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
                if path.is_file() and (file := self._load(path)) is not None:
                    return file, ".".join(parts[n:])
        return None

    # Names

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        """Of all files."""
        return (n for f in self.files for n in f.nodes if isinstance(n, kinds))

    def named(self, *names: str) -> list[ast.Call]:
        """Calls whose last name is one of these, in order of their place."""
        return [c for name in names for c in self._by_method.get(name, ())]

    def full(self, node: ast.AST) -> list[str]:
        """What a name means in full: "torch.cuda.amp.autocast" for `amp.autocast`. Several, if it is imported twice."""
        if node not in self._full:
            self._full[node] = self._in_full(node, DEPTH)
        return self._full[node]

    def _in_full(self, node: ast.AST, depth: int) -> list[str]:
        text = dotted(node)
        if not text or not depth:
            return []
        head, _, rest = text.partition(".")
        names = [".".join(filter(None, (n, rest))) for n in node.file.names.get(head, ())]
        if not names and isinstance(node, ast.Name):  # autocast = torch.cuda.amp.autocast
            found = [v for v, i in node.file.assigned.get((None, text), ()) if i is None and dotted(v)]
            names = [n for v in found if dotted(v) != text for n in self._in_full(v, depth - 1)]
        return names or [text]

    def torch_names(self, node: ast.AST) -> frozenset[str]:
        """What a name is torch's by its last part, or an own class that is made from it: {"DistributedSampler"}."""
        if node not in self._torch:
            self._torch[node] = frozenset()  # a class that is its own base ends here
            names = {last(n) for n in self.full(node) if n.startswith("torch.")}
            found = self.definition(node)
            bases = found.bases if isinstance(found, ast.ClassDef) else []
            self._torch[node] = frozenset(names.union(*(self.torch_names(base) for base in bases)))
        return self._torch[node]

    def is_torch(self, node: ast.AST, *names: str) -> bool:
        """Whether it is one of these of torch."""
        return not self.torch_names(node).isdisjoint(names)

    def torch_calls(self, *names: str) -> list[ast.Call]:
        """Calls of these functions or classes of torch."""
        return [c for c in self.calls if not self.torch_names(c.func).isdisjoint(names)]

    def imports(self, *packages: str) -> bool:
        """Whether any of these is imported."""
        tops = {n.partition(".")[0] for f in self.files for ns in f.names.values() for n in ns}
        return not tops.isdisjoint(packages)

    def mentions(self, *names: str) -> bool:
        """Whether any of these is a name, an attribute or a keyword anywhere."""
        return not self.words.isdisjoint(names)

    @property
    def words(self) -> set[str]:
        """All names, attributes and keywords."""
        if not hasattr(self, "_words"):
            self._words = {n.attr for n in self.nodes(ast.Attribute)} | {n.id for n in self.nodes(ast.Name)}
            self._words |= {n.arg for n in self.nodes(ast.keyword) if n.arg}
            self._words |= {last(name) for f in self.files for names in f.names.values() for name in names}
        return self._words

    # Who calls whom

    def definition(self, node: ast.AST, depth: int = DEPTH) -> Function | ast.ClassDef | None:
        """The own function or class that a name, `self.name` or `module.name` stands for."""
        text = dotted(node)
        if not text or not depth:
            return None
        file: File = node.file
        head, _, rest = text.partition(".")
        if not rest:
            place = node
            while place is not None:
                if (place, text) in file.defined:
                    return file.defined[place, text]
                place = place.parent
        if head in ("self", "cls") and rest and "." not in rest:
            owner = class_of(node)
            return self._method(owner, rest) or next(
                (m for c in self._heirs(owner) if (m := self._method(c, rest))), None
            )
        return self._imported(file, text, depth)

    def _imported(self, file: File, text: str, depth: int) -> Function | ast.ClassDef | None:
        """What a file has a name for by its imports, those of a package's __init__ included. "a.b.f" may be f of a.b"""
        parts = text.split(".")
        for n in range(len(parts), 0, -1) if depth else ():
            if (head := ".".join(parts[:n])) in file.own:
                other, name = file.own[head]
                name = ".".join(filter(None, (name, *parts[n:])))
                return other.defined.get((other.tree, name)) or self._imported(other, name, depth - 1)
        return None

    def _method(self, owner: ast.AST | None, name: str, depth: int = DEPTH) -> Function | None:
        if not isinstance(owner, ast.ClassDef) or not depth:
            return None
        found = owner.file.defined.get((owner, name))
        if isinstance(found, Function):
            return found
        return next((m for b in owner.bases if (m := self._method(self.definition(b), name, depth - 1))), None)

    def _heirs(self, owner: ast.ClassDef | None) -> list[ast.ClassDef]:
        """Own classes that are made from this one."""
        if self._made_from is None:
            self._made_from = defaultdict(list)
            for node in (n for f in self.files for n in f.defined.values() if isinstance(n, ast.ClassDef)):
                for base in node.bases:
                    if isinstance(found := self.definition(base), ast.ClassDef) and found is not node:
                        self._made_from[found].append(node)
        return self._made_from.get(owner, [])

    def targets(self, call: ast.Call) -> list[Function]:
        """Own functions that a call may lead to."""
        found = self.definition(call.func)
        if isinstance(found, ast.ClassDef):
            found = self._method(found, "__init__")
        if found is not None:
            return [found]
        if isinstance(call.func, ast.Attribute):
            if call.func.attr not in self.methods:
                return []
            base, name = call.func.value, call.func.attr
        else:  # an instance that is called
            base, name = call.func, "__call__"
        owners = [self.definition(o.func) for o in self.origins(base, 4) if isinstance(o, ast.Call) and o is not call]
        return list(dict.fromkeys(m for owner in owners if (m := self._method(owner, name))))

    def origins(self, node: ast.AST | None, depth: int = DEPTH) -> list[ast.expr]:
        """Expressions that it may stand for, itself first."""
        if node is None or not depth:
            return []
        if isinstance(node, ast.IfExp):
            return [node, *self.origins(node.body, depth - 1), *self.origins(node.orelse, depth - 1)]
        if isinstance(node, ast.BoolOp):
            return [node, *(o for v in node.values for o in self.origins(v, depth - 1))]
        found: list[ast.expr] = [node]
        if isinstance(node, ast.Call):
            definition = self.definition(node.func)
            if isinstance(definition, Function):
                found += [o for r in self.returned(definition) for o in self.origins(r, depth - 1)]
        elif text := dotted(node):
            for value, element in self._values(node, text):
                if element is None:
                    found += self.origins(value, depth - 1) if value is not node else []
                elif isinstance(definition := self.definition(value.func), Function):
                    parts = [r.elts for r in self.returned(definition) if isinstance(r, ast.Tuple)]
                    found += [o for p in parts if element < len(p) for o in self.origins(p[element], depth - 1)]
            if isinstance(node, ast.Name) and len(found) == 1:
                found += self._given(node, depth)
        return found

    def behind(self, node: ast.AST | None, depth: int = 4) -> str:
        """The text of an expression and of all that its names were made from, to look for a word in."""
        found: dict[ast.AST, None] = {}
        newest = self.origins(node, depth) if node is not None else []
        while newest and depth:
            found |= dict.fromkeys(newest)
            names = (n for o in newest for n in ast.walk(o) if isinstance(n, ast.Name | ast.Attribute) and dotted(n))
            newest = [o for n in names for o in self.origins(n, 3) if o not in found]
            depth -= 1
        return " ".join(ast.unparse(o) for o in found)

    def returned(self, function: Function) -> list[ast.expr]:
        """What it returns."""
        if function not in self._returned:
            found = (n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None)
            self._returned[function] = [n.value for n in found if function_of(n) is function]
        return self._returned[function]

    def _values(self, node: ast.AST, text: str) -> list[tuple[ast.expr, int | None]]:
        assigned = node.file.assigned
        if text.startswith("self."):
            return assigned.get((class_of(node), text), [])
        place = function_of(node)
        while True:
            if (place, text) in assigned:
                return assigned[place, text]
            if place is None:
                return []
            if text.partition(".")[0] in parameters(place):
                return []
            place = function_of(place)

    def _given(self, node: ast.Name, depth: int) -> list[ast.expr]:
        """What callers give for this parameter."""
        function = function_of(node)
        while function is not None and node.id not in parameters(function):
            function = function_of(function)
        if function is None:
            return []
        found = []
        for call in self.callers.get(function, ()) if hasattr(self, "callers") else ():
            value = arguments(function, call).get(node.id)
            found += self.origins(value, depth - 1) if value is not None else []
        return found


def parameters(function: Function) -> list[str]:
    """Names, `self` included."""
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def arguments(function: Function, call: ast.Call) -> dict[str, ast.expr]:
    """By parameter: what a call gives for it."""
    names = parameters(function)
    if names and names[0] in ("self", "cls") and isinstance(function.parent, ast.ClassDef):
        names = names[1:]
    given = {k.arg: k.value for k in call.keywords if k.arg}
    if not any(isinstance(a, ast.Starred) for a in call.args):
        given |= dict(zip(names, call.args, strict=False))
    return given
