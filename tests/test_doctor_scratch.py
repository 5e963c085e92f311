"""The doctor's scratch folder: a script sees what it writes as if it had written it, and its folder stays as it was."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import MARK, assert_no_survivors, new_environment

pytestmark = pytest.mark.timeout(250)

PRELUDE = """
import sys
from labs.doctor import scratch
told = []
if len(sys.argv) > 1:
    scratch.install(sys.argv[1], told.append)
"""


def state(folder: Path) -> dict[str, tuple]:
    """Of all that is in a folder: mode, time of the last change, contents."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        s = path.lstat()
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (s.st_mode, s.st_mtime_ns, what)
    return found


@pytest.fixture
def both(tmp_path):
    """Run a program in a folder as it is, and in an equal one with a scratch folder; what each printed."""

    def run(code: str, files: dict[str, str]) -> tuple[str, str]:
        (tmp_path / "program.py").write_text(PRELUDE + textwrap.dedent(code))
        printed = []
        for name in ("true", "scratch"):
            folder = tmp_path / name / "work"
            folder.mkdir(parents=True)
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            before = state(folder)
            (tmp_path / name / "run" / "tmp").mkdir(parents=True)
            env = new_environment(TMPDIR=str(tmp_path / name / "run" / "tmp"), OMP_NUM_THREADS="1")
            to = [str(tmp_path / name / "run" / "scratch")] if name == "scratch" else []
            done = subprocess.run(
                [sys.executable, "-B", tmp_path / "program.py", *to],
                cwd=folder,
                env=env,
                text=True,
                capture_output=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert_no_survivors(env[MARK])
            if name == "scratch":
                assert state(folder) == before
            else:
                assert state(folder) != before, "the program changes nothing: this test would say nothing"
            printed.append(done.stdout.replace(str(folder), "WORK"))
        return printed[0], printed[1]

    return run


RANDOM = """
import errno, os, random, shutil, stat, tempfile
from os import replace as replace_it  # taken before
draw = random.Random({seed})
shutil._use_fd_functions = False  # its two ways to remove a tree say different things of a link
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # of links in a circle, or a file as a folder: any of them
NAMES = ["a", "b", "data/x", "data/y", "data", "out", "out/deep", "out/deep/f", "link", "data/sub", "data/sub/z"]

def name():
    found = draw.choice(NAMES)
    found = os.path.abspath(found) if draw.random() < 0.2 else found
    found = os.path.join(os.path.dirname(found), ".", os.path.basename(found)) if draw.random() < 0.1 else found
    asked.append(found)
    return found

def write(mode):
    with open(name(), mode) as file:
        file.write(draw.choice("123") * 3)
        return file.tell()

def read():
    with open(name()) as file:
        return file.read()

def kinds():
    with os.scandir(name()) as entries:
        return sorted((e.name, e.path, e.is_dir(), e.is_file(), e.is_symlink()) for e in entries)

def looked():
    found = os.stat(name(), follow_symlinks=draw.random() < 0.5)
    return stat.S_IFMT(found.st_mode), found.st_size if stat.S_ISREG(found.st_mode) else 0

def low_level():
    flags = draw.choice([os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                         os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND])
    fd = os.open(name(), flags)
    try:
        return os.write(fd, b"low") if flags else os.read(fd, 9)
    finally:
        os.close(fd)

def saved_atomically():
    folder = draw.choice([".", "data", "out"])
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write("whole")
    try:
        os.replace(file.name, name())
    except OSError:
        os.unlink(file.name)
        raise

def moved():
    old = name()
    return os.path.relpath(shutil.move(old, name()) or ".")

OPERATIONS = [
    lambda: write("w"), lambda: write("a"), lambda: write("x"), lambda: write("r+"), read, read, kinds, looked, looked,
    low_level, saved_atomically, moved,
    lambda: os.mkdir(name()), lambda: os.makedirs(name(), exist_ok=draw.random() < 0.5), lambda: os.rmdir(name()),
    lambda: os.unlink(name()), lambda: os.remove(name()), lambda: os.rename(name(), name()),
    lambda: replace_it(name(), name()), lambda: sorted(os.listdir(name())), lambda: os.path.exists(name()),
    lambda: os.path.isdir(name()), lambda: os.access(name(), os.R_OK), lambda: os.symlink(draw.choice(NAMES), name()),
    lambda: os.readlink(name()), lambda: os.path.realpath(name()), lambda: shutil.rmtree(name()),
    lambda: shutil.copy(name(), name()) and None, lambda: os.truncate(name(), 2),
    lambda: os.chmod(name(), 0o640), lambda: os.utime(name(), (1, 1)),
]
for number in range(400):
    if not os.path.isdir("data") and draw.random() < 0.3:
        os.path.lexists("data") or os.makedirs("data/sub")
    asked, which = [], draw.randrange(len(OPERATIONS))
    try:
        said = OPERATIONS[which]()
    except (OSError, shutil.Error) as e:
        said = "not there" if getattr(e, "errno", 0) in NOT_THERE else type(e).__name__
    print(number, which, asked, said)
for folder, folders, files in sorted(os.walk(".")):
    for file in sorted(files):
        path = os.path.join(folder, file)
        print(path, oct(os.lstat(path).st_mode), open(path).read() if os.path.isfile(path) else "-")
    print(folder, sorted(folders))
"""
FILES = {"a": "first", "data/x": "ex", "data/y": "why", "data/sub/z": "zed"}


def test_any_program_sees_what_it_would_see_and_changes_nothing(both):
    true, with_scratch = both(RANDOM.replace("{seed}", "0"), FILES)
    for ours, theirs in zip(with_scratch.splitlines(), true.splitlines(), strict=True):
        assert ours == theirs


def test_programs_that_the_script_starts_are_told(both):
    code = """
    import os, subprocess
    print("-", told)
    open("x", "w").close()
    subprocess.run([sys.executable, "-c", "pass"]); subprocess.run("true | true", shell=True); os.system("true")
    subprocess.run([sys.executable, "-c", "pass"])
    print([words.split(")")[0].split("(")[1][:6] for words in told])
    """
    true, with_scratch = both(code, {})
    assert true == "- []\n[]\n" and with_scratch == "- []\n['python', 'true']\n"


SAVES = """
import io, os, types
import torch
from labs.doctor import scratch_room
scratch.install(sys.argv[2], told.append, (os.getcwd(),))
state = {"model": torch.ones(100), "more": [torch.ones(50), (torch.ones(10),)]}
state["again"], state["itself"] = state["model"][:7], state
print(scratch_room.nbytes(state), scratch_room.nbytes([torch.nn.Linear(3, 2), 5, torch.eye(2).to_sparse(), state]))
torch.save(state, "small.pt")
print(len(told))
device = scratch_room._device
scratch_room._device = lambda path: device(path) + path.startswith(os.getcwd())
for _ in range(2):
    torch.save(obj=state, f="small.pt")
torch.save(state, os.environ["TMPDIR"] + "/mine.pt")
print(len(told), told[0].replace(os.getcwd(), "WORK"))
scratch_room.true.statvfs = lambda path: types.SimpleNamespace(f_bavail=6, f_frsize=100)
torch.save(state, io.BytesIO()); torch.save(state, "small.pt")  # one that replaces another
torch.save(state, os.environ["TMPDIR"] + "/mine.pt")
for to in ("large.pt", open("opened.pt", "wb")):
    try:
        torch.save(state, to)
    except OSError as e:
        print(e.errno, e.strerror)
print(os.path.exists("large.pt"))
"""


def test_a_save_that_does_not_fit_is_refused_and_one_to_another_disk_is_told(tmp_path):
    work, run = tmp_path / "work", tmp_path / "run"
    for folder in (work, run / "t"):
        folder.mkdir(parents=True)
    code = PRELUDE.replace("len(sys.argv) > 1", "False") + SAVES
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, "", run / "scratch"],
        cwd=work,
        text=True,
        env=new_environment(TMPDIR=str(run / "t")),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    sizes, none, told, *refused, there = done.stdout.splitlines()
    assert (sizes, none, there) == ("640 672", "0", "False") and list(work.iterdir()) == []
    assert told.startswith("1 what saving costs on the script's own disk") and "than that of WORK" in told
    said = (
        f"{errno.ENOSPC} the doctor's scratch folder in {tmp_path} has room for 6e-07 GB, and this save takes "
        "6.4e-07 GB: --let-it-write saves where the script wants it"
    )
    assert refused == [said, said]
