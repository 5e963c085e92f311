"""Published training speeds by number format, on one GPU each. A helper module, not a lab."""

from __future__ import annotations

from typing import NamedTuple

RASCHKA = "https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed"
NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5"


class Speed(NamedTuple):
    """One row of a source."""

    gpu: str
    model: str
    how: str
    """What is in which format, in words."""
    baseline: str
    """"FP32" or "TF32" if others are to be compared with this row, else ""."""
    rate: float
    unit: str
    source: str


# Raschka: A100, PyTorch 2.6; averages of the first epoch. His last row turns the model itself into BF16.
# NVIDIA: the table "Training performance results", PyTorch container 21.03, one GPU; torch.amp.
SPEEDS = (
    Speed("A100", "GPT", "FP32", "FP32", 12_526, "tokens/s", RASCHKA),
    Speed("A100", "GPT", "TF32", "", 27_648, "tokens/s", RASCHKA),
    Speed("A100", "GPT", "TF32, fused AdamW, pinned memory", "TF32", 28_402, "tokens/s", RASCHKA),
    Speed("A100", "GPT", "parameters in BF16, too; rest as before", "", 45_486, "tokens/s", RASCHKA),
    Speed("A100 80 GB", "ResNet-50", "TF32", "TF32", 938, "images/s", NVIDIA),
    Speed("A100 80 GB", "ResNet-50", "autocast", "", 2_470, "images/s", NVIDIA),
    Speed("V100 16 GB", "ResNet-50", "FP32", "FP32", 367, "images/s", NVIDIA),
    Speed("V100 16 GB", "ResNet-50", "autocast", "", 1_200, "images/s", NVIDIA),
)


def fp16() -> tuple[str, float]:
    """(GPU, speed under FP16 autocast over that in FP32) of ResNet-50 on the GPU that has neither TF32 nor BF16."""
    rows = {s.how: s for s in SPEEDS if s.gpu.startswith("V100")}
    fp32, lowered = rows["FP32"], rows["autocast"]
    return fp32.gpu, lowered.rate / fp32.rate


def table() -> list[dict[str, str]]:
    """One row per speed, with its ratio to the FP32 and TF32 rows of the same GPU that stand before it."""
    rows, base = [], {}
    for s in SPEEDS:
        ratios = {
            f"over {name}": f"{s.rate / base[s.gpu, name]:.2f} x" if (s.gpu, name) in base else ""
            for name in ("FP32", "TF32")
        }
        rows.append({"GPU": s.gpu, "model": s.model, "in": s.how, "speed": f"{s.rate:,} {s.unit}", **ratios})
        if s.baseline:
            base[s.gpu, s.baseline] = s.rate
    return rows
