"""python -m labs.gpu"""

import sys

from labs.kit.requirements import installed

NEEDED = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "psutil",
    "nvidia-ml-py",
    "pillow",
    "cloudpickle",
    "tyro",
    "typeguard",
    "annotated-types",
    "tqdm",
)
"""Packages that the tasks import. A machine with a GPU may have only torch."""

missing = [package for package in NEEDED if installed(package) is None]
if missing:
    fix = f"{sys.executable} -m pip install {' '.join(missing)}"
    print(f"python -m labs.gpu: this Python lacks {', '.join(missing)}: run `{fix}`", file=sys.stderr)
    raise SystemExit(2)

from labs.gpu.runner import main  # noqa: E402

main()
