"""factory: how a drafter that is not of this package is given to an engine, as `Engine(draft=...)`. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcellar.engine.speculate.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Target:
    """The model that drafts are for. `device` and `dtype` are those of its weights, named as in the settings."""

    name: str
    vocab_size: int
    context: int
    end_ids: frozenset[int]
    device: str
    dtype: str


class DrafterFactory(Protocol):
    """Makes the drafter of one engine, once, while the engine is made. What it raises ends that."""

    def __call__(self, target: Target, /) -> "Drafter": ...
