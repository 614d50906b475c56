"""replay-peers: prompt tokens that the caches of other systems compute on the traces of `replay`, beside ours.

The caches of kvcellar and transformers are the real ones, the others models of their rules (`benchmarks.peers`). Each
may keep as many cells (tokens in each group) and states as ours; LMCache has host memory for as many cells again.
Counts are the same on every machine.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Protocol

from benchmarks.against import KeptCaches, config_of
from benchmarks.peers import STATES, VLLM, LlamaCpp, LMCache, Room, SGLang
from benchmarks.replay import QUICK, TRACES, Replay, Turn, Writer, clairvoyant, ideal, limits
from benchmarks.row import Given, Lines
from kvcellar.memory.policy import distance
from kvcellar.memory.prefix.node import common_prefix

KINDS = ("full", "sliding", "hybrid", "recurrent")
SPARE = distance(19_000_000)  # of the states of about a Qwen3.5-0.8B


class Peer(Protocol):
    def serve(self, turn: Turn) -> int:
        """Serve a request; returns how many tokens of its prompt were computed."""
        ...


class Kvcellar:
    """Ours, as `replay` runs it: a real memory, manager and prefix tree."""

    def __init__(self, kind: str, room: Room) -> None:
        self.replay = Replay(kind, cells=room.cells, rows=room.states, spare=SPARE)

    def serve(self, turn: Turn) -> int:
        before = self.replay.computed
        self.replay.serve(turn)
        return self.replay.computed - before


class Transformers:
    """A `DynamicCache` for each conversation, as `replay-transformers` has it: it has no limit."""

    def __init__(self, kind: str) -> None:
        self._caches = KeptCaches(config_of(kind))

    def serve(self, turn: Turn) -> int:
        known = common_prefix(self._caches.tokens(turn.conversation), turn.prompt)
        return self._caches.serve(turn.conversation, turn.prompt, turn.answer, min(known, len(turn.prompt) - 1))


MODELS: Mapping[str, Callable[[str, Room], Peer | None]] = MappingProxyType(
    {
        "vLLM": VLLM,
        "SGLang": SGLang,
        "llama.cpp": LlamaCpp,
        "LMCache": lambda kind, room: None if kind in STATES else LMCache(room),
    }
)


def computed(peer: Peer, turns: Sequence[Turn]) -> int:
    return sum(peer.serve(turn) for turn in turns)


def counted(turns: Sequence[Turn], kind: str) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """Prompt tokens that each computes, with room and with a tenth of it; None where it has no such cache. The best are
    the ideal cache and, for attention in a tenth, the clairvoyant one."""
    cells, _ = limits(turns, share=1.0, checkpoints=0)
    whole = Room(2 * cells, 1 << 18)
    free = Kvcellar(kind, whole)
    wide: dict[str, int | None] = {"best": ideal(turns), "kvcellar": computed(free, turns)}
    part = Room(*limits(turns, share=0.1, checkpoints=free.replay.checkpoints))
    best = None if kind == "recurrent" else clairvoyant(turns, part.cells)
    tight: dict[str, int | None] = {"best": best, "kvcellar": computed(Kvcellar(kind, part), turns)}
    for found, room in ((wide, whole), (tight, part)):
        for name, model in MODELS.items():
            peer = model(kind, room)
            found[name] = None if peer is None else computed(peer, turns)
    return {**wide, "transformers": computed(Transformers(kind), turns)}, {**tight, "transformers": None}


def row(given: Given) -> Lines:
    """Each trace and kind twice: with room, and with a tenth of the cells and states."""
    found = dict[str, object]()
    names = ("best", "kvcellar", *MODELS, "transformers")
    yield f"{'trace':10} {'kind':9} {'room':6}" + "".join(f"{name:>13}" for name in names)
    for trace, kind in product(TRACES, KINDS):
        turns = list(TRACES[trace](Writer(1, QUICK if given.quick else 1.0)))
        for room, counts in zip(("all", "tenth"), counted(turns, kind), strict=True):
            numbers = "".join(f"{'-' if counts[name] is None else counts[name]:>13}" for name in names)
            yield f"{trace:10} {kind:9} {room:6}" + numbers
            found[f"{trace} {kind} {room}"] = counts
    yield "kvcellar and transformers: the real caches; the others: models of their rules"
    return found
