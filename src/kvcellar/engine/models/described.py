"""described: what is known of a model beside its network."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcellar.engine.models.input_limits import Limits
from kvcellar.engine.models.quantize.kinds import CodesKind
from kvcellar.text.tokens import TextAssets


class AsStored(NamedTuple):
    """A parameter that is as it is stored, but for its type, or the codes that take its place: `name` is that of the
    stored tensor. A stack [E,o,i] may have `matrices` in place of it: those stored of each expert, whose outputs are
    side by side."""

    name: str
    dtype: Any  # of the parameter, as a word
    kind: CodesKind | None = None  # of the codes; None: it is the parameter
    matrices: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """How weights of 8 and 4 bits are multiplied: number of layers by bits, bytes of their codes, and why others with
    codes are dense.

    `identity` tells the numbers that are computed from those with other weights of the same files; empty: dense ones.
    """

    layers: Mapping[int, int]
    bytes: int
    dense: Mapping[str, str]
    identity: str


@dataclass(frozen=True, slots=True)
class Described:
    """What belongs to a network. `without_text` is the reason if there is no tokenizer."""

    name: str
    path: Path | None
    limits: Limits
    end_ids: frozenset[int]
    defaults: Mapping[str, Any]  # sampling parameters from the generation config, or of the library
    defaults_because: str
    parameters: int
    text: TextAssets | None
    without_text: str
    notes: tuple[str, ...]  # what of its files is not used or not followed
    served: Served | None = None  # None: it has no weights of 8 and 4 bits
    stored: Mapping[str, int] = field(default_factory=dict[str, int])  # how quantised weights of its files are stored

    @property
    def multiplied(self) -> str:
        """What tells its results from those with dense weights; empty: its weights are dense."""
        return self.served.identity if self.served is not None else ""

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where its weights are; none if it was given as an object."""
        return () if self.path is None else (self.path,)
