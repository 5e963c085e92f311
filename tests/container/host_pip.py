"""Lets pip in a container build use what pip on this host uses: its index, its folders of wheels, its certificate.

    python3 tests/container/host_pip.py FILE

Writes FILE, a pip.conf, and prints one line HOST:CONTAINER for each path to mount. Prints nothing and writes
nothing where pip has no such settings. Only the standard library: the host may have no more.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# How packages are reached; other settings (user, target, require-virtualenv) would break a build.
REACH = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy", "timeout", "retries")
CERTIFICATES = {"cert": "/etc/pip-cert.pem", "client-cert": "/etc/pip-client-cert.pem"}


def parse(listing: str) -> dict[str, str]:
    """Settings in the output of `pip config list`; those of the environment win, as they do in pip."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in found:
            found[section][key] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def folders(value: str) -> Iterator[str]:
    """Existing folders and files that a setting names, as paths or file URLs."""
    for word in value.split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # The pages of a simple index link to files beside it: ../../files/name.whl
            yield str(path.parent if path.name == "simple" else path)


def configuration(settings: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The text of a pip.conf and the paths to mount, {on the host: in the container}."""
    reach = {k: v for k, v in settings.items() if k in REACH}
    mounts = {path: path for value in reach.values() for path in folders(value)}
    certificates = {k: v for k, v in settings.items() if k in CERTIFICATES and Path(v).is_file()}
    mounts |= {host: CERTIFICATES[key] for key, host in certificates.items()}
    lines = reach | {key: CERTIFICATES[key] for key in certificates}
    return "".join(f"{key} = {' '.join(value.split())}\n" for key, value in lines.items()), mounts


def main() -> None:
    """Run the command line."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True)
    text, mounts = configuration(parse(listing.stdout))
    if listing.returncode or not text:
        return
    Path(sys.argv[1]).write_text("[global]\n" + text)
    print("\n".join(f"{host}:{inside}" for host, inside in mounts.items()))


if __name__ == "__main__":
    main()
