"""Stands in for tensorboard: torch.utils.tensorboard's SummaryWriter then writes lines of text."""

import sys
from types import ModuleType

from tensorboardX import SummaryWriter

__version__ = "2.0"


def _module(name, **contents):
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(contents)


_module("torch.utils.tensorboard.writer", SummaryWriter=SummaryWriter, FileWriter=None)
_module("tensorboard.summary")
_module("tensorboard.summary.writer")
_module("tensorboard.summary.writer.record_writer", RecordWriter=None)
