"""imports: torch and transformers, imported when there is a model to load. It takes seconds, so it is reported."""

import sys
from importlib import import_module

from kvcellar.progress import report

NEEDED = {"torch": "torch", "transformers": "kvcellar.engine.build"}  # what is named, and what brings it


def imported() -> None:
    """Import what a load needs, unless that was done before."""
    for name, module in NEEDED.items():
        if name not in sys.modules:
            report(f"importing {name}")
        import_module(module)
