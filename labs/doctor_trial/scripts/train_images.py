"""Train a convolutional network on images, on 1 to n ranks. Illnesses change one of its lines.

python train_images.py --data fashion_mnist_12k.npz
torchrun --nproc-per-node 2 train_images.py --data fashion_mnist_12k.npz
"""

import argparse
import io
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

IMAGES = 4096


def build_model(width):
    """(batch, 1, 28, 28) images -> (batch, 10) logits."""
    layers, inputs = [], 1
    for outputs, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (4 * width, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 49, 128), nn.ReLU(), nn.Linear(128, 10))


def normalised(images):
    """(N, 28, 28) bytes -> (N, 1, 28, 28) with mean 0 and deviation 1."""
    return ((images / 255 - 0.286) / 0.353).unsqueeze(1)


class Files(Dataset):
    """PNG files in memory: every image is decoded each time that it is asked for."""

    def __init__(self, images, labels):
        self.labels, self.files = labels, []
        for image in images.numpy():
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG", compress_level=1)
            self.files.append(file.getvalue())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        image = np.asarray(Image.open(io.BytesIO(self.files[i])))
        return normalised(torch.from_numpy(image.copy())[None])[0], self.labels[i]


class Archive(Dataset):
    """A compressed archive that each batch opens anew: to read some rows, NumPy unpacks the whole array."""

    def __init__(self, images, labels, path):
        self.path, self.length = path, len(images)

    def __len__(self):
        return self.length

    def __getitems__(self, rows):
        with np.load(self.path) as arrays:
            x, y = arrays["x_train"][rows], torch.from_numpy(arrays["y_train"][rows]).long()
        return list(zip(normalised(torch.from_numpy(x)), y, strict=True))


def evaluate(model, images, labels):
    """Share of right answers on 512 images."""
    model.eval()
    with torch.no_grad():
        right = (model(normalised(images[:512])).argmax(1) == labels[:512]).float().mean().item()
    model.train()
    return right


def statistics(model):
    """The median magnitude of each weight tensor and of its gradient."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().abs().median().item(), p.grad.abs().median().item()
    return found


def quality(history, output):
    """How far two outputs of a batch are apart in six classes, of all batches so far, sorted for quantiles."""
    pairs = (output[:, None, :6] - output[None, :, :6]).detach().flatten()
    return [torch.cat((*history, pairs)).sort().values]


def largest_singular_values(model):
    """Of each weight matrix: whether training blows up."""
    return [torch.linalg.matrix_norm(p.detach().flatten(1), 2).item() for p in model.parameters() if p.dim() > 1]


def average_weights(model, ranks):
    """Mean of all ranks' weights. Collective, and with DDP idle work: they are the same already."""
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)
    torch.manual_seed(0)
    with np.load(args.data) as arrays:
        images, labels = (torch.from_numpy(arrays[name][:IMAGES]) for name in ("x_train", "y_train"))
    labels = labels.long()
    dataset = TensorDataset(normalised(images), labels)
    workers = 0
    if ranks > 1:
        dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset, drop_last=True) if ranks > 1 else RandomSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True, num_workers=workers)
    model = module = build_model(width=8)
    if ranks > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=25, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    log = open("log.txt", "w", buffering=1)  # noqa: SIM115 - until the training ends
    validate_every, save_every = 500, 1000
    history, step, begun = [], 0, time.perf_counter()
    while step < args.steps:
        if ranks > 1:
            sampler.set_epoch(step // len(loader))
        for x, y in loader:
            output = model(x)
            loss = cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            history.append(loss.detach())
            log.write(f"{step} {time.perf_counter() - begun:.4f} {loss.item():.4f}\n")
            if step % validate_every == 0:
                evaluate(module, images, labels)
            if step % save_every == 0 and rank == 0:
                torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
            if step % 10 == 0 and rank == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
            if step == args.steps:
                break
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
