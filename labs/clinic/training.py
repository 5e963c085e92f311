"""A healthy training, line by line as the clinic's illnesses find it: each of them changes one line of `train`."""

from __future__ import annotations

import os  # noqa: F401 - for the line of an illness
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from labs.clinic.supplies import (  # noqa: F401 - some are for the lines of illnesses
    OWN_BUFFERS,
    Log,
    average_weights,
    build_model,
    decoded_when_asked,
    evaluate,
    in_memory,
    largest_singular_values,
    load_images,
    part,
    quality,
    read_when_asked,
    save,
    statistics,
)
from labs.common.data_parallel.sync_batchnorm import synchronised  # noqa: F401


def train(rank: int, ranks: int, seed: int, folder: Path) -> Iterator[tuple[float, int]]:
    """Train on this rank; after each step comes the loss in nats and how many samples were in it."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)
    torch.manual_seed(seed)
    images, labels = load_images()
    dataset = in_memory(images, labels, folder)
    sampler = DistributedSampler(dataset, ranks, rank, seed=seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True)
    model = build_model(width=8)
    model = DistributedDataParallel(model, bucket_cap_mb=25, **OWN_BUFFERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    log = Log(folder / f"log-{rank}.txt", durable=False)
    validate_every = 500
    save_every = 1000
    history, step = [], 0
    for epoch in count():
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while True:
            with part("data"):
                batch = next(batches, None)
            if batch is None:
                break
            x, y = batch
            with part("forward"):
                output = model(x)
                loss = cross_entropy(output, y)
            optimizer.zero_grad()
            with part("backward"):
                loss.backward()
            with part("optimizer"):
                optimizer.step()
            step += 1
            history.append(loss.detach())
            log.write(step, output.detach().mean(0))
            if step % validate_every == 0:
                evaluate(model, images, labels)
            if step % save_every == 0:
                save(model, optimizer, folder / f"checkpoint-{rank}.pt")
            yield loss.item(), len(x)
