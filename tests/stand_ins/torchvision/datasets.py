"""Data sets of random images: uint8 tensors of channels x height x width, the same in each run."""

import torch
from torch.utils.data import Dataset


class Made(Dataset):
    """`len(data)` images in memory."""

    shape, classes = (1, 28, 28), 10

    def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False):
        made = torch.Generator().manual_seed(int(train))
        n = 4000 if train else 500
        self.data = torch.randint(256, (n, *self.shape), dtype=torch.uint8, generator=made)
        self.targets = torch.randint(self.classes, (n,), generator=made)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        return self.transform(image) if self.transform else image, int(self.targets[index])


class MNIST(Made):
    """Grey, 28 x 28."""


class FashionMNIST(Made):
    """Grey, 28 x 28."""


class CIFAR10(Made):
    """Coloured, 32 x 32."""

    shape = (3, 32, 32)


class CIFAR100(CIFAR10):
    """Of more classes."""

    classes = 100


class FakeData(Dataset):
    """Images that are drawn when they are asked for."""

    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None):
        self.size, self.image_size, self.num_classes, self.transform = size, image_size, num_classes, transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(int(index))
        image = torch.randint(256, self.image_size, dtype=torch.uint8, generator=made)
        target = int(torch.randint(self.num_classes, (), generator=made))
        return self.transform(image) if self.transform else image, target
