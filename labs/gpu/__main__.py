"""python -m labs.gpu"""

import importlib.util
import sys

NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "pandas": "pandas",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "cloudpickle": "cloudpickle",
    "tyro": "tyro",
    "typeguard": "typeguard",
    "annotated_types": "annotated-types",
    "tqdm": "tqdm",
}
"""What the tasks import, and the package it is in: a machine with a GPU may have torch alone."""

missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
if missing:
    fix = f"{sys.executable} -m pip install {' '.join(missing)}"
    print(f"python -m labs.gpu: this Python lacks {', '.join(missing)}: run `{fix}`", file=sys.stderr)
    raise SystemExit(2)

from labs.gpu.runner import main  # noqa: E402

main()
