"""A test that takes long, for tests/test_elsewhere.py to stop. Its name keeps pytest from finding it by itself."""

import time


def test_sleeps():
    print("asleep", flush=True)
    time.sleep(40)
