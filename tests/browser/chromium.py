"""Where Chromium is. As a command: prints its path, or says how to get it and exits with 1."""

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MACOS = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
MISSING = (
    "no Chromium found: install it (Debian, Ubuntu: apt-get install chromium) or set CHROMIUM to "
    "the path of Chromium or Chrome"
)


def find() -> str | None:
    """Path of CHROMIUM from the environment, else of the first browser found, else None."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named)
    found = (shutil.which(name) for name in NAMES)
    return next(filter(None, found), str(MACOS) if MACOS.exists() else None)


if __name__ == "__main__":
    path = find()
    print(path or MISSING, file=sys.stdout if path else sys.stderr)
    sys.exit(path is None)
