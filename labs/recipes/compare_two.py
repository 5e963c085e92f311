"""Is B faster than A? Runs two commands in turn and compares them pair by pair, with a confidence interval.

    python compare_two.py "python train.py --steps 200" "python train.py --steps 200 --workers 4"    # time of each
    python compare_two.py --metric "([0-9.,]+) samples/s" "torchrun --nproc-per-node 2 a.py" "torchrun ... b.py"

Both must do the same work: as many steps, and as good a model. Exit code 0: compared, whatever the result. 1: a command
failed or printed no number. 2: bad usage. Ctrl-C first ends the running command. Needs only Python.
"""

import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from contextlib import suppress
from statistics import NormalDist, median
from time import perf_counter, sleep

PATIENCE_S = 40  # torchrun gives its ranks 30 s to end before it kills them
STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # SIGHUP comes from a closed terminal


def run(command):
    """Run a shell command; return (seconds until it ended, exit code, output)."""
    with tempfile.TemporaryFile() as output:  # a pipe would need reading, on the cores being measured
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # no signal may arrive between the start and the try
        start = perf_counter()
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP),  # a child inherits blocked signals
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
            code, seconds = process.wait(), perf_counter() - start
        finally:
            end(process)
        output.seek(0)
        return seconds, code, output.read().decode(errors="replace")


def end(process):
    """End all processes of a command: ask its process group to end, and kill it after PATIENCE_S."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # a second Ctrl-C must wait
    with suppress(OSError):  # ProcessLookupError: the group is empty, as after most runs
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(50 * PATIENCE_S):
            process.poll()  # reaps it; until then even an ended process stays in its group
            os.killpg(process.pid, 0)  # signal 0 only checks, and raises if nobody is left
            sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


def number(text, pattern):
    """Return the last match, for example "1,234.5", as a number above 0; None if there is none."""
    last = "".join(pattern.findall(text)[-1:]).replace(",", "")
    with suppress(ValueError):  # float() raises if there is no number
        if 0 < float(last) < math.inf:
            return float(last)


def interval(samples):
    """Return the 95 % bootstrap confidence interval of the median, from 9,999 resamples.

    With few samples, the 2.5 and 97.5 percentiles are too narrow. They are widened as Student's t is wider than the
    normal distribution (Hesterberg 2015, arXiv:1411.5279).
    """
    draw, n, z = random.Random(0), len(samples), NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * n - 4) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)  # 1 % off for 6 samples
    medians = sorted(median(draw.choices(samples, k=n)) for _ in range(9999))
    place = round(9999 * NormalDist().cdf(-t * math.sqrt(n / (n - 1))))
    return medians[place], medians[-1 - place]


def answer(ratios, low, high, timed):
    """Return a one-sentence verdict. Without `timed`, it can't know whether more is better."""
    if not low <= 1 <= high:
        word = (("faster", "slower") if timed else ("smaller", "larger"))[high < 1]
        # the end of the interval nearest to 1: at least this much, most likely more
        return f"B is {word}, by {100 * abs(1 / (low if low > 1 else high) - 1):.1f} % of A or more"
    # An interval shrinks with the root of the number of rounds. For it to exclude 1 in 4 of 5 runs, not in every other
    # one, half of it must be 0.7 of the difference.
    needed = math.ceil(len(ratios) * (math.log(high / low) / 2 / (0.7 * math.log(1.05))) ** 2)
    seen = f"would take some {needed} rounds to show" if needed > len(ratios) else "would most likely have shown"
    return f"inconclusive; at this spread a difference of 5 % {seen}"


def require(condition, message, code=2):
    """Exit with a message and this code unless `condition` holds."""
    if not condition:
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
        sys.exit(code)


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)
    parser.add_argument("commands", nargs=2, metavar="COMMAND", help="A and B, each in quotes")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each that count, after one that does not")
    parser.add_argument("--metric", help="regular expression with one group: compare the number that it finds last")
    args = parser.parse_args()
    require(6 <= args.rounds <= 1000, "--rounds from 6 to 1000: fewer have no interval of 95 %")
    try:
        pattern = re.compile(args.metric or "()", re.MULTILINE)
    except re.error as e:
        require(False, f"--metric {args.metric!r}: {e}")
    require(pattern.groups == 1, f"--metric needs one group, as in 'loss ([0-9.]+)': {args.metric!r}")
    for sign in (s for s in STOP if signal.getsignal(s) != signal.SIG_IGN):  # nohup ignores SIGHUP
        signal.signal(sign, lambda by, _: sys.exit(128 + by))  # while exiting, run() ends its command

    values, unit = ([], []), "" if args.metric else " s"
    for k in range(args.rounds + 1):
        name = f"round {k} of {args.rounds}" if k else "warm-up, not counted"  # caches are cold, clocks low
        for way in ((1, 0), (0, 1))[k % 2]:  # A B, B A, ...: drift affects both equally
            seconds, code, output = run(args.commands[way])
            where = f"{name}, {'AB'[way]}: {args.commands[way]}"
            require(code == 0, f"{where}: exit code {code}\n{output[-4000:]}", code=1)
            values[way].append(number(output, pattern) if args.metric else seconds)
            require(values[way][-1], f"{where}: no number above 0 for --metric\n{output[-4000:]}", code=1)
        a, b = values[0][-1], values[1][-1]
        print(f"{name}: A {a:.4g}{unit}, B {b:.4g}{unit}, A/B {a / b:.3f}", flush=True)

    for name, command, samples in zip("AB", args.commands, values, strict=True):
        print(f"{name}: median {median(samples[1:]):.4g}{unit}: {command}")
    ratios = [a / b for a, b in zip(*values, strict=True)][1:]  # pairs of neighbours in time
    low, high = interval(ratios)
    print(f"A/B: {median(ratios):.3f} [{low:.3f}, {high:.3f}] of {len(ratios)} pairs:", answer(ratios, low, high, unit))


if __name__ == "__main__":
    main()
