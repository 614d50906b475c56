"""The models of a command line, loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcellar.cli.hosting import hosting
from kvcellar.frontend.engine import Engine
from kvcellar.library.library import Library
from kvcellar.serve import ModelManager


@contextmanager
def hosted(models: Sequence[str], **options: Any) -> Iterator[tuple[ModelManager, Library | None, Sequence[Engine]]]:
    with hosting(models, **options) as found:
        found.load()
        yield found.host, found.library, found.engines
