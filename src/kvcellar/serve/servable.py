"""servable: a model that a server can load, under a name, and where it finds the models of a name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.variants import Variant
from kvcellar.errors import ModelNotFound
from kvcellar.serve.json_text import printable

# Loads an engine with a cache of so many bytes. Blocks; calls the second argument often, which may raise to end it.
Loader = Callable[[int, Callable[[], None]], ServedEngine]
Join = Callable[
    [ServedEngine], Variant
]  # adds the model to its engine. Blocks; what raises leaves the engine as it was
MemberKey = tuple[str, str]  # a name, and the id of its files


def as_it_is(engine: ServedEngine) -> Variant:
    """The model that an engine was made for."""
    return Variant(
        engine.model.default_sampling,
        lambda *given, **options: engine.render(*given, **options),
        engine.replies,
        template=engine.model.chat_template,
    )


@dataclass(frozen=True, slots=True)
class Servable:
    """A model that can be served. Those of one `key` share an engine; it is a digest of what that is made of. `id` is
    the digest of all files of the model, so a name that gets another model is another member of an engine.

    An engine takes `weights` bytes, and a cache of `least_cache` to `cache` bytes; the model adds `own` to it.
    """

    name: str
    key: str
    weights: int  # bytes in memory, those of drafts included
    cache: int
    least_cache: int
    load: Loader = field(compare=False, repr=False)
    context: int | None = None  # most tokens of a sequence; None: not known before it is loaded
    id: str = ""  # of the model in the library; "": it is in none
    own: int = 0  # bytes of its adapter
    directory: Path | None = None  # of its files; None: it was made from none
    join: Join = field(default=as_it_is, compare=False, repr=False)

    @property
    def member(self) -> MemberKey:
        return self.name, self.id

    @property
    def least(self) -> int:
        """Of the engine."""
        return self.weights + self.least_cache

    @property
    def most(self) -> int:
        """Of the engine."""
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


def not_served(name: str) -> ModelNotFound:
    return ModelNotFound(f"model {printable(repr(name))} not found; /v1/models lists what is served here")
