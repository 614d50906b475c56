"""choose: the first backend that does not refuse, and why the ones before it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcellar.attention.cpu import Cpu
from kvcellar.attention.reference import Reference
from kvcellar.attention.sdpa import Sdpa
from kvcellar.contracts import Backend
from kvcellar.errors import BadRequest, NoBackend
from kvcellar.shapes import AttentionSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """A backend, and the reason of each candidate that was asked before it and refused."""

    backend: Backend
    refused: Mapping[str, str]


def backends() -> tuple[Backend, ...]:
    """Every backend, the fastest first. `reference` comes last: it serves what nobody else does."""
    return (Cpu(), Sdpa(), Reference())


def named(name: str | None) -> tuple[Backend, ...]:
    """The backends to try when the user named one, or none."""
    found = tuple(backend for backend in backends() if name in (None, backend.name))
    if not found:
        names = ", ".join(backend.name for backend in backends())
        raise BadRequest(f"no attention backend is called {name!r}; there are {names}", "attention")
    return found


def choose(spec: AttentionSpec, candidates: Sequence[Backend]) -> Chosen:
    """Raises `NoBackend`, with all reasons, if every candidate refuses."""
    refused: dict[str, str] = {}
    for backend in candidates:
        if (reason := backend.refuse(spec)) is None:
            return Chosen(backend, refused)
        refused[backend.name] = reason
    raise NoBackend(str(spec), refused)
