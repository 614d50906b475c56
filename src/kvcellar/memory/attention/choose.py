"""choose: selects the first backend that supports a spec, with the reasons why earlier candidates do not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcellar.errors import BadRequest, NoBackend
from kvcellar.memory.attention.cpu import Cpu
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.attention.triton import Triton
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.shapes import AttentionSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen backend, and for each earlier candidate the reason why it was rejected."""

    backend: Backend
    refused: Mapping[str, str]


def backends() -> tuple[Backend, ...]:
    """All backends, the fastest first. `reference` is last: it supports what the others do not."""
    return (Cpu(), Triton(), Sdpa(), Reference())


def named(name: str | None) -> tuple[Backend, ...]:
    """The backends to try: the named one, or the defaults if `name` is None."""
    found = tuple(backend for backend in backends() if name in (None, backend.name))
    if not found:
        names = ", ".join(backend.name for backend in backends())
        raise BadRequest(f"no attention backend is called {name!r}; there are {names}", "attention")
    return found


def choose(spec: AttentionSpec, candidates: Sequence[Backend]) -> Chosen:
    """The first candidate that supports `spec`. Raises `NoBackend` with all reasons if there is none."""
    refused: dict[str, str] = {}
    for backend in candidates:
        if (reason := backend.refuse(spec)) is None:
            return Chosen(backend, refused)
        refused[backend.name] = reason
    raise NoBackend(str(spec), refused)
