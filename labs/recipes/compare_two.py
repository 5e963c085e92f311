"""Is B faster than A? Two commands, run in turn, compared pair by pair, and no more said than the runs can bear.

    python compare_two.py "python train.py --steps 200" "python train.py --steps 200 --workers 4"    # time of each
    python compare_two.py --metric "([0-9.,]+) samples/s" "torchrun --nproc-per-node 2 a.py" "torchrun ... b.py"

Both must do the same work: as many steps, and as good a model. Exit code 0: compared, whatever came out. 1: a command
failed or printed no number. 2: called in a way that cannot work. Ctrl-C ends the command first. Needs Python alone.
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
STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # a closed terminal sends the last


def run(command):
    """(seconds until it ended, exit code, what it printed) of a command, given as one types it into the shell."""
    with tempfile.TemporaryFile() as output:  # a pipe would have to be read meanwhile, on the cores being measured
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # nothing stops us between its start and the try
        start = perf_counter()
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP),  # a child inherits what is blocked
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
            code, seconds = process.wait(), perf_counter() - start
        finally:
            end(process)
        output.seek(0)
        return seconds, code, output.read().decode(errors="replace")


def end(process):
    """Leave nothing of a command: its process group is asked to end, and killed where it has not after PATIENCE_S."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # a second Ctrl-C has to wait
    with suppress(OSError):  # ProcessLookupError: the group is empty, as after most runs
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(50 * PATIENCE_S):
            process.poll()  # takes its exit code: till then it stays in its group, even if it has ended
            os.killpg(process.pid, 0)  # 0 sends nothing and raises where nobody is left
            sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


def number(text, pattern):
    """The last match, for example "1,234.5", as a number; None if there is none above 0, as a ratio needs it."""
    last = "".join(pattern.findall(text)[-1:]).replace(",", "")
    with suppress(ValueError):  # by float(): it is no number, or nothing was found
        if 0 < float(last) < math.inf:
            return float(last)


def interval(samples):
    """95 % confidence interval of the median: medians of 9,999 samples drawn from the samples (bootstrap).

    Of few samples the percentiles 2.5 and 97.5 are too narrow: they are moved outwards as Student's t is wider than
    the normal distribution (Hesterberg 2015, arXiv:1411.5279).
    """
    draw, n, z = random.Random(0), len(samples), NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * n - 4) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)  # 1 % off for 6 samples
    medians = sorted(median(draw.choices(samples, k=n)) for _ in range(9999))
    place = round(9999 * NormalDist().cdf(-t * math.sqrt(n / (n - 1))))
    return medians[place], medians[-1 - place]


def answer(ratios, low, high, timed):
    """One sentence. For a number other than a time, we can't know whether more is better."""
    if not low <= 1 <= high:
        word = (("faster", "slower") if timed else ("smaller", "larger"))[high < 1]
        # By the end of the interval that is nearest to 1: at least so much, most likely more
        return f"B is {word}, by {100 * abs(1 / (low if low > 1 else high) - 1):.1f} % of A or more"
    # An interval shrinks with the root of the rounds. To leave out 1 in 4 of 5 runs, not in every other one, half of
    # it must be 0.7 of the difference.
    needed = math.ceil(len(ratios) * (math.log(high / low) / 2 / (0.7 * math.log(1.05))) ** 2)
    seen = f"would take some {needed} rounds to show" if needed > len(ratios) else "would most likely have shown"
    return f"inconclusive; at this spread a difference of 5 % {seen}"


def require(condition, message, code=2):
    """End with a message and this exit code unless `condition` holds."""
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
    for sign in (s for s in STOP if signal.getsignal(s) != signal.SIG_IGN):  # nohup ignores the last
        signal.signal(sign, lambda by, _: sys.exit(128 + by))  # on the way out run() ends its command

    values, unit = ([], []), "" if args.metric else " s"
    for k in range(args.rounds + 1):
        name = f"round {k} of {args.rounds}" if k else "warm-up, not counted"  # caches are cold, clocks low
        for way in ((1, 0), (0, 1))[k % 2]:  # A B, B A, ...: what drifts meets both alike
            seconds, code, output = run(args.commands[way])
            where = f"{name}, {'AB'[way]}: {args.commands[way]}"
            require(code == 0, f"{where}: exit code {code}\n{output[-4000:]}", code=1)
            values[way].append(number(output, pattern) if args.metric else seconds)
            require(values[way][-1], f"{where}: no number above 0 for --metric\n{output[-4000:]}", code=1)
        a, b = values[0][-1], values[1][-1]
        print(f"{name}: A {a:.4g}{unit}, B {b:.4g}{unit}, A/B {a / b:.3f}", flush=True)

    for name, command, samples in zip("AB", args.commands, values, strict=True):
        print(f"{name}: median {median(samples[1:]):.4g}{unit}: {command}")
    ratios = [a / b for a, b in zip(*values, strict=True)][1:]  # pair by pair: neighbours in time
    low, high = interval(ratios)
    print(f"A/B: {median(ratios):.3f} [{low:.3f}, {high:.3f}] of {len(ratios)} pairs:", answer(ratios, low, high, unit))


if __name__ == "__main__":
    main()
