"""The doctor's scratch folder: a script sees what it writes as if it had written it, and its folder stays as it was."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import MARK, assert_no_survivors, new_environment

from labs.doctor import scratch, scratch_room, true_files

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


@pytest.mark.parametrize("seed", range(3))
def test_any_program_sees_what_it_would_see_and_changes_nothing(both, seed):
    true, with_scratch = both(RANDOM.replace("{seed}", str(seed)), FILES)
    for ours, theirs in zip(with_scratch.splitlines(), true.splitlines(), strict=True):
        assert ours == theirs


LIBRARIES = """
import logging, multiprocessing, os, shutil, sqlite3, subprocess, sys, zipfile
from pathlib import Path
import numpy as np
import torch

def child(path):
    with open(path, "a") as file:
        file.write("child")

if __name__ == "__main__":
    os.makedirs("out/deep")
    os.chdir("out/deep")  # a folder that may only be in the scratch folder
    print(os.getcwd(), Path.cwd(), sorted(os.listdir("..")))
    torch.save({"x": torch.ones(3)}, "one.pt")
    print(torch.load("one.pt"), torch.load(Path("one.pt"), mmap=True, weights_only=True))
    print(torch.load(os.path.abspath("one.pt")), os.path.getsize("one.pt") > 0)
    torch.save({"x": 1}, Path("../../old.pt"))
    torch.save([4], "../\u00fc.pt")
    print(torch.load("../../old.pt"), torch.load("../\u00fc.pt"))
    os.chdir("../..")
    torch.jit.script(torch.nn.Linear(2, 1)).save("out/script.pt")
    print(type(torch.jit.load("out/script.pt")).__name__)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    profile.export_chrome_trace("out/trace.json")
    print("traceEvents" in Path("out/trace.json").read_text())
    shared = torch.from_file("old.bin", shared=True, size=4, dtype=torch.uint8)
    shared.fill_(7)
    print(Path("old.bin").read_bytes())
    np.save("out/array.npy", np.arange(3)); np.arange(3).tofile("out/raw.bin")
    print(np.load("out/array.npy", mmap_mode="r"), np.fromfile("out/raw.bin", dtype=int))
    mapped = np.memmap("old.bin", mode="r+", shape=(4,)); mapped[0] = 9; mapped.flush()
    print(Path("old.bin").read_bytes())
    with sqlite3.connect("out/runs.db") as db:
        db.execute("create table runs (name)"); db.execute("insert into runs values ('first')")
    print(sqlite3.connect("out/runs.db").execute("select * from runs").fetchall())
    logging.basicConfig(filename="train.log", format="%(message)s"); logging.warning("logged")
    print(Path("train.log").read_text())
    with zipfile.ZipFile("out/all.zip", "w") as archive:
        archive.write("train.log")
    print(zipfile.ZipFile("out/all.zip").namelist())
    shutil.copytree("out", "copied"); shutil.rmtree("out"); shutil.rmtree("data")
    print(sorted(p.name for p in Path("copied").rglob("*")), os.path.exists("out"), list(Path(".").glob("da*")))
    os.link("old.bin", "hard.bin")
    print(Path("hard.bin").read_bytes(), [os.path.samefile(".", os.getcwd()), os.stat(b"hard.bin").st_size])
    for context in ("fork", "spawn"):
        process = multiprocessing.get_context(context).Process(target=child, args=("train.log",))
        process.start(); process.join()
        print(process.exitcode, Path("train.log").read_text())
    with open("copied/missing.txt", "w") as file:
        print(file.name, repr(file))
    for bad in ("none/x.pt", "copied"):
        try:
            open(bad, "w")
        except OSError as e:
            print(e)
    fifo = os.path.join(os.environ["TMPDIR"], "fifo")
    os.mkfifo(fifo); print(os.path.exists(fifo)); os.unlink(fifo)
    print(open("/dev/null", "w").write("x"), open("/proc/self/stat").read(0) == "")
    r, w = os.pipe(); print(os.fdopen(w, "w").write("x"))
    os.unlink("old.bin"); os.rename("copied", "old.bin")
    print(sorted(os.listdir("old.bin")), os.path.isdir("copied"))
"""


@pytest.mark.long
def test_what_libraries_write_is_seen_and_goes_to_the_scratch_folder(both):
    files = {"old.pt": "old", "old.bin": "0123", "data/a": "a", "data/deep/b": "b"}
    true, with_scratch = both(LIBRARIES, files)
    assert with_scratch == true


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


def test_a_program_that_is_not_there_raises_what_it_raises_and_is_not_told(both):
    """Libraries ask for git and nvidia-smi this way."""
    code = """
    import subprocess
    from pathlib import Path
    open("x", "w").close()
    for args in (["not-here"], "not-here", b"not-here", Path("not-here"), iter(["not-here", "x"])):
        try:
            subprocess.run(args)
        except FileNotFoundError as e:
            print(e, e.filename)
    subprocess.run(Path("/bin/true")); print(subprocess.run(iter(["echo", "3"])).returncode)
    print([words.split(")")[0].split("(")[1] for words in told] or ["true", "echo"])
    """
    true, with_scratch = both(code, {})
    assert with_scratch == true and true.count("[Errno 2]") == 5


MODULES = """
import importlib, os, runpy
from pathlib import Path
sys.path.insert(0, os.getcwd())
import old, pkg.old  # so that both folders are known to the import
def say(name, how=importlib.import_module):
    try:
        print(name, how(name).name)
    except ImportError as e:
        print(e)
for place in ("new.py", "pkg/new.py", "made/deep/__init__.py", "old.py"):
    os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
    Path(place).write_text(f"name = {place!r}, 'written'")
for name in ("new", "pkg.new", "made.deep", "none", "pkg.none"):
    say(name)
say("old", lambda name: importlib.reload(sys.modules[name]))
print(os.path.relpath(sys.modules["new"].__file__), sys.modules["made.deep"].__path__ == [os.path.abspath("made/deep")])
print(runpy.run_path("new.py")["name"])
os.remove("gone.py"); importlib.invalidate_caches()
say("gone")
os.makedirs("inside"); os.chdir("inside"); sys.path[0] = ""
Path("here.py").write_text("name = 1")
say("here")
"""


def test_a_module_that_the_script_writes_is_imported(both):
    files = {"old.py": "name = 'as it was'", "pkg/__init__.py": "", "pkg/old.py": "", "gone.py": "name = 2"}
    true, with_scratch = both(MODULES, files)
    assert with_scratch == true and true.count("written") == 5 and "here 1" in true


CACHES = """
import os, shutil
from pathlib import Path
scratch.here = scratch.install(sys.argv[2], told.append, (os.getcwd(),))
def write(path, text="new"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
home, disk = os.environ["HOME"], os.environ["DISK"]
write(home + "/.cache/torch/a")
write(home + "/.cache/linked/a")  # leads to a larger disk
write(disk + "/named/by/MY_CACHE_DIR/a")
os.makedirs(disk + "/set"); write(disk + "/late/a")
os.environ["HF_HOME"], os.environ["LATE_CACHE"] = disk + "/set", disk + "/late"
untouched = scratch.here.untouched
os.environ["HF_HOME"] = disk + "/set"  # once more
print(os.path.isdir(disk + "/set"), os.listdir(disk + "/late"), scratch.here.untouched == untouched)
write(disk + "/set/b")
write("out/a"); os.replace("out/a", disk + "/set/c")
os.link(disk + "/set/b", "out/b"); shutil.move(disk + "/set/b", "out/c")
print(sorted(os.listdir("out")), os.path.exists("out/a"), sorted(os.listdir(disk + "/set")), os.path.exists(disk))
write("here/own"); write(disk + "/elsewhere/a"); write(home + "/.cachet/a"); write(os.environ["X_CACHE"] + "/a")
"""


def test_caches_are_written_where_they_are_and_nothing_else_is(tmp_path):
    """A folder named as a cache is none if the script lies in it, or if it has written there before."""
    home, disk, work, run = (tmp_path / name for name in ("home", "disk", "own/work", "run"))
    for folder in (home / ".cache", tmp_path / "large", work, run):
        folder.mkdir(parents=True)
    (home / ".cache" / "linked").symlink_to(tmp_path / "large")
    env = new_environment(
        HOME=str(home),
        DISK=str(disk),
        MY_CACHE_DIR=f"{disk}/named/by/MY_CACHE_DIR",
        USE_CACHE="1",
        X_CACHE=str(tmp_path / "own"),
    )
    before = state(work)
    code = PRELUDE.replace("len(sys.argv) > 1", "False") + CACHES
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, "", run / "scratch"], cwd=work, env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True ['a'] True\n['b', 'c'] False ['c'] True\n"
    there = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and run not in p.parents)
    assert there == ["disk/named/by/MY_CACHE_DIR/a", "disk/set/c", "home/.cache/torch/a", "large/a"]
    assert state(work) == before


def test_what_is_moved_to_another_disk_is_copied(tmp_path, monkeypatch):
    """As from the scratch folder to a cache."""

    def other_disk(old, new):
        if Path(old).parent != Path(new).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        os.replace(old, new)

    monkeypatch.setattr(true_files.true, "replace", other_disk)
    (tmp_path / "to").mkdir()
    (tmp_path / "a").write_text("moved")
    true_files.move(str(tmp_path / "a"), str(tmp_path / "to" / "b"))
    assert [p.name for p in tmp_path.rglob("*")] == ["to", "b"] and (tmp_path / "to" / "b").read_text() == "moved"
    with pytest.raises(OSError, match="device"):
        true_files.move(str(tmp_path / "to"), str(tmp_path / "to" / "c"))


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


def test_memory_that_is_a_disk_has_no_more_room_than_memory(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    room = scratch_room.Room(scratch.Scratch(str(tmp_path / "scratch")))
    monkeypatch.setattr(scratch_room.host, "container", lambda: SimpleNamespace(memory_available_bytes=7))
    for is_memory in (True, False):
        monkeypatch.setattr(scratch_room, "_is_memory", lambda folder, known=is_memory: known)
        assert (room._free("/none") == 7) is is_memory
    monkeypatch.undo()
    assert not scratch_room._is_memory("/proc")
    if Path("/dev/shm").is_dir():
        assert scratch_room._is_memory("/dev/shm")
