"""Numbers that others published and this course tests, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from labs.kit.record import Record, Records, load

TABLES = Path(__file__).parents[3] / "records" / "published"


@cache
def table(name: str) -> Records:
    """A published table of records/published, `name`.jsonl. Its provenance says where it was read, and how surely."""
    return load(TABLES / f"{name}.jsonl")


RTX_4090_ARTICLE = (
    '"GPU resource utilisation: PyTorch model parallel computation performance analysis report" (2025-12-24)'
)


def rtx_4090_epochs() -> Records:
    """Seconds per epoch on 1 to 4 RTX 4090 as an article states them; it gives no script, batch or data size."""
    table = {1: 12.5, 2: 7.8, 3: 6.2, 4: 5.1}
    return Records(
        Record("article", "epoch_s", "s", (seconds,), "published", {"ranks": ranks},
               provenance={"source": RTX_4090_ARTICLE})
        for ranks, seconds in table.items()
    )  # fmt: skip


SERVER_GEAR = (
    "server-gear.com/blog/post/rtx3090-x8-exhaustive-tf-cnn-benchmarks: tf_cnn_benchmarks (container "
    "tensorflow:20.12-tf1), FP16"
)


def rtx_3090_images() -> Records:
    """Images per second of 1, 2, 4 and 8 RTX 3090 in one server, by model and batch per card."""
    table = {
        "ResNet-50": {64: (1026.83, 1828.21, 2798.55, 4039.44), 128: (1126.66, 2103.69, 3596.61, 6005.06),
                      256: (1181.90, 2283.06, 4266.43, 7362.66), 512: (1205.02, 2371.21, 4635.48, 8756.00)},
        "Inception-3": {64: (709.40, 1304.37, 2247.00, 3549.19), 128: (764.99, 1382.01, 2692.60, 4865.46),
                        256: (806.46, 1573.15, 2979.08, 5598.28)},
        "VGG-16": {64: (419.83, 589.37, 703.38, 634.67), 128: (439.85, 756.71, 949.62, 1093.66),
                   256: (455.41, 821.34, 1303.34, 1695.73), 512: (440.25, 838.75, 1356.53, 2171.86)},
    }  # fmt: skip
    return Records(
        Record("server-gear", "images_per_s", "images/s", (rate,), "published",
               {"model": model, "batch": batch, "ranks": ranks}, provenance={"source": SERVER_GEAR})
        for model, batches in table.items() for batch, rates in batches.items()
        for ranks, rate in zip((1, 2, 4, 8), rates, strict=True)
    )  # fmt: skip


GOYAL_2017 = "P. Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677 (2017), Table 1 and section 5.1"


def imagenet_batches() -> Records:
    """Top-1 error in % of ResNet-50 on ImageNet (mean of 5 runs), SGD, learning rate 0.1 x batch / 256."""
    rows = ((256, "none", 23.60, 0.12), (8192, "gradual", 23.74, 0.09), (8192, "none", 24.84, 0.37),
            (8192, "constant", 25.88, 0.56))  # fmt: skip
    return Records(
        Record("paper", "top_1_error", "%", (error,), "published",
               {"batch": batch, "warm_up": warm_up, "plus_minus": spread}, provenance={"source": GOYAL_2017})
        for batch, warm_up, error, spread in rows
    )  # fmt: skip


PYTORCH_DDP = (
    "github.com/pytorch/pytorch at bf69c149, benchmarks/distributed/ddp/README.md: PyTorch 1.4, NCCL, V100 of a DGX, "
    "32 images per GPU, medians"
)


def ddp_on_v100() -> Records:
    """Seconds per iteration on one V100 without DDP, and on two of one machine with it, as PyTorch publishes them."""
    table = {"ResNet-50": (0.097, 0.103), "ResNet-101": (0.162, 0.176), "ResNeXt-50": (0.145, 0.153),
             "ResNeXt-101": (0.415, 0.438)}  # fmt: skip
    return Records(
        Record("pytorch", "step_s", "s", (seconds,), "published", {"model": model, "gpus": gpus},
               provenance={"source": PYTORCH_DDP})
        for model, both in table.items() for gpus, seconds in enumerate(both, start=1)
    )  # fmt: skip


PYTORCH_SPLIT = (
    "github.com/pytorch/tutorials at 51309670, intermediate_source/model_parallel_tutorial.py: ResNet-50, two GPUs in "
    "one process, means of 10 runs of 3 batches of 120 images"
)


def resnet50_split() -> Records:
    """Seconds of 3 batches of ResNet-50 on one GPU, and split over two by the number of micro-batches."""
    table = {("one GPU", 1): 3.75, ("naive", 1): 4.02, ("pipeline", 6): 2.51, ("pipeline", 10): 2.43}
    return Records(
        Record("pytorch", "run_s", "s", (seconds,), "published", {"schedule": schedule, "micro_batches": m},
               provenance={"source": PYTORCH_SPLIT})
        for (schedule, m), seconds in table.items()
    )  # fmt: skip


H200_SWEEP = (
    "github.com/stas00/ml-engineering at c53741b8, network/benchmarks/results/all-reduce-8xH200.md: 8 H200 in a node, "
    "NVSwitch, NCCL 2.27.7, 20 trials per size, August 2026"
)


def all_reduce_on_8_h200() -> Records:
    """Seconds of an all-reduce on 8 H200 by size in bytes, from the published bus bandwidths in 10^9 byte/s.

    The same page says that NCCL ran a ring with its low-latency protocol up to 1 MiB, and NVLS, which adds up in the
    switch, from 2 MiB on.
    """
    busbw = (1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15,
             450.29, 463.58, 469.17, 473.10, 477.45, 482.26)  # fmt: skip
    return Records(
        Record("ml-engineering", "all_reduce_s", "s", (2 * 7 / 8 * size / (1e9 * gb_s),), "published",
               {"size": size, "ranks": 8}, provenance={"source": H200_SWEEP})
        for size, gb_s in zip((2**k for k in range(15, 35)), busbw, strict=True)
    )  # fmt: skip


ONE_BIT_ADAM = "H. Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888, Table 1: BERT-Large, V100, NCCL"


def all_reduce_of_bert() -> Records:
    """Seconds to all-reduce the gradients of BERT-Large on two clusters, by number of nodes.

    40 Gbit/s Ethernet with 4 V100 in a node, and 100 Gbit/s InfiniBand with 8.
    """
    tables = {("Ethernet", 4): {1: 239.76, 2: 1897.21, 4: 2133.24, 8: 2173.35, 16: 2275.43},
              ("InfiniBand", 8): {1: 28.18, 2: 183.74, 4: 297.28, 8: 336.40}}  # fmt: skip
    return Records(
        Record("paper", "all_reduce_s", "s", (ms / 1e3,), "published",
               {"network": network, "gpus_per_node": gpus, "nodes": nodes}, provenance={"source": ONE_BIT_ADAM})
        for (network, gpus), table in tables.items() for nodes, ms in table.items()
    )  # fmt: skip


# Raised by Function._run_through_graph (github.com/keras-team/keras, keras/src/ops/function.py, pull request 20705),
# with the path of the output between the backticks: none if the model has a single output.
KERAS_NOT_CONNECTED = "Output with path `` is not connected to `inputs`"
