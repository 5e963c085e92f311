"""DDP that shows where it stopped: after a hang or a crash, each rank's files in --debug-folder say what it was doing.

    torchrun --nproc-per-node 2 train_ddp_debug.py --patience 120
    kill -USR1 PID                                       # write a rank's stacks now; it keeps training

If no step ends on a rank for --patience seconds, or another rank has failed, it writes three files: rank0.stacks.txt
with all threads' stacks, rank0.recorder.json with its last collectives, and rank0.end.json with its error and step.
Then a hung rank exits with code 1. The recorder is a private PyTorch API, tested with torch 2.13. If NCCL gives up
first, PyTorch dumps into nccl_trace_rank_0 and so on. On a GPU the host runs ahead: step and stacks show what was
launched last; only the recorder shows what hangs. A restart by torchrun writes into a new folder. The rest is
train_ddp.py.

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import faulthandler
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

DATA = Path(__file__).resolve().parent.parent / "common" / "data" / "fashion_mnist_12k.npz"


class Block(nn.Module):
    """A transformer's MLP block: (batch, width) -> (batch, width)."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


def build_model(dropout):  # YOUR MODEL: any nn.Module
    """Build a model: (batch, 1, 28, 28) images -> (batch, 10) logits; 631,050 parameters."""
    blocks = [Block(128, dropout) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), *blocks, nn.Linear(128, 10))


def load_data(path):  # YOUR DATA: two datasets of (input, target) pairs, for training and testing
    """Load Fashion-MNIST: float32 images (N, 1, 28, 28), standardised to mean 0 and variance 1; labels (N,), 0 to 9."""
    with np.load(path) as arrays:
        x, y, x_test, y_test = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
    x, x_test = (((images / 255 - 0.286) / 0.353).unsqueeze(1) for images in (x, x_test))
    return TensorDataset(x, y.long()), TensorDataset(x_test, y_test.long())


class Evidence:
    """Writes files that show what this rank was doing when it hangs, or when it or another rank fails."""

    def __init__(self, folder, rank, ranks, patience, cuda):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*.*"):  # from an earlier run: this rank's, and those of ranks that no longer exist
            if (number := int(old.name[4:].split(".")[0])) == rank or (rank == 0 and number >= ranks):
                old.unlink(missing_ok=True)
        self.folder, self.rank, self.patience, self.ending = folder, rank, patience, False
        self.cuda, self.lock = cuda, threading.Lock()
        self.end_of_step(None)
        # PyTorch reads these when it makes the first process group: how many collectives it keeps (the default in 2.13,
        # none in some earlier versions), and whether and where NCCL's watchdog dumps them
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its older name
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.resolve() / "nccl_trace_rank_"))
        self.stacks = (folder / f"rank{rank}.stacks.txt").open("w")
        faulthandler.enable(self.stacks)  # for crashes below Python: segmentation fault, abort, bus error
        faulthandler.register(signal.SIGUSR1, self.stacks)
        faulthandler.register(signal.SIGTERM, self.stacks, chain=True)  # chain: then the process ends as usual
        sys.excepthook = self.failed
        threading.Thread(target=self.watch, daemon=True).start()

    def end_of_step(self, step):
        """Report progress. Also call it during long work between two steps, such as validation."""
        self.step, self.moved = step, time.monotonic()

    def log_memory(self):
        """Append the step and this rank's peak in MiB, so they survive an out-of-memory kill."""
        on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB, macOS in bytes
        peak = torch.cuda.max_memory_allocated() / 1024 if self.cuda else on_host
        with (self.folder / f"rank{self.rank}.memory.csv").open("a") as file:
            file.write(f"{self.step},{peak / 1024:.0f}\n")

    def write(self, exit_code=None, error="", trace=""):
        """Write the last collectives, all threads' stacks, and the end; exit_code None if the rank still runs."""
        with self.lock:
            if self.ending:
                return
            self.ending = exit_code is not None
            # private API: in other versions it may be missing, leaving only stacks and end
            recorder = getattr(torch._C._distributed_c10d, f"_dump_{'nccl' if self.cuda else 'fr'}_trace_json", None)
            if recorder:
                (self.folder / f"rank{self.rank}.recorder.json").write_bytes(recorder())
            self.stacks.truncate(self.stacks.seek(0))
            faulthandler.dump_traceback(self.stacks)
            end = {"exit_code": exit_code, "signal": "", "error": error, "traceback": trace, "step": self.step}
            (self.folder / f"rank{self.rank}.end.json").write_text(json.dumps(end))

    def watch(self):
        """Check once per second whether this rank or another one is in trouble (runs in a thread)."""
        known = None  # the first check may find files of an earlier run
        while time.monotonic() - self.moved < self.patience:
            time.sleep(1)
            # If Python itself stalls, so does this thread: a timer outside Python writes the stacks and exits.
            faulthandler.dump_traceback_later(self.patience + 30, exit=True, file=self.stacks)
            others = {f.name for f in self.folder.glob("rank*.end.json")} - {f"rank{self.rank}.end.json"}
            if known is not None and others - known:
                self.write()
            known = others
        if not self.ending:
            self.write()
            self.ending = True  # later errors, such as a lost connection, are consequences
            print(f"rank {self.rank}: no step in {self.patience} s, see {self.folder}", file=sys.stderr, flush=True)
            time.sleep(5)  # torchrun kills the other ranks once one is gone: let them write first
            os._exit(1)

    def failed(self, kind, error, trace):
        """Replace Python's normal exit, which can wait forever for lost ranks."""
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        self.write(1, f"{kind.__name__}: {error}", "".join(traceback.format_exception(kind, error, trace)))
        time.sleep(3)  # as above
        os._exit(1)


def first_not_finite(mine, ranks):
    """Return (step, ranks) of the first non-finite loss; `mine` is this rank's first such step, 0 for none."""
    steps = [None] * ranks
    dist.all_gather_object(steps, int(mine))  # collective
    first = min(step for step in steps if step)
    return first, [rank for rank in range(ranks) if steps[rank] == first]


def check_replicas(model, ranks):
    """Raise on all ranks if a parameter differs in any bit between them: compares one 64-bit number per parameter."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for p in model.parameters():
        bits = p.detach().reshape(-1).view(integers[p.element_size()])
        odd = torch.arange(1, 2 * len(bits), 2, device=p.device)  # odd weights per position: in a plain sum, +1 and -1
        sums.append((bits * odd).sum())  # cancel. Takes 16 more bytes per number of the largest parameter
    sums = torch.stack(sums)
    of_ranks = [torch.empty_like(sums) for _ in range(ranks)]
    dist.all_gather(of_ranks, sums)  # collective
    for (name, _), *found in zip(model.named_parameters(), *torch.stack(of_ranks).tolist(), strict=True):
        if odd := [rank for rank in range(ranks) if found[rank] != found[0]]:
            raise RuntimeError(f"replicas differ: {name} is not on rank(s) {odd} what it is on rank 0")


def require(condition, message):
    """Exit with code 2 and one message per machine unless `condition` holds."""
    if not condition:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        else:
            time.sleep(10)  # torchrun ends this rank once the printing one is gone
        sys.exit(2)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)  # Python 3.14's fork server would outlive os._exit

    # Options and data: bad values end the program before it touches a device
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)  # argparse would print its usage from every rank
    parser.add_argument("--data", type=Path, default=DATA, help="npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, on all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of a block's output that is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the dropout")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument("--patience", type=float, default=300, help="seconds without the end of a step that are a hang")
    parser.add_argument(
        "--check-every", type=int, default=100, help="steps from one comparison of replicas to the next"
    )
    parser.add_argument(
        "--debug-folder", type=Path, default="debug", help="folder for the files that tell what went on"
    )
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    parser.add_argument("--float64", action="store_true", help=SUPPRESS)  # to compare recipes without rounding
    args = parser.parse_args()
    require(min(args.steps, args.batch_size, args.log_every) > 0, "--steps, --batch-size, --log-every: 1 or more")
    require(0 < args.lr < float("inf") and 0 <= args.dropout < 1, "--lr must be above 0, --dropout from 0 to below 1")
    require(0 <= args.seed < 2**32, "--seed must be from 0 to 4294967295")
    require(not args.save or args.save.absolute().parent.is_dir(), f"--save {args.save}: there is no such folder")
    require(args.patience > 0 and args.check_every > 0, "--patience must be above 0, --check-every 1 or more")
    parent = args.debug_folder.absolute().parent
    require(parent.is_dir() and not args.debug_folder.is_file(), f"--debug-folder {args.debug_folder}: not a folder")
    if args.float64:
        torch.set_default_dtype(torch.float64)
    require(args.data.exists(), f"--data {args.data}: there is no such file; the course has fashion_mnist_12k.npz")
    train, test = load_data(args.data)
    require(args.batch_size <= len(train), f"--batch-size {args.batch_size} is more than the {len(train)} samples")

    # Device: torchrun sets each rank's variables; plain python starts a single rank
    peers = max(int(os.environ.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    require("RANK" in os.environ or peers == 1, f"{peers} processes, each alone: let srun or mpirun start torchrun")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    require(args.batch_size % ranks == 0, f"--batch-size {args.batch_size} must be a multiple of the {ranks} ranks")
    cuda = torch.cuda.is_available() and not args.cpu
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # or every rank's first allocation lands on GPU 0
    # before the process group, where the recorder starts; a restart must not overwrite the evidence
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    folder = args.debug_folder / (f"restart{restarts}" if restarts else "")
    evidence = Evidence(folder, rank, ranks, args.patience, cuda)
    # Collective: waits for all ranks. device_id binds NCCL to this GPU now instead of at the first collective
    timeout = timedelta(seconds=args.patience + 60)  # of a collective if no watch ends it; default: 10 or 30 minutes
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=timeout)

    # Data loader. For slow data, add num_workers and persistent_workers; see load_data.py
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)  # each rank draws a different n-th of the data
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(train, args.batch_size // ranks, sampler=sampler, drop_last=True, pin_memory=cuda)

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout).to(device)
    # Collective: copies rank 0's weights and buffers to all ranks. BatchNorm would see only this rank's samples: see
    # nn.SyncBatchNorm.convert_sync_batchnorm
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # Train
    if rank == 0:
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other
    step, logged, clock = 0, 0, time.perf_counter()
    not_finite = torch.zeros((), dtype=torch.int64, device=device)  # first step here with a NaN or infinite loss
    while step < args.steps:
        sampler.set_epoch(step // len(loader))  # or every epoch has the same order
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            loss = cross_entropy(model(x), y)  # mean over this rank's part of the batch, in nats
            optimizer.zero_grad()
            # Collective: DDP averages gradients over the ranks while backward computes earlier layers. To accumulate
            # several batches, run all but the last forward and backward in `with model.no_sync():`
            loss.backward()
            optimizer.step()
            step += 1
            evidence.end_of_step(step)
            not_finite = torch.where(loss.isfinite() | (not_finite > 0), not_finite, step)  # doesn't wait
            if step % args.check_every == 0 or step == args.steps:
                check_replicas(model.module, ranks)
            if step % args.log_every == 0 or step == args.steps:
                mean = loss.detach() / ranks
                dist.all_reduce(mean)  # collective: all ranks must log at the same steps, or wait forever
                mean = mean.item()  # waits for the device, or the clock would time only launches
                rate = (step - logged) * args.batch_size / (time.perf_counter() - clock)  # samples/s
                if rank == 0:
                    print(f"step {step}/{args.steps}  loss {mean:.10f}  {rate:,.0f} samples/s", flush=True)
                if not np.isfinite(mean):  # the mean is the same on all ranks, so all of them get here and leave
                    first, where = first_not_finite(not_finite, ranks)
                    raise FloatingPointError(f"the loss was first not finite in step {first} on rank(s) {where}")
                evidence.log_memory()
                logged, clock = step, time.perf_counter()
            if step == args.steps:
                break

    # Validate: each rank takes every n-th test sample. A DistributedSampler would repeat some to equalise the parts
    for buffer in model.module.buffers():  # BatchNorm's statistics have differed since the last forward
        dist.broadcast(buffer, 0)  # collective
    model.eval()  # no dropout
    mine = Subset(test, range(rank, len(test), ranks))
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    with torch.no_grad():
        for x, y in DataLoader(mine, args.batch_size // ranks):
            evidence.end_of_step(step)
            # not DDP, which communicates: ranks may have different numbers of batches
            output, y = model.module(x.to(device)), y.to(device)
            sums += torch.stack((cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()))
    dist.all_reduce(sums)  # collective
    loss, accuracy = (sums / len(test)).tolist()
    if rank == 0:
        print(f"test loss {loss:.10f}  accuracy {accuracy:.2%}", flush=True)

    # Save: all ranks have the same weights, so rank 0 writes them. No barrier, because no other rank reads the file
    if args.save and rank == 0:
        torch.save(model.module.state_dict(), args.save)
    evidence.write(0)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
