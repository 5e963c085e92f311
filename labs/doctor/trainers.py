"""Fixes as options of a trainer: where a library's loop calls the optimizer, no line of the script can be changed.

Options are those of transformers 5.17, Lightning 2.6 and Accelerate 1.15.
"""

from __future__ import annotations

from types import FrameType

TRAINERS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate.optimizer": "Accelerate",
}
"""Module that has called the optimizer, and whose options are named. Trainers that call others come first."""
OPTIONS = {
    "transformers": {
        "slow_loader": "dataloader_num_workers=... (0 unless set), dataloader_persistent_workers=True",
        "pageable": "dataloader_pin_memory=True",
        "workers_restart": "dataloader_persistent_workers=True",
        "exchange": "per_device_train_batch_size=..., gradient_accumulation_steps=...",
        "synchronise": "logging_nan_inf_filter=False (else it looks at the loss in each step), logging_steps=50",
        "validation": 'eval_strategy="steps", eval_steps=500',
        "checkpoint": "save_steps=...",
        "printing": "logging_steps=50",
        "find_unused": "ddp_find_unused_parameters=False",
        "buffers": "ddp_broadcast_buffers=False",
        "tiny_batches": "per_device_train_batch_size=...",
        "larger_batch": "per_device_train_batch_size=...",
        "optimizer_loop": 'optim="adamw_torch_fused"',
        "fused_optimizer": 'optim="adamw_torch_fused"',
        "half_precision": "{half}=True",
        "compile": "torch_compile=True",
        "python_overhead": "torch_compile=True",
    },
    "Lightning": {
        "exchange": "Trainer(accumulate_grad_batches=...)",
        "synchronise": "self.log(..., prog_bar=False), Trainer(log_every_n_steps=50)",
        "validation": "Trainer(val_check_interval=500, check_val_every_n_epoch=None)",
        "checkpoint": "ModelCheckpoint(train_time_interval=timedelta(minutes=...))",
        "anomaly": "Trainer(detect_anomaly=False)",
        "find_unused": 'Trainer(strategy="ddp"), not "ddp_find_unused_parameters_true"',
        "half_precision": 'Trainer(precision="{half}-mixed")',
        "compile": "torch.compile(module) before trainer.fit",
        "python_overhead": "torch.compile(module) before trainer.fit",
    },
    "Accelerate": {
        "exchange": "Accelerator(gradient_accumulation_steps=...), with accelerator.accumulate(model):",
        "find_unused": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()]), which does not search",
        "half_precision": 'Accelerator(mixed_precision="{half}")',
        "compile": 'Accelerator(dynamo_backend="inductor")',
        "python_overhead": 'Accelerator(dynamo_backend="inductor")',
    },
}
"""By the name of a finding, where it is another than that of a loop of one's own."""


def calling(frame: FrameType | None) -> str:
    """The trainer that has called down to `frame`: a key of OPTIONS, or "" for a loop of one's own."""
    modules = set()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    for prefix, trainer in TRAINERS.items():
        if any(name == prefix or name.startswith(f"{prefix}.") for name in modules):
            return trainer
    return ""


def option(trainer: str, finding: str, half: str) -> str:
    """What fixes it there, as " - in Lightning: ..."; "" where that is what fixes it anywhere.

    `half`: "bfloat16" or "float16".
    """
    words = OPTIONS.get(trainer, {}).get(finding, "")
    of_16_bits = "bf16" if half == "bfloat16" else "16" if trainer == "Lightning" else "fp16"
    place = "TrainingArguments" if trainer == "transformers" else trainer
    return f" - in {place}: {words.format(half=of_16_bits)}" if words else ""
