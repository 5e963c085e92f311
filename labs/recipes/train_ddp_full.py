"""Everything a training run at work needs: DDP, BF16, accumulation, a schedule, validation, metrics, resuming.

    python train_ddp_full.py --checkpoint run.pt --metrics run.jsonl                        # run it again to resume
    torchrun --nproc-per-node 2 --max-restarts 3 train_ddp_full.py --accumulate 4 --checkpoint run.pt

It is train_ddp_resume.py plus four techniques:

* --precision bf16: autocast around forward and loss; parameters, gradients and optimizer stay in FP32.
* --accumulate N: gradients of N micro-batches per step. Only the last one triggers an exchange.
* a learning rate that rises for --warmup steps, then falls to 0 as a cosine. Its position is in the checkpoint.
* --validate-every, and --metrics: one JSON line per report. A restart never writes a line twice.

What train_ddp_resume.py says about SIGTERM, restarts and bitwise equal runs holds here.

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import atexit
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from contextlib import nullcontext
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


def ignore_sigterm(_):
    """Keep the loader's workers alive: torchrun signals them as well, but ranks need them to reach the save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_workers():
    """Kill the loader's workers: at exit, Python would send the SIGTERM that they ignore, and wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or PyTorch would report them
    for worker in multiprocessing.active_children():
        worker.kill()


class ResumableSampler(DistributedSampler):
    """Skips the first `done` of this rank's samples without reading them."""

    done = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.done, None)


def save(path, state):
    """Write atomically: a reader, or the next start, finds either the old state or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes must reach the disk before the name points to them
    os.replace(partial, path)  # atomic within one file system
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # now the name is on the disk as well
    os.close(folder)


def learning_rate(step, warmup, steps):
    """Return the share of --lr at this step: rises linearly to 1, then falls as a cosine to 0 at the last step."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


@torch.no_grad()
def validate(model, loader, samples, autocast, device):
    """Return (mean loss in nats, accuracy) over all ranks. Collective. Puts the model back into train mode."""
    model.eval()  # no dropout
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    for x, y in loader:
        with autocast():
            output, y = model(x.to(device)), y.to(device)
        sums += torch.stack((cross_entropy(output.double(), y, reduction="sum"), (output.argmax(1) == y).sum()))
    model.train()
    dist.all_reduce(sums)  # collective
    return (sums / samples).tolist()


def lines_up_to(path, step):
    """Return the lines of a metrics file that a run resuming at `step` won't write again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


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
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))  # checked where ranks communicate anyway
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)  # SIGTERM would end Python 3.14's fork server
    atexit.register(end_workers)

    # Options and data: bad values end the program before it touches a device
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)  # argparse would print its usage from every rank
    parser.add_argument("--data", type=Path, default=DATA, help="npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, on all ranks together")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of matrix multiplications")
    parser.add_argument("--lr", type=float, default=1e-3, help="largest learning rate of AdamW")
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is at its largest")
    parser.add_argument("--clip", type=float, default=1.0, help="greatest norm of the gradient; inf: as it is")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of a block's output that is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the dropout")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--validate-every", type=int, default=100, help="steps from one validation to the next")
    parser.add_argument("--metrics", type=Path, default="metrics.jsonl", help="file with a line of JSON per report")
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt", help="file to resume from and to save to")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one save to the next")
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    parser.add_argument("--float64", action="store_true", help=SUPPRESS)  # to compare recipes without rounding
    args = parser.parse_args()
    require(min(args.steps, args.batch_size, args.log_every) > 0, "--steps, --batch-size, --log-every: 1 or more")
    require(0 < args.lr < float("inf") and 0 <= args.dropout < 1, "--lr must be above 0, --dropout from 0 to below 1")
    require(0 <= args.seed < 2**32, "--seed must be from 0 to 4294967295")
    require(
        min(args.save_every, args.validate_every, args.accumulate) > 0,
        "--save-every, --validate-every, --accumulate: 1 or more",
    )
    require(0 <= args.warmup < args.steps and args.clip > 0, "--warmup: 0 to --steps less 1; --clip: above 0")
    require(not args.float64 or args.precision == "fp32", "--float64 needs --precision fp32")
    require(args.metrics.absolute().parent.is_dir(), f"--metrics {args.metrics}: there is no such folder")
    require(args.checkpoint.absolute().parent.is_dir(), f"--checkpoint {args.checkpoint}: there is no such folder")
    require(not args.save or args.save.absolute().parent.is_dir(), f"--save {args.save}: there is no such folder")
    if args.float64:
        torch.set_default_dtype(torch.float64)
    require(args.data.exists(), f"--data {args.data}: there is no such file; the course has fashion_mnist_12k.npz")
    train, test = load_data(args.data)
    require(args.batch_size <= len(train), f"--batch-size {args.batch_size} is more than the {len(train)} samples")
    order = [args.batch_size, args.seed, args.steps, args.warmup]  # determine the data's order and the schedule
    try:  # weights_only refuses files that contain code
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True) if args.checkpoint.exists() else None
        same = not state or state["order"] == order
    except Exception as e:
        require(False, f"--checkpoint {args.checkpoint} is damaged ({type(e).__name__}): remove it to start anew")
    options = "--batch-size, --seed, --steps, --warmup"
    require(same, f"--checkpoint {args.checkpoint} was made with {options} {state and state['order']}: give these")

    # Device: torchrun sets each rank's variables; plain python starts a single rank
    peers = max(int(os.environ.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    require("RANK" in os.environ or peers == 1, f"{peers} processes, each alone: let srun or mpirun start torchrun")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    parts = ranks * args.accumulate
    require(
        args.batch_size % parts == 0,
        f"--batch-size {args.batch_size} must be a multiple of ranks x micro-batches, {parts}",
    )
    rows = args.batch_size // parts  # per micro-batch; all must be equal, or the mean of their means is wrong
    cuda = torch.cuda.is_available() and not args.cpu
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # or every rank's first allocation lands on GPU 0
    # Collective: waits for all ranks. device_id binds NCCL to this GPU now instead of at the first collective
    # Restarted ranks would find their predecessors' addresses in torchrun's store and fail to connect (pytorch issue
    # 135712), so each start uses different keys
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    require(  # torchruns on several machines may count restarts differently, so their keys would differ
        not shared or os.environ.get("GROUP_WORLD_SIZE", "1") == "1",
        "on several machines start torchrun as ddp.sbatch does: c10d, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    )
    start = os.environ["TORCHELASTIC_RESTART_COUNT"] if shared else "0"
    address, port, host = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank == 0 and not shared
    store = dist.PrefixStore(start, dist.TCPStore(address, port, is_master=host, wait_for_workers=False))
    backend, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=bound)
    steps = [None] * ranks  # collective: on several machines, each might have a different file
    dist.all_gather_object(steps, state["step"] if state else 0)
    require(
        len(set(steps)) == 1, f"--checkpoint {args.checkpoint}: ranks found steps {steps}, they must share one file"
    )

    # Data loader. For slow data, add num_workers and persistent_workers; see load_data.py
    sampler = ResumableSampler(train, seed=args.seed, drop_last=True)  # each rank draws a different n-th of the data
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(train, rows, sampler=sampler, drop_last=True, pin_memory=cuda, worker_init_fn=ignore_sigterm)
    loader.generator = torch.Generator()  # a separate one, because each start of an epoch draws a number
    steps_per_epoch = len(loader) // args.accumulate  # drops micro-batches that don't fill a step
    # Each rank takes every n-th test sample. A DistributedSampler would repeat some to equalise the parts
    test_loader = DataLoader(Subset(test, range(rank, len(test), ranks)), rows)

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout).to(device)
    # Collective: copies rank 0's weights and buffers to all ranks. BatchNorm would see only this rank's samples: see
    # nn.SyncBatchNorm.convert_sync_batchnorm
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    # DDP rebuilds its gradient buckets after the first backward, which changes the rounding on 3 or more ranks. After
    # one dummy backward, every start computes the same
    model.eval()(train[0][0].unsqueeze(0).to(device)).sum().backward()
    model.train().zero_grad()
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, args.warmup, args.steps))

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

    # Resume: every rank reads the file; loading copies tensors to the model's device
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])  # keeps the checkpoint's largest learning rate, not --lr
        if rank == 0 and state["step"] >= args.steps:
            print(f"already at step {state['step']}: delete {args.checkpoint} to start again", flush=True)
        if rank < len(state["random"]):  # additional ranks start from their seed
            on_cpu, on_gpu = state["random"][rank]  # add those of NumPy and random if your training uses them
            torch.set_rng_state(on_cpu)
            if cuda and on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu)

    # Metrics: one file, written by one rank
    step = state["step"] if state else 0
    if rank == 0:
        kept = lines_up_to(args.metrics, step) if state else []  # a new training run starts a new file
        metrics = args.metrics.open("w", buffering=1)
        metrics.writelines(kept)
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other

    def report(text, **values):
        if rank == 0:
            print(f"step {step}/{args.steps}  {text}", flush=True)
            metrics.write(json.dumps({"step": step, **values}) + "\n")

    # Train
    logged, clock, stopping = step, time.perf_counter(), 0
    while step < args.steps:
        epoch, done = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)  # or every epoch has the same order
        sampler.done = done * args.accumulate * rows
        loader.generator.manual_seed(args.seed + 1_000_003 * (epoch * ranks + rank))  # for workers: differs by rank
        batches = iter(loader)
        for _ in range(min(steps_per_epoch - done, args.steps - step)):
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for i in range(args.accumulate):
                x, y = next(batches)
                # Copies from pinned memory to a GPU are asynchronous; kernels that need the data wait in the GPU's
                # queue
                x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
                # For all but the last micro-batch, forward and backward: DDP accumulates gradients without exchange
                with model.no_sync() if i + 1 < args.accumulate else nullcontext():
                    with autocast():
                        output = model(x)
                    output = output.float() if args.precision == "bf16" else output
                    loss = cross_entropy(output, y) / args.accumulate  # so that the sum is the step's mean
                    loss.backward()  # collective at the last one: averages gradients over the ranks
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # averaged gradients, so the same on every rank
            lr = scheduler.get_last_lr()[0]  # this step's
            optimizer.step()
            scheduler.step()  # once per step, not per micro-batch, and after the optimizer
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                # All ranks must stop at the same step, but some may not have the signal yet, so they agree here
                news = torch.stack((total / ranks, torch.full_like(total, len(stopped))))
                dist.all_reduce(news)  # collective: all ranks must log at the same steps, or wait forever
                mean, stopping = news.tolist()  # waits for the device, or the clock would time only launches
                rate = (step - logged) * args.batch_size / (time.perf_counter() - clock)  # samples/s
                report(f"loss {mean:.10f}  {rate:,.0f} samples/s", loss=mean, lr=lr, samples_per_s=rate)
                logged, clock = step, time.perf_counter()
            if step % args.validate_every == 0 or step == args.steps:
                if cuda:
                    torch.cuda.synchronize()  # queued training steps count in the rate
                began = time.perf_counter()
                for buffer in model.module.buffers():  # BatchNorm's statistics have differed since the last forward
                    dist.broadcast(buffer, 0)  # collective
                test_loss, accuracy = validate(model.module, test_loader, len(test), autocast, device)
                report(f"test loss {test_loss:.10f}  accuracy {accuracy:.2%}", test_loss=test_loss, accuracy=accuracy)
                clock += time.perf_counter() - began  # exclude validation from the rate
            if step % args.save_every == 0 or step == args.steps or stopping:
                random = [None] * ranks  # collective: gathers random states; everything else is equal on all ranks
                dist.all_gather_object(random, (torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None))
                state = {"step": step, "order": order, "random": random, "scheduler": scheduler.state_dict()}
                state |= {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                if rank == 0:  # no barrier: the others continue, and nobody reads the file before the next start
                    save(args.checkpoint, state)
            if stopping and step < args.steps:
                dist.barrier()  # if a machine ended before the file is written, a scheduler could end them all
                dist.destroy_process_group()
                if rank == 0:
                    print(f"stopped by SIGTERM and saved at step {step}: start again to resume", flush=True)
                code = 128 + signal.SIGTERM  # torchrun --max-restarts restarts after any code except 0
                sys.exit(code) if cuda else os._exit(code)  # gloo: as at the end

    # Save: all ranks have the same weights, so rank 0 writes them. No barrier, because no other rank reads the file
    if args.save and rank == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
