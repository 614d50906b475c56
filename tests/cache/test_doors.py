"""Arguments of a memory: invalid ones are refused before anything changes, and arguments are never changed."""

from collections.abc import Callable
from functools import partial
from inspect import getmembers, isfunction, signature
from typing import Any

import pytest
import torch

from benchmarks.zeros import put_zeros
from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, NotSupported, UnknownSequence, WrongStage
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal, Input, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.kv.inputs import Inputs
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Scoring
from kvcellar.memory.spans import Span
from tests.laws.watch import everything, nothing_changes

PLANES = (Plane("k", 2, 8), Plane("v", 2, 8))
FULL = Group("full", Causal(), PLANES, (0, 2))
WINDOW = Group("window", Sliding(4), PLANES, (1,))
INPUT = Group("cross", Input(6), PLANES, (7,))
ROOM = 100_000


def memory(*groups: Group, **changes: object) -> Memory:
    given = {"cells": {"full": 20, "window": 20}, "dtype": torch.float32, "device": "cpu", "backend": Reference()}
    return Memory(groups or (FULL, WINDOW), **(given | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("groups", "changes", "says"),
    [
        ((FULL, Group("full", Causal(), PLANES, (5,))), {}, "two groups are called full"),
        ((FULL, Group("window", Causal(), PLANES, (1, 2))), {}, "layer 2 is in two groups"),
        ((Group("full", Causal(), PLANES, (3, 3)),), {}, "layer 3 is in two groups"),
        ((FULL, WINDOW), {"cells": {"full": 20}}, "group window needs a number of cells"),
        ((FULL, WINDOW), {"cells": {"full": -1, "window": 3}}, r"group full needs a number of cells.*'full': -1"),
        (
            (FULL, WINDOW),
            {"backend": {"full": Reference()}},
            "group window needs a backend; there are backends for full",
        ),
        ((FULL, WINDOW), {"dtype": torch.int32}, "int32"),
    ],
)
def test_a_memory_that_cannot_be_is_refused(groups: tuple[Group, ...], changes: dict, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        memory(*groups, **changes)


def test_a_group_may_have_no_cells_and_is_full() -> None:
    kept = memory(cells={"full": 0, "window": 20})
    kept.check()
    with pytest.raises(Exception, match="need 1 cells in group full; 0 are free"), nothing_changes(kept):
        kept.begin(Batch((Feed(0, Span(0, 1)),)))


def test_a_count_that_is_no_whole_number_changes_nothing() -> None:
    kept = memory()
    put_zeros(kept, kept.begin(Batch((Feed(0, Span(0, 3)),))))
    with pytest.raises(BadRequest, match=r"a number of new tokens is a whole number, not 1.5"), nothing_changes(kept):
        kept.commit({0: 1.5})  # pyright: ignore[reportArgumentType]
    kept.commit({0: torch.tensor(2)})  # pyright: ignore[reportArgumentType]  # a count that is a tensor
    assert kept.length(0) == 2


def test_what_is_stored_does_not_remember_how_it_was_computed() -> None:
    """Else every step of a runtime without no_grad() would keep the graphs of all steps before it."""
    kept = memory()
    for seqs in ((0,), (0, 1)):  # one run, and several
        kept.begin(Batch(tuple(Feed(seq, Span(kept.length(seq), kept.length(seq) + 2)) for seq in seqs)))
        k = torch.ones(2 * len(seqs), 2, 8, requires_grad=True)
        for layer in (0, 1, 2):
            kept.put(layer, k * 2, k * 3)
            stored, values, _ = kept.get(layer).dense()
            assert not stored.requires_grad
            assert not values.requires_grad
            assert stored.eq(2).all()
            assert values.eq(3).all()
        kept.commit()


def test_what_was_given_can_be_changed_afterwards() -> None:
    kept = memory()
    kept.begin(Batch((Feed(0, Span(0, 2)),)))
    k = torch.ones(2, 2, 8)
    kept.put(0, k, k)
    k.zero_()
    assert kept.get(0).dense()[0].eq(1).all()


def test_what_is_read_is_a_copy() -> None:
    kept = memory()
    kept.begin(Batch((Feed(0, Span(0, 2)),)))
    for layer in (0, 1, 2):
        kept.put(layer, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    kept.commit()
    before = everything(kept)
    kept.begin(Batch((Feed(0, Span(2, 3)),)))
    for layer in (0, 1, 2):
        for tensor in (*kept.get(layer).dense(), *kept.get(layer).in_order()):
            tensor.zero_()
    kept.abandon()
    assert everything(kept) == before


def test_a_step_that_keeps_nothing_leaves_an_empty_sequence() -> None:
    kept = memory()
    kept.begin(Batch((Feed(0, Span(0, 3)),)))
    kept.commit({0: 0})
    assert (kept.sequences, kept.length(0), kept.free()) == ((0,), 0, kept.storage.capacity())
    kept.drop(0)
    kept.check()


# -- what is refused, and leaves everything as it was -----------------------------------------------------------------


def feed(seq: int, start: int, end: int, *, stores: bool = True) -> Batch:
    return Batch((Feed(seq, Span(start, end), stores),))


def inhabited() -> Memory:
    """Sequence 0 has 9 tokens and an input of 4, sequence 1 has 6 tokens; 3 may have 5; 9 more tokens have room."""
    kept = memory(
        FULL, WINDOW, INPUT,
        cells={"full": 24, "window": 24, "cross": 6}, limits={3: 5}, max_bytes=ROOM,
    )  # fmt: skip
    kept.inputs.write(0, 4, {7: (torch.ones(4, 2, 8), torch.ones(4, 2, 8))}, digest="cat")
    for seq, n in ((0, 9), (1, 6)):
        kept.begin(feed(seq, 0, n))
        for layer in (0, 1, 2):
            kept.put(layer, torch.ones(n, 2, 8), torch.ones(n, 2, 8))
        kept.commit()
    return kept


ROW = torch.ones(1, 2, 8)
AT_REST: dict[str, tuple[Callable[[Memory], Any], type[Exception], str]] = {
    # a step
    "a gap": (lambda m: m.begin(feed(0, 11, 12)), BadRequest, "sequence 0 continues at 9, not at 11"),
    "again": (lambda m: m.begin(feed(0, 8, 9)), BadRequest, "sequence 0 continues at 9, not at 8"),
    "a new one in the middle": (lambda m: m.begin(feed(5, 1, 2)), BadRequest, "sequence 5 continues at 0, not at 1"),
    "one of two": (
        lambda m: m.begin(Batch((Feed(5, Span(0, 2)), Feed(1, Span(7, 8))))),
        BadRequest,
        "sequence 1 continues at 6, not at 7",
    ),
    "twice": (lambda m: m.begin(Batch((*feed(0, 9, 10).feeds, *feed(0, 10, 11).feeds))), BadRequest, "only once"),
    "nothing": (lambda m: m.begin(feed(0, 9, 9)), BadRequest, "at least one new token"),
    "no feeds": (lambda m: m.begin(Batch(())), BadRequest, r"a tuple of one Feed or more, not \(\)"),
    "a list of feeds": (lambda m: m.begin(Batch([Feed(0, Span(9, 10))])), BadRequest, "a tuple of one Feed or more"),
    "a pair for a feed": (lambda m: m.begin(Batch(((0, Span(9, 10)),))), BadRequest, r"made of Feed\(seq, Span"),
    "a pair for a span": (lambda m: m.begin(Batch((Feed(0, (9, 10)),))), BadRequest, r"made of Feed\(seq, Span"),
    "a named sequence": (lambda m: m.begin(feed("one", 0, 1)), BadRequest, "a sequence is a whole number, not 'one'"),
    "a fork to a name": (lambda m: m.fork(0, "one", 3), BadRequest, "a sequence is a whole number, not 'one'"),
    "an input of a name": (lambda m: m.inputs.share("one", "cat"), BadRequest, "a sequence is a whole number"),
    "a huge position": (lambda m: m.can_cut(0, 10**5000), BadRequest, "of at most 63 bits, not a value of type int"),
    "a pair to look ahead": (
        lambda m: m.begin(Batch((Feed(0, Span(9, 12)),), ((0, (9, 10)),))),
        BadRequest,
        "named by a sequence and a Span",
    ),
    "a pair to remove": (lambda m: m.remove(0, (3, 4)), BadRequest, r"a Span, not \(3, 4\)"),
    "half a token": (lambda m: m.begin(feed(0, 9, 9.5)), BadRequest, "a position is a whole number, not 9.5"),
    "a float": (lambda m: m.begin(feed(0, 9.0, 11.0)), BadRequest, "a position is a whole number, not 9.0"),
    "half a token ahead": (
        lambda m: m.begin(Batch((Feed(0, Span(9, 12)),), ((0, Span(9, 10.5)),))),
        BadRequest,
        "a position is a whole number, not 10.5",
    ),
    "a negative pos": (lambda m: m.begin(feed(0, -1, 3)), BadRequest, r"not a span: \[-1,3\)"),
    "beyond its limit": (
        lambda m: m.begin(feed(3, 0, 6)),
        BadRequest,
        "sequence 3 may have 5 tokens; after this step .* 6",
    ),
    "too much": (lambda m: m.begin(feed(5, 0, 10)), CacheFull, "need 10 cells in group full; 9 are free.*cache_bytes"),
    "query of an unknown sequence": (
        lambda m: m.begin(feed(8, 0, 1, stores=False)),
        UnknownSequence,
        "sequence 8 is not in memory",
    ),
    "query before what is held": (
        lambda m: m.begin(feed(0, 7, 8, stores=False)),
        BadRequest,
        r"a query at 7 of sequence 0 looks back to 4; its window layers hold \[5,9\)",
    ),
    "query behind the end": (
        lambda m: m.begin(feed(0, 12, 13, stores=False)),
        BadRequest,
        "sees nothing in its window layers",
    ),
    "never": (
        lambda m: m.begin(feed(0, 24, 25), reserve=True),
        CapacityTooSmall,
        "25 cells in group full, which has 24. Raise cache_bytes, or lower context or step_tokens",
    ),
    "put": (lambda m: m.put(0, ROW, ROW), WrongStage, r"put\(\) needs an open step: begin\(\)"),
    "get": (lambda m: m.get(0), WrongStage, r"get\(\) needs an open step"),
    "attend": (lambda m: m.attend(0, ROW, Scoring(1.0)), WrongStage, "needs an open step"),
    "attend_dense": (lambda m: m.attend(0, ROW, Scoring(1.0), dense=(ROW, ROW)), WrongStage, "needs an open step"),
    "commit": (lambda m: m.commit(), WrongStage, r"commit\(\) needs an open step"),
    "abandon": (lambda m: m.abandon(), WrongStage, r"abandon\(\) needs an open step"),
    # sequences
    "cut below": (lambda m: m.can_cut(0, -1), BadRequest, "-1 is not a position"),
    "cut a token": (lambda m: m.can_cut(0, 2.5), BadRequest, "a position is a whole number, not 2.5"),
    "fork within a token": (lambda m: m.fork(0, 5, 2.5), BadRequest, "a position is a whole number, not 2.5"),
    "fork onto one that is there": (lambda m: m.fork(0, 1, None), BadRequest, "a whole number, not None"),
    "remove half a token": (lambda m: m.remove(0, Span(8, 8.5)), BadRequest, "a position is a whole number, not 8.5"),
    "remove a float": (lambda m: m.remove(0, Span(8.0, 9)), BadRequest, "a position is a whole number, not 8.0"),
    "fork below": (lambda m: m.fork(0, 5, -2), BadRequest, "-2 is not a position"),
    "fork onto itself": (lambda m: m.fork(0, 0, 3), BadRequest, "onto itself"),
    "fork beyond a limit": (
        lambda m: m.fork(0, 3, 9),
        BadRequest,
        "sequence 3 may have 5 tokens; after this fork .* 9",
    ),
    "remove below": (lambda m: m.remove(0, Span(-1, 3)), BadRequest, "not a span"),
    "beyond the end of a window": (lambda m: m.remove(0, Span(3, 2**31 - 1)), NotSupported, "window layers no longer"),
    "shift": (lambda m: m.remove(0, Span(6, 7)), NotSupported, "full layers cannot be shifted.*it is not known how"),
    # inputs
    "a second input": (
        lambda m: m.inputs.write(0, 1, {7: (ROW, ROW)}),
        BadRequest,
        "sequence 0 already has an input, of 4 positions",
    ),
    "another length": (lambda m: m.inputs.write(1, 1, {7: (ROW, ROW)}, digest="cat"), BadRequest, "4 positions, not 1"),
    "an input for text": (lambda m: m.inputs.write(1, 1, {0: (ROW, ROW)}), BadRequest, r"for the layers \[7\]"),
    "a long input": (lambda m: m.inputs.write(1, 7, {7: (ROW, ROW)}), BadRequest, "cross layers take 1 to 6"),
    "half an input": (lambda m: m.inputs.write(1, 1.5, {7: (ROW, ROW)}), BadRequest, "whole number, not 1.5"),
    "no input": (lambda m: m.inputs.write(1, 0, {7: (ROW, ROW)}), BadRequest, "an input of 0 positions"),
    "an input of integers": (
        lambda m: m.inputs.write(1, 1, {7: (ROW, ROW.int())}),
        BadRequest,
        r"v of layer 7 is \[1, 2, 8\] of floats, not \[1, 2, 8\] of torch.int32",
    ),
    "a full input": (
        lambda m: m.inputs.write(1, 3, {7: (ROW.expand(3, 2, 8), ROW.expand(3, 2, 8))}),
        CacheFull,
        "need 3 cells in group cross; 2 are free",
    ),
    "the input of a stranger": (lambda m: m.inputs.read(7, "k", [8]), UnknownSequence, "sequence 8"),
    "inputs of two lengths": (lambda m: m.inputs.read(7, "k", [0, 1]), BadRequest, r"are \[0, 4\] long in layer 7"),
    "text as an input": (lambda m: m.inputs.read(0, "k", [0]), BadRequest, "layer 0"),
    # storage
    "no budget": (lambda m: m.storage.compact(0), BadRequest, "one cell or more"),
    "half a cell to move": (
        lambda m: m.storage.compact(0.5),
        BadRequest,
        "a budget of cells is a whole number, not 0.5",
    ),
    "half a byte": (lambda m: m.storage.leave_room(0.5), BadRequest, "scratch is a whole number, not 0.5"),
    "no such group": (lambda m: m.storage.compact(9, "half"), BadRequest, "the groups are full, window, cross"),
    "no room for a step": (lambda m: m.storage.leave_room(ROOM), CapacityTooSmall, "lower cells or step_tokens"),
    "less than nothing": (lambda m: m.storage.leave_room(-1), BadRequest, "scratch is 0 bytes or more"),
}


@pytest.mark.parametrize("name", AT_REST)
def test_what_cannot_be_is_refused_with_the_reason(name: str) -> None:
    act, error, says = AT_REST[name]
    kept = inhabited()
    with nothing_changes(kept), pytest.raises(error, match=says):
        act(kept)
    kept.begin(Batch((Feed(0, Span(9, 11)), Feed(1, Span(6, 7)), Feed(3, Span(0, 5)))))


IN_A_STEP: dict[str, tuple[Callable[[Memory], Any], type[Exception], str]] = {
    "begin": (
        lambda m: m.begin(feed(1, 6, 7)),
        WrongStage,
        r"begin\(\) while a step is open: commit\(\) or abandon\(\)",
    ),
    "reserve": (lambda m: m.begin(feed(1, 6, 7), reserve=True), WrongStage, r"begin\(\) while a step is open"),
    "fork": (lambda m: m.fork(0, 5, 1), WrongStage, r"fork\(\) while"),
    "remove": (lambda m: m.remove(0, Span(3, 9)), WrongStage, r"remove\(\) while"),
    "drop": (lambda m: m.drop(1), WrongStage, r"drop\(\) while"),
    "compact": (lambda m: m.storage.compact(9), WrongStage, r"compact\(\) while"),
    "write_input": (lambda m: m.inputs.write(1, 1, {7: (ROW, ROW)}), WrongStage, r"inputs.write\(\) while"),
    "share_input": (lambda m: m.inputs.share(1, "cat"), WrongStage, r"inputs.share\(\) while"),
    "more rows": (
        lambda m: m.put(2, NEW.repeat(2, 1, 1), NEW),
        BadRequest,
        r"k of layer 2 is \[3, 2, 8\] of floats, not \[6, 2, 8\]",
    ),
    "fewer rows": (
        lambda m: m.put(2, NEW, NEW[1:]),
        BadRequest,
        r"v of layer 2 is \[3, 2, 8\] of floats, not \[2, 2, 8\]",
    ),
    "one row for all": (lambda m: m.put(2, ROW, ROW), BadRequest, r"k .* not \[1, 2, 8\]"),
    "no rows": (lambda m: m.put(2, NEW[0], NEW), BadRequest, r"k .* not \[2, 8\]"),
    "narrow": (lambda m: m.put(2, NEW, NEW[..., 1:]), BadRequest, r"v .* not \[3, 2, 7\]"),
    "heads": (lambda m: m.put(2, NEW[:, :1], NEW), BadRequest, r"k .* not \[3, 1, 8\]"),
    "integers": (lambda m: m.put(2, NEW.long(), NEW), BadRequest, "of floats, not .* of torch.int64"),
    "complex": (lambda m: m.put(2, NEW, NEW.cfloat()), BadRequest, "v .* of torch.complex64"),
    "twice": (lambda m: m.put(0, NEW, NEW), BadRequest, "layer 0 was given its k and v of this step before"),
    "no such layer": (lambda m: m.put(60, NEW, NEW), BadRequest, "layer 60 is in no group"),
    "get of no such layer": (lambda m: m.get(60), BadRequest, "layer 60 is in no group"),
    "an input": (lambda m: m.put(7, NEW, NEW), BadRequest, "layer 7 remembers an input, which inputs.write"),
    "too many": (lambda m: m.commit({0: 3}), BadRequest, "3 of 2 new tokens of sequence 0"),
    "too few": (lambda m: m.commit({5: -1}), BadRequest, "-1 of 1 new tokens of sequence 5"),
    "of a stranger": (lambda m: m.commit({0: 1, 99: 0}), BadRequest, r"sequences \[99\] store nothing in this step"),
    "accepted of a query": (lambda m: m.commit({1: 0}), BadRequest, r"sequences \[1\] store nothing in this step"),
    "a part of a span": (lambda m: m.commit({0: 1}), BadRequest, r"1 new tokens of sequence 0 end within \[9,11\)"),
}
NEW = torch.full((3, 2, 8), 2.0)


@pytest.mark.parametrize("name", IN_A_STEP)
def test_what_cannot_be_in_a_step_is_refused_and_the_step_goes_on(name: str) -> None:
    act, error, says = IN_A_STEP[name]
    kept = inhabited()
    feeds = Feed(0, Span(9, 11)), Feed(1, Span(5, 6), stores=False), Feed(5, Span(0, 1))
    kept.begin(Batch(feeds, ((0, Span(9, 11)),)))
    kept.put(0, NEW, NEW)
    with nothing_changes(kept), pytest.raises(error, match=says):
        act(kept)
    for layer in (0, 1, 2):
        if layer:
            kept.put(layer, NEW, NEW)
        k, v, visible = kept.get(layer).dense()
        assert torch.equal(k, v)
        assert [set(k[row].flatten().tolist()) for row in visible] == [{1.0, 2.0}, {1.0, 2.0}, {1.0}, {2.0}]
    kept.commit({0: 2})
    kept.check()
    assert (kept.length(0), kept.length(1), kept.length(5)) == (11, 6, 1)


def test_a_reserved_step_is_not_kept() -> None:
    kept = inhabited()
    with nothing_changes(kept):
        kept.begin(feed(0, 20, 23), reserve=True)
        with pytest.raises(WrongStage, match="reserved step, which stored nothing; abandon"):
            kept.commit()
        kept.abandon()


def test_a_memory_that_does_not_fit_its_cap_says_which_number_to_change() -> None:
    need = inhabited().storage.bytes + inhabited().storage.staging
    says = rf"{need} bytes would be needed.*{need - 1} are allowed. Raise max_bytes \(cache_bytes\), or lower cells"
    with pytest.raises(CapacityTooSmall, match=says):
        memory(FULL, WINDOW, INPUT, cells={"full": 24, "window": 24, "cross": 6}, max_bytes=need - 1)


def test_a_memory_of_inputs_alone_remembers_nothing() -> None:
    with pytest.raises(BadRequest, match="needs a group whose layout is not Input"):
        memory(INPUT, cells={"cross": 6})


def test_a_put_that_was_refused_can_be_done_right() -> None:
    kept = inhabited()
    kept.begin(feed(0, 9, 12))
    for wrong in (NEW[1:], NEW.int()):
        with pytest.raises(BadRequest):
            kept.put(0, wrong, NEW)
    kept.put(0, NEW.bfloat16(), NEW.double())
    k, v, _ = kept.get(0).dense()
    assert torch.equal(k, v)
    assert k.dtype == torch.float32
    assert (k == 2).sum() == NEW.numel()


@pytest.mark.parametrize("part", [Memory, Inputs])
def test_an_unknown_sequence_has_no_length_and_everything_else_refuses_it(part: type) -> None:
    """Every method that takes the number of a sequence, but `inputs.write` and `inputs.share`, which may begin one."""
    kept = inhabited()
    owner: Any = kept if part is Memory else kept.inputs
    values = {"seq": 8, "src": 8, "seqs": [8], "dst": 5, "pos": 0, "upto": 0, "span": Span(0, 1)}
    values |= {"layer": 7, "plane": "k"}
    tried = set()
    for name, method in getmembers(part, isfunction):
        names = list(signature(method).parameters)[1:]
        if name.startswith("_") or not {"seq", "src", "seqs"} & set(names) or name in ("write", "share"):
            continue
        call = partial(getattr(owner, name), *(values[each] for each in names))
        if name in ("has", "length"):
            assert call() == 0
        else:
            with nothing_changes(kept), pytest.raises(UnknownSequence, match="sequence 8 is not in memory"):
                call()
        tried.add(name)
    wanted = {"has", "length", "held", "derived", "can_cut", "fork", "remove", "drop"}
    assert tried >= (wanted if part is Memory else {"length", "read"})
