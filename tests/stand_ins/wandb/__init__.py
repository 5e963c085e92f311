"""Stands in for wandb: what is logged is counted."""

from types import SimpleNamespace


class Run:
    """A run with its settings."""

    def __init__(self):
        self.config, self.logged = SimpleNamespace(update=lambda *_, **__: None), 0

    def log(self, values):
        self.logged += len(values)


def init(**_):
    return Run()


def Image(data):
    return data


Histogram = Image
