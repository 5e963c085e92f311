"""Two machines out of one: namespaces joined by a virtual cable, each with a name and a core; and Slurm's commands."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from processes import HERE, MARK, PYTHON, family, new_environment

TOOLS = ("ip", "unshare", "taskset", "hostname")


class Machines:
    """Two network namespaces that reach each other only through a virtual cable, each with a host name and a core."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, f"t{os.getpid()}"
        self.environment = new_environment(TMPDIR=str(folder), PYTHON=PYTHON[0])
        self.spaces, self.names = [f"{self.tag}-{n}" for n in (0, 1)], ["node-0", "node-1"]

    def __enter__(self) -> "Machines":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(n)} {self.names[n]}\n" for n in (0, 1))
        for space in self.spaces:
            ip("netns", "add", space)
            (names := Path("/etc/netns") / space).mkdir(parents=True)
            (names / "hosts").write_text(hosts)  # `ip netns exec` shows it as /etc/hosts
            ip("-n", space, "link", "set", "lo", "up")
        cable = ["link", "add", "eth0", "netns", self.spaces[0], "type", "veth", "peer", "name", "eth0"]
        ip(*cable, "netns", self.spaces[1])
        for n, space in enumerate(self.spaces):
            ip("-n", space, "addr", "add", f"{self.address(n)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def __exit__(self, *_: object) -> None:
        for process in family(self.environment[MARK]):
            with suppress(Exception):
                process.kill()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        with suppress(OSError):  # others have some
            Path("/etc/netns").rmdir()

    def address(self, n: int) -> str:
        return f"10.77.0.{n + 1}"

    def on(self, n: int) -> list[str]:
        """Prefix of a command that runs on machine `n`."""
        cores = sorted(os.sched_getaffinity(0))
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[n]]
        return ["taskset", "-c", str(cores[n % len(cores)]), "ip", "netns", "exec", self.spaces[n], *named]

    def pids(self, n: int) -> set[int]:
        return set(map(int, ip("netns", "pids", self.spaces[n]).split()))

    def kill(self, n: int) -> None:
        """torchrun and its ranks at once, as when the power fails."""
        for pid in self.pids(n):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def sent(self, n: int) -> int:
        """Bytes that have left machine `n`, of all its connections and layers."""
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.check_output(["ip", "netns", "exec", self.spaces[n], "cat", file]))


def ip(*args: str) -> str:
    return subprocess.run(["ip", *args], check=True, capture_output=True, text=True).stdout


class Pod(threading.Thread):
    """A container with restartPolicy OnFailure: its command is started again whenever it fails."""

    def __init__(self, machines: Machines, n: int, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(name=f"pod-{n}", daemon=True)
        self.command, self.environment = [*machines.on(n), *command], machines.environment | environment
        self.log, self.stopped = machines.folder / f"pod-{n}.log", False
        self.ended: list[tuple[int, float]] = []
        """Exit code and time (of the wall clock) of each start."""

    def run(self) -> None:
        with self.log.open("w") as log:
            while not self.stopped and (not self.ended or self.ended[-1][0]) and len(self.ended) < 5:
                done = subprocess.run(self.command, env=self.environment, cwd=HERE.parent, stdout=log, stderr=log)
                self.ended.append((done.returncode, time.time()))


SRUN = """#!/bin/bash
# srun as its manual says: the command on each node; after the first that fails, the others end; the worst exit code.
[[ " $* " == *" --kill-on-bad-exit=1 "* ]] || exit 99
while [[ $1 == --* ]]; do shift; done
pids=() worst=0
for n in 0 1; do
    on="ON_$n"
    SLURM_NODEID=$n SLURMD_NODENAME=node-$n ${!on-} "$@" &
    pids+=($!)
done
for _ in 0 1; do
    code=0; wait -n || code=$?
    if ((code)); then kill "${pids[@]}" 2> /dev/null; fi
    ((code > worst)) && worst=$code
done
exit "$worst"
"""


def slurm(folder: Path, srun: str = SRUN, **more: str) -> dict[str, str]:
    """What a batch file finds in its environment on the first node, with stand-ins for Slurm's commands."""
    (commands := folder / "bin").mkdir()
    for name, text in {"srun": srun, "scontrol": "#!/bin/bash\nprintf 'node-0\\nnode-1\\n'\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **new_environment(PYTHON=PYTHON[0]),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "ddp",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[0-1]",
        "SLURM_SUBMIT_DIR": str(HERE.parent),
        "PATH": f"{commands}:{os.environ['PATH']}",
        **more,
    }


def quoted(command: list[str], path: Path) -> str:
    """A script that runs `command` with its arguments, since a shell variable holds no list."""
    path.write_text("#!/bin/bash\nexec " + " ".join(f"'{word}'" for word in command) + ' "$@"\n')
    path.chmod(0o755)
    return str(path)
