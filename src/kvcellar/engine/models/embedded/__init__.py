"""The demo models of the package, in directories like any other model: `embedded` here, for text, and
`embedded-vision`, which sees pictures, in the folder `vision`. The CARD.md of each describes its origin and limits."""

import importlib.resources
from pathlib import Path

from kvcellar.library.names import EMBEDDED, RESERVED


def path(name: str = EMBEDDED) -> Path:
    """The model directory. The package must be installed as files, not run from an archive."""
    return Path(str(importlib.resources.files(__name__)), name.removeprefix(EMBEDDED).removeprefix("-"))


def found(name: str | Path) -> Path | None:
    """The directory of the model of this name; None: no model that comes with kvcellar has it."""
    return path(name) if isinstance(name, str) and name in RESERVED else None
