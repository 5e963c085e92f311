"""What `package.module:factory` stands for in the commands of README.md and INSTRUCTOR.md."""

import torch
from torch.utils.data import TensorDataset

from labs.common import models


def model():
    """A model of one's own, as labs.models has its contract."""
    return models.build("mlp")


def dataset():
    """A dataset of one's own and a step that uses a batch, as labs.tune_dataloader asks for them."""
    return TensorDataset(torch.randn(256, 8)), lambda batch: batch[0].sum()
