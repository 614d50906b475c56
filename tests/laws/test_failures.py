"""If any allocation fails in any operation, nothing has changed, and the operation succeeds when it is tried again.

Each operation is tried again and again, and every time it fails one question later, until it gets through. The lives
in `test_memory` break operations anywhere; here no place is left out.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from kvcellar.memory.kv.history import LayerHistory
from kvcellar.memory.kv.record import Record
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.shapes import Scoring, StoredAs
from kvcellar.memory.spans import Span
from tests.laws.breaking import Fault, try_with
from tests.laws.dumb import causal, chunked, encoder, kept_as, member, shifting, sliding
from tests.laws.player import Player
from tests.laws.watch import Wishes, everything

MEMBERS = (
    shifting(member("full", causal(), [0, 3], (2, 2), 16, 16), turns=True),
    shifting(member("memory", sliding(3, 8), [1, 4], (2, 1), 32, 32), turns=True),
    shifting(member("chunk", chunked(16), [2], (2, 1), 32, 32), turns=False),
    member("cross", encoder(6), [7], (2, 2), 16, 16),
    member("wide", encoder(6), [8], (2, 1), 32, 33),
)
# How K/V are stored, what goes wrong, and whether it does when torch has done its part already.
WAYS: dict[str, tuple[str, type[BaseException], bool]] = {
    "no memory": ("k=auto,v=int8", torch.OutOfMemoryError, False),
    "interrupted": ("auto", KeyboardInterrupt, True),
}
WORST = Batch((Feed(0, Span(20, 23)), Feed(9, Span(7, 9))))


@cache
def _small(text: str) -> Player:
    """Three sequences, shared and in several runs; two have the same input; some cells are free, and not together."""
    members = [kept_as(m, StoredAs.parse(text)) for m in MEMBERS]
    player = Player(members, [44, 40, 40, 20, 20], wishes=Wishes("head"), limits={})
    player.write_input(0, 4, "cat")
    player.write_input(4, 3, None)
    for feeds in ({0: 6, 1: 3}, {4: 3}, {0: 3}, {1: 2, 0: 1}):
        player.step(player.batch(feeds, {0: {1, 3}}))
    player.fork(0, 2, 8)
    player.drop(4)
    player.step(player.batch({2: 2}))
    player.check()
    return player


def small(text: str) -> Player:
    return deepcopy(_small(text))


def batch(player: Player) -> Batch:
    return player.batch({0: 3, 1: 2, 5: 4}, {5: {1, 3}}, [Feed(2, Span(9, 11), stores=False)])


def words(player: Player, n: int) -> dict[int, tuple[Tensor, Tensor]]:
    """An input, for its layers."""
    k_and_v = {layer: player.words(layer, range(500, 500 + n)) for layer in (7, 8)}
    return {layer: (k, v) for layer, (k, v) in k_and_v.items()}


@cache
def _full(text: str) -> Player:
    """Two and three cells are free. Sequence 0 shares its beginning, which is all of 1; 3 shares nothing."""
    members = [
        kept_as(replace(m, group=replace(m.group, layers=m.group.layers[:1])), StoredAs.parse(text))
        for m in MEMBERS[:2]
    ]
    player = Player(members, [25, 22], wishes=Wishes("head"), limits={})
    player.step(player.batch({0: 4}))
    player.fork(0, 1, 3)
    for feeds in ({0: 3, 3: 2}, {0: 2}, {3: 2}, {0: 2, 3: 5}, {0: 3}):
        player.step(player.batch(feeds))
    player.check()
    assert (player.memory.free()["full"], player.memory.free()["memory"]) == (2, 3)
    return player


def full(text: str) -> Player:
    return deepcopy(_full(text))


def written(player: Player) -> Player:
    """Every layer has put what is new in the open step."""
    step = player.memory.step
    assert step is not None
    for layer in {0, 1, 2, 3, 4} - {layer for layer, _ in step.written}:
        player.memory.put(layer, *player.new(layer))
    return player


def claims(player: Player) -> list[int]:
    """Two consecutive claims on sequence 0."""
    made = player.memory.claims.make
    return [made(0, Span(0, 4)), made(0, Span(4, 10), [10])]


def read_out(player: Player, claim: int) -> tuple[Record, list[Tensor]]:
    with player.memory.claims.reading(claim) as reading:
        return reading.record, list(reading)


Operation = Callable[[Player], Callable[[], Any]]  # what it takes is made beforehand
AT_REST: dict[str, Operation] = {
    "begin": lambda p: partial(p.memory.begin, batch(p)),
    "begin, reserved": lambda p: partial(p.memory.begin, WORST, reserve=True),
    "fork": lambda p: partial(p.memory.fork, 0, 1, 9),
    "fork, new": lambda p: partial(p.memory.fork, 2, 9, 9),
    "shift": lambda p: partial(p.memory.remove, 0, Span(6, 7)),
    "shift of cells that are not shared": lambda p: partial(p.memory.remove, 1, Span(1, 3)),
    "write_input": lambda p: partial(p.memory.inputs.write, 1, 5, words(p, 5), digest="dog"),
    "write_input, new": lambda p: partial(p.memory.inputs.write, 9, 5, words(p, 5)),
    "write_input, known": lambda p: partial(p.memory.inputs.write, 9, 4, words(p, 4), digest="cat"),
    "share_input": lambda p: partial(p.memory.inputs.share, 1, "cat"),
    "share_input, new": lambda p: partial(p.memory.inputs.share, 9, "cat"),
    "claim": lambda p: partial(p.memory.claims.make, 0, Span(3, 10), [10]),
    "assemble": lambda p: partial(p.memory.claims.assemble, 9, claims(p), 10),
    "read out": lambda p: partial(read_out, p, claims(p)[1]),
    "write back": lambda p: partial(p.memory.claims.write_back, *read_out(p, claims(p)[1])),
    "split": lambda p: partial(p.memory.claims.split, claims(p)[1], 7),
    "read_input": lambda p: partial(p.memory.inputs.read, 8, "v", [0, 2]),
    "compact": lambda p: partial(p.memory.storage.compact, 9),
}
WHERE_CELLS_ARE_SCARCE: dict[str, Operation] = {
    "some turned in place": lambda p: partial(p.memory.remove, 0, Span(4, 5)),
    "with keys that others share": lambda p: partial(p.memory.remove, 0, Span(1, 2)),
}
IN_A_STEP: dict[str, Operation] = {
    "put": lambda p: partial(p.memory.put, 0, *p.new(0)),
    "dense": lambda p: partial(dense, written(p), (0, 7)),
    "in order": lambda p: partial(in_order, written(p), 1),
    "attend": lambda p: partial(written(p).memory.attend, 0, torch.ones(11, 2, 16), Scoring(1.0)),
    "commit": lambda p: partial(written(p).memory.commit, {0: torch.tensor(2)}),  # a tensor has to be read
}
NEVER_FAILS: dict[str, Operation] = {
    "remove": lambda p: partial(p.memory.remove, 0, Span(9, 10)),
    "leave_room": lambda p: partial(p.memory.storage.leave_room, 99),
    "drop": lambda p: partial(p.memory.drop, 0),
    "join": lambda p: partial(p.memory.claims.join, *claims(p)),
    "drop a claim": lambda p: partial(p.memory.claims.drop, claims(p)[1]),
    "drop a checkpoint": lambda p: partial(p.memory.claims.drop_checkpoint, claims(p)[1], 10),
    "clear": lambda p: p.memory.clear,
}
NEVER_FAILS_IN_A_STEP: dict[str, Operation] = {
    "commit": lambda p: partial(written(p).memory.commit, {0: 1}),
    "abandon": lambda p: p.memory.abandon,
    "clear": lambda p: p.memory.clear,
}


def in_a_step(text: str) -> Player:
    player = small(text)
    player.dumb.begin(new := batch(player))
    player.memory.begin(new)
    return player


def dense(player: Player, layers: tuple[int, ...]) -> list[Any]:
    return [player.memory.get(layer).dense() for layer in layers]


def in_order(player: Player, layer: int) -> Any:
    return player.memory.get(layer).each_in_order()


def seen_by_all(player: Player, see: Callable[[LayerHistory], Any]) -> list[Any]:
    """The results of `see` for every layer, in a step with a query of every sequence."""
    memory = player.memory
    queries = [Feed(seq, Span(end, end + 1), stores=False) for seq in memory.sequences if (end := memory.length(seq))]
    if not queries:
        return []
    memory.begin(Batch(tuple(queries)))
    seen = [see(memory.get(layer)) for m in player.members for layer in m.group.layers]
    memory.abandon()
    return seen


def spoken(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else x


def outcome(player: Player, answer: Any) -> list[Any]:
    """What was answered, and all that can be seen once the step that is open has been written and kept."""
    memory = player.memory
    if isinstance(answer, Plan):
        answer = (answer.feeds, answer.stored, answer.look_ahead)
        if memory.step is not None and memory.step.reserved:
            memory.abandon()
        else:
            player.dumb.begin(batch(player))
    if memory.step is not None:
        written(player).memory.commit()
    memory.check()
    seen = [
        memory.sequences,
        memory.free(),
        memory.storage.capacity(),
        memory.storage.bytes,
        memory.storage.scratch,
    ]
    seen.append(seen_by_all(player, lambda history: history.each_in_order()))
    for seq in memory.sequences:
        seen += [memory.held(seq), memory.derived(seq), memory.inputs.length(seq), memory._sequences.record(seq).ahead]
    return tree_map(spoken, [answer, seen])


def breaks_everywhere(make: Callable[[str], Player], how: str, operation: Operation) -> int:
    """At how many places it was broken before it got through, and did what it does where nothing ever breaks."""
    text, error, late = WAYS[how]
    player, twin = make(text), make(text)
    act, memory = operation(player), player.memory

    def now() -> list[Any]:
        seen = seen_by_all(player, lambda history: history.dense()) if memory.step is None else []
        return [everything(memory), [[x.numpy().tobytes() for x in dense] for dense in seen]]

    before = now()
    for at in range(2000):
        through, answer = try_with(Fault(at, error, late=late), act)
        if through:
            assert outcome(player, answer) == outcome(twin, operation(twin)())
            return at
        memory.check()
        assert now() == before
    raise AssertionError("it never gets through")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", AT_REST)
def test_an_operation_that_breaks_anywhere_changes_nothing_and_works_afterwards(how, name) -> None:
    assert breaks_everywhere(small, how, AT_REST[name]) > 0


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", WHERE_CELLS_ARE_SCARCE)
def test_so_it_is_where_keys_are_turned_in_the_cells_that_the_removal_frees(how, name) -> None:
    assert breaks_everywhere(full, how, WHERE_CELLS_ARE_SCARCE[name]) > 0


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", IN_A_STEP)
def test_so_it_is_in_a_step(how, name) -> None:
    assert breaks_everywhere(in_a_step, how, IN_A_STEP[name]) > 0


@pytest.mark.parametrize("name", NEVER_FAILS)
def test_giving_back_asks_for_nothing_that_could_be_missing(name) -> None:
    assert breaks_everywhere(small, "no memory", NEVER_FAILS[name]) == 0


@pytest.mark.parametrize("name", NEVER_FAILS_IN_A_STEP)
def test_nor_does_the_end_of_a_step(name) -> None:
    assert breaks_everywhere(in_a_step, "no memory", NEVER_FAILS_IN_A_STEP[name]) == 0
