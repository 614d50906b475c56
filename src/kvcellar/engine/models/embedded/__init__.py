"""The demo model of the package, in a model directory like any other. CARD.md describes its origin and limits."""

import importlib.resources
from pathlib import Path


def path() -> Path:
    """The model directory. The package must be installed as files, not run from an archive."""
    return Path(str(importlib.resources.files(__name__)))
