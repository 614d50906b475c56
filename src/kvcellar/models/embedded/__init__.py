"""The demo model that ships with the package: a folder as any other model's. Its origin and limits are in CARD.md."""

import importlib.resources
from pathlib import Path


def path() -> Path:
    """The folder that holds the model's files; the package must be installed as files, not run from an archive."""
    return Path(str(importlib.resources.files(__name__)))
