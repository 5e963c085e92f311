"""Where this machine's Chromium or Chrome is."""

import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
MISSING = "no Chromium or Chrome found: install one (on Debian `apt-get install chromium`) to run the browser tests"


def executable() -> str | None:
    """Path of the browser, None when there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (MAC if Path(MAC).exists() else None)
