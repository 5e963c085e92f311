"""Build the course as a book: a static site of all notebooks with their committed outputs, in build/book.

    make book                       # installs what this needs into .venv-book, which needs no torch
    python book                     # where that is installed
    python book --out /tmp/book     # elsewhere

BOOK_REPOSITORY, the address of the repository's page, adds a link to it on each page of code. Warnings are errors.
Exit code: 0 built, 1 a page has a mistake, 2 a link of the repository leads to nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pages import BadLink, Book

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python book", description="Build the course as a book.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "book", help="the site; what is there is replaced")
    out = parser.parse_args().out.resolve()
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError:
        print("Sphinx is not installed here: run `make book`", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        source, files, trees = (Path(folder, name) for name in ("source", "files", "trees"))
        files.mkdir()
        try:
            Book(ROOT, source, files, os.environ.get("BOOK_REPOSITORY", "")).write()
        except BadLink as e:
            print(f"python book: {e}", file=sys.stderr)
            return 2
        os.environ["BOOK_FILES"] = str(files)
        shutil.rmtree(out, ignore_errors=True)
        strict = ["--fail-on-warning", "--keep-going", "--quiet"]
        code = build_main([*strict, "-b", "html", "-c", str(HERE), "-d", str(trees), str(source), str(out)])
    (out / ".buildinfo").unlink(missing_ok=True)  # for a next build, which begins anew
    shutil.rmtree(out / "_sources", ignore_errors=True)  # empty
    if code == 0:
        print(f"The book is in {out / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
