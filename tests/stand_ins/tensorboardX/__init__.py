"""Stands in for tensorboardX: what is logged goes to a file, line by line."""

from pathlib import Path


class SummaryWriter:
    """Into the folder `log_dir`."""

    def __init__(self, log_dir="runs", **_):
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "events").open("a")

    def add_scalar(self, tag, value, step=None):
        self.file.write(f"{tag} {value} {step}\n")

    def add_histogram(self, tag, values, step=None):
        self.file.write(f"{tag} {values.detach().aminmax()} {step}\n")

    def add_graph(self, model, given):
        model(given)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()
