"""Is this a model that the labs can train?

    python -m labs.models my_package.my_module:factory

The contract for your own model: a factory without arguments returns a `Workload` with the module,
`make_batch(batch_size)` and `loss(output, target)`. The course's models, in labs/common/models/, do the same:

    from labs.models import Workload
"""

from __future__ import annotations

import argparse

from labs.common.models import MODELS, Workload, build, char_gpt, cnn, cnn_batchnorm, fashion_cnn, gradient_bytes, mlp
from labs.kit.cli import fail
from labs.kit.errors import BadInput

__all__ = [
    "MODELS",
    "Workload",
    "build",
    "char_gpt",
    "cnn",
    "cnn_batchnorm",
    "fashion_cnn",
    "gradient_bytes",
    "mlp",
]
PROG = "python -m labs.models"


def main(args: list[str] | None = None) -> None:
    """Build the model, run two rows through it, and print its size. Exit with code 2 and one line if that fails."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("factory", help=f"package.module:factory, or one of {', '.join(MODELS)}")
    name = parser.parse_args(args).factory
    try:
        workload = build(name)
    except BadInput as e:
        fail(PROG, str(e))
    parameters = sum(p.numel() for p in workload.module.parameters())
    x, y = workload.make_batch(2)
    print(f"{name} is trainable: {parameters:,} parameters, {gradient_bytes(workload.module):,} bytes of gradients")
    print(f"two rows: inputs {tuple(x.shape)} of {x.dtype}, targets {tuple(y.shape)} of {y.dtype}")


if __name__ == "__main__":
    main()
