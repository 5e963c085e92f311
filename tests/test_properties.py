"""Whatever is in a record file or on a command line: a value that is right, or one line that says what is wrong."""

import contextlib
import dataclasses
import importlib
import io
import math
import os
import re
import tempfile
import types
import typing
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from junk import damaged, nothing_starts, values

import labs
from labs.kit import cli
from labs.kit.errors import BadInput
from labs.kit.lab import make_config
from labs.kit.record import COLUMNS, KINDS, Record, Records, load, write_atomic

# Records

cases = st.dictionaries(st.text(max_size=4).filter(lambda key: key not in COLUMNS), values, max_size=3)
records = st.builds(
    Record,
    lab=st.text(max_size=4),
    metric=st.text(max_size=4),
    unit=st.text(max_size=4),
    samples=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    case=cases,
    config=cases,
    layout=cases,
    provenance=cases,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("records") / "run.jsonl"


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=4))
def test_all_that_can_be_recorded_is_loaded_as_it_was_saved(file, some):
    loaded = load(Records(some).save(file))
    as_recorded = [dataclasses.replace(r, kind="recorded" if r.kind == "measured" else r.kind) for r in some]
    assert repr(list(loaded)) == repr(as_recorded), "repr tells -0.0 from 0.0, and holds the provenance"


junk = st.one_of(
    values,
    st.floats(),
    st.integers(10**300, 10**310),
    st.binary(max_size=3),
    st.just("\ud800"),
    st.just(object()),
    st.just([[]] * 3),
    st.dictionaries(st.integers() | st.just("value"), st.floats(), max_size=2),
)


GOOD = [
    Record(
        "a",
        f"m{k}",
        "s",
        (k + 0.5, 2.0**k),
        case={"k": k, "deep": {"x": [1]}},
        config={"n": 3},
        layout={"rank": None},
        provenance={"cpu": f"cpu {k // 2}"},
    )
    for k in range(4)
]
LINES = [line.rstrip("\n").encode() for line in Records(GOOD).lines()]
EXPECTED = dict(zip([n for n in LINES if b"provenance" not in n], GOOD, strict=True))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_one_clear_line_and_never_another_number(file, data):
    content = damaged(data.draw, LINES)
    file.write_bytes(content)
    try:
        loaded = load(file)
    except ValueError as e:
        assert re.match(rf"{re.escape(str(file))}(, line \d+[,:]|: holds no records$)", str(e)), str(e)
        assert len(str(e)) < 600 and str(e).isprintable()
        return
    rows = [line for line in content.splitlines() if not line.startswith(b'{"provenance"')]
    for line, record in zip(rows, loaded, strict=True):
        if line in EXPECTED:
            assert (record.metric, record.samples) == (EXPECTED[line].metric, EXPECTED[line].samples)
    assert repr(list(load(loaded.save(file)))) == repr(list(loaded))
    loaded._repr_html_().encode()


@settings(max_examples=60)
@given(
    old=st.none() | st.text(),
    new=st.text() | st.just("half \ud800"),
    name=st.sampled_from(["a", "x" * 255, "é" * 127, "a\nb", "a\udcff"]),
    fault=st.sampled_from([None, "os.fsync", "os.replace"]),
    error=st.sampled_from([OSError, KeyboardInterrupt]),
)
def test_a_write_leaves_the_old_text_or_the_new_and_nothing_else(old, new, name, fault, error):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if old is not None:
            path.write_bytes(old.encode())
        with mock.patch(fault, side_effect=error) if fault else contextlib.nullcontext():
            try:
                write_atomic(path, new)
                expected = new
            except (error, UnicodeEncodeError):
                assert fault or new == "half \ud800"
                expected = old
        there = [] if expected is None else [os.fsencode(name)]  # a name need not be text in this locale
        assert os.listdir(os.fsencode(folder)) == there
        assert expected is None or path.read_bytes() == expected.encode()


# Parameters


def _configs() -> list[types.ModuleType]:
    """All modules of labs with a Config that has a default for everything."""
    files = [p for p in Path(labs.__path__[0]).rglob("*.py") if "\nclass Config" in p.read_text()]
    names = sorted(".".join(["labs", *p.relative_to(labs.__path__[0]).with_suffix("").parts]) for p in files)
    found = [importlib.import_module(name) for name in names]
    return [m for m in found if not any(_is_required(f) for f in dataclasses.fields(m.Config))]


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


CONFIGS = _configs()
word = st.sampled_from(["", "a", "a b", "a\nb", "ü", "os:path", ":", "0", "nan", "[]", "'", "x" * 300])
path = st.sampled_from([".", "/tmp", "/no/folder", "/dev/null", "/dev/null/x", "x" * 300, "a\nb"]).map(Path)
PLAIN = {
    int: st.sampled_from([0, -1, 1, 2, 3, 7, 64, 10**6, 2**31, 2**63, -(2**63), 10**30, 10**400]) | st.integers(),
    float: st.sampled_from([0.0, -1.0, 1e-3, 1e300, 5e-324, math.inf, -math.inf, math.nan]) | st.floats(),
    str: word,
    bool: st.booleans(),
    Path: path,
    type(None): st.none(),
}


def _of_type(hint: object) -> st.SearchStrategy:
    """Values of a field with this type, sensible or not; words that no Literal has, too."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if kind is typing.Literal:
        return st.sampled_from([*inner, "fsdp2"])
    if kind is tuple and inner[-1] is ...:
        return st.lists(_of_type(inner[0]), max_size=4).map(tuple)
    return st.tuples(*map(_of_type, inner)) if kind is tuple else st.one_of(*map(_of_type, inner))


@st.composite
def parameters(draw) -> tuple[types.ModuleType, dict]:
    """A module with a Config, and values for one or two of its fields."""
    module = draw(st.sampled_from(CONFIGS))
    hints = typing.get_type_hints(module.Config)
    names = draw(st.lists(st.sampled_from(sorted(hints)), min_size=1, max_size=2, unique=True))
    return module, {name: draw(_of_type(hints[name])) for name in names}


def _as_arguments(given: dict) -> list[str]:
    words = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, tuple):
            flat = [str(x) for item in value for x in (item if isinstance(item, tuple) else (item,))]
            words += [option, *flat]
        else:
            words.append(f"{option}={value}")
    return words


def _by_call(module: types.ModuleType, given: dict) -> str:
    """What make_config makes of it: the Config, or the one line."""
    try:
        return repr(make_config(module, given))
    except BadInput as e:
        return _one_line(str(e), module)


def _by_shell(module: types.ModuleType, given: dict) -> str:
    """The same of the command line."""
    complaint, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(shown):
            if hasattr(module, "run"):
                return repr(cli.parse(module, "prog", _as_arguments(given)).config)
            return repr(cli.parse_config(module.Config, module.__doc__, "prog", _as_arguments(given)))
    except SystemExit as e:
        assert e.code == 2 and not shown.getvalue()
        return _one_line(complaint.getvalue().removesuffix("\n"), module)


def _one_line(text: str, module: types.ModuleType) -> str:
    assert text and "\n" not in text, text
    names = [f.name for f in dataclasses.fields(module.Config)]
    assert any(name in text.lower().replace("-", "_") for name in names), text
    return "refused"


AUTOCAST, STRATEGY, STATES = (
    importlib.import_module(f"labs.{n}") for n in ("autocast_ops", "strategy", "training_checkpoint")
)


@pytest.mark.long
@settings(max_examples=150)
@given(parameters())
@example((AUTOCAST, {"precisions": ("bf16", "fp64")}))
@example((STRATEGY, {"layers": 10**400}))
@example((STRATEGY, {"memory_gb": -math.inf}))
@example((STATES, {"folder": Path("x" * 300)}))
@example((STATES, {"folder": Path("a\nb")}))
def test_the_shell_and_a_call_judge_parameters_alike(chosen):
    with nothing_starts():
        assert _by_call(*chosen) == _by_shell(*chosen)
