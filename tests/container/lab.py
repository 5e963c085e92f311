"""Starts JupyterLab as the image does and asks it for pages, with its token and without.

    python tests/container/lab.py ADDRESS python -m jupyterlab ...     # ADDRESS: not the loopback, as a browser's

Runs inside the container. The token is read from the printed link, or is that of JUPYTER_TOKEN. Exit code 0 if every
answer is right; each is printed. Needs port 8888 to be free: JupyterLab would take another.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

START_S, KERNEL_S = 90.0, 60.0


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer, not to be followed."""

    def redirect_request(self, *_: object) -> None:
        """urllib then raises HTTPError with the code of the redirect."""


def ask(url: str, token: str | None = None, method: str = "GET") -> tuple[int, str]:
    """(HTTP status, body or target of the redirect) of one request."""
    headers = {} if token is None else {"Authorization": f"token {token}"}
    request = urllib.request.Request(url, headers=headers, method=method, data=b"{}" if method == "POST" else None)
    # No proxy: the address is the container's own.
    opener = urllib.request.build_opener(NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=250) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        return e.code, e.headers.get("Location", "")


def printed_token(server: subprocess.Popen) -> str | None:
    """Reads what the server prints until its link; the link's token, None if it prints a link without one."""
    assert server.stdout is not None
    for line in server.stdout:
        print(f"  | {line.rstrip()}", flush=True)
        if link := re.search(r"http://127\.0\.0\.1:\d+/\S*", line):
            return urllib.parse.parse_qs(urllib.parse.urlparse(link[0]).query).get("token", [None])[0]
    sys.exit(f"JupyterLab ended with exit code {server.wait()} before it printed a link")


def opened(address: str) -> bool:
    """Waits until port 8888 takes connections: the link is printed a moment before."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, 8888), timeout=5):
            return True
        time.sleep(0.1)
    return False


def expect(what: str, got: object, *allowed: object) -> None:
    """Print the answer; exit if it is not one of those allowed."""
    print(f"{what}: {got}", flush=True)
    if got not in allowed:
        sys.exit(f"{what}: expected {' or '.join(map(str, allowed))}, got {got}")


def channels(address: str, kernel: str, token: str) -> http.client.HTTPConnection:
    """Opens the web socket of a kernel as a browser does; then the server greets the kernel, and it answers."""
    connection = http.client.HTTPConnection(address, 8888, timeout=250)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    headers |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Authorization": f"token {token}"}
    connection.request("GET", f"/api/kernels/{kernel}/channels", headers=headers)
    return connection


def check_kernel(address: str, token: str) -> None:
    """A kernel starts, answers, and its channels open with the token only."""
    url = f"http://{address}:8888/api/kernels"
    status, body = ask(url, token, "POST")
    expect("start a kernel, with the token", status, 201)
    kernel, state, end = json.loads(body)["id"], "", time.monotonic() + KERNEL_S
    expect("the kernel's channels, wrong token", channels(address, kernel, "0" * 48).getresponse().status, 403)
    with contextlib.closing(channels(address, kernel, token)) as connection:
        expect("the kernel's channels, with the token", connection.getresponse().status, 101)
        while state != "idle" and time.monotonic() < end:
            time.sleep(0.2)
            state = json.loads(ask(f"{url}/{kernel}", token)[1])["execution_state"]
    expect("the kernel's state", state, "idle")


def check(address: str, server: subprocess.Popen) -> None:
    """Every answer, with the token and without."""
    base, token = f"http://{address}:8888", printed_token(server)
    expect(f"port 8888 is open at {address}", opened(address), True)
    own = os.environ.get("JUPYTER_TOKEN")
    if own:
        expect("the printed link shows a token of your own", token, "...", None)
        token = own
    expect("the token is long enough not to be guessed", bool(own) or len(token or "") >= 32, True)
    expect("GET /api/contents, no token", ask(f"{base}/api/contents")[0], 403)
    expect("GET /api/contents, wrong token", ask(f"{base}/api/contents", "0" * 48)[0], 403)
    status, target = ask(f"{base}/lab")
    expect("GET /lab, no token", (status, target.partition("?")[0]), (302, "/login"))
    expect("start a kernel, no token", ask(f"{base}/api/kernels", method="POST")[0], 403)
    expect("GET /lab, with the token", ask(f"{base}/lab", token)[0], 200)
    first = "my/00_gpu_checks.ipynb"
    expect("GET the first notebook by link", ask(f"{base}/lab/tree/{first}?token={token}")[0], 200)
    status, body = ask(f"{base}/api/contents/{first}", token)
    expect("the learner's copy of it is there", status, 200)
    cells = json.loads(body)["content"]["cells"]
    expect("how many of its cells have outputs", sum(bool(cell.get("outputs")) for cell in cells), 0)
    check_kernel(address, token or "")


def main() -> None:
    """Run the command line."""
    address, *command = sys.argv[1:]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    signal.signal(signal.SIGALRM, lambda *_: server.kill())  # ends the wait for a link that never comes
    signal.setitimer(signal.ITIMER_REAL, START_S + KERNEL_S)
    try:
        check(address, server)
    finally:
        server.terminate()
        server.communicate(timeout=250)
    expect("exit code after SIGTERM, as `docker stop` sends", server.returncode, 0)


if __name__ == "__main__":
    main()
