"""servable: a model that a server can load, under a name, and where it finds the models of a name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcellar.serve.protocols import ServedEngine

# Loads an engine with a cache of so many bytes. Blocks; calls the second argument often, which may raise to end it.
Loader = Callable[[int, Callable[[], None]], ServedEngine]


@dataclass(frozen=True, slots=True)
class Servable:
    """A model that can be served. Those of one `key` share an engine. `key` and `id` are digests of the files, so a
    name that gets another model gets another engine.

    An engine takes `weights` bytes, and a cache of `least_cache` to `cache` bytes.
    """

    name: str
    key: str
    weights: int  # bytes in memory, those of drafts included
    cache: int
    least_cache: int
    load: Loader = field(compare=False, repr=False)
    context: int | None = None  # most tokens of a sequence; None: not known before it is loaded
    id: str = ""  # of the model in the library; "": it is in none
    adapter: str | None = None  # of its requests; None: what the engine has for requests that name none

    @property
    def least(self) -> int:
        return self.weights + self.least_cache

    @property
    def most(self) -> int:
        return self.weights + self.cache


class Catalogue(Protocol):
    """The models that can be served. Methods read files: not for the event loop."""

    def find(self, name: str) -> Servable:
        """Raises `ModelNotFound`; and `BadRequest` for what cannot be a name."""
        ...

    def known(self, name: str) -> bool:
        """Whether `find` reads no file, or raises. If not, it may compare all files of the model."""
        ...

    def all(self) -> Sequence[Servable]:
        """By name."""
        ...

    @property
    def longest(self) -> int:
        """No model has a longer context, in tokens."""
        ...
