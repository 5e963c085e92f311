"""Numbers that others published and this course tests, each with its source."""

from __future__ import annotations

from labs.kit.record import Record, Records

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


# Raised by Function._run_through_graph (github.com/keras-team/keras, keras/src/ops/function.py, pull request 20705),
# with the path of the output between the backticks: none if the model has a single output.
KERAS_NOT_CONNECTED = "Output with path `` is not connected to `inputs`"
