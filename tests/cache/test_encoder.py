"""What an encoder made of an input: written once, seen whole by all rows of its sequences, shared and freed so."""

import re
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull, CapacityTooSmall, UnknownSequence, WrongStage
from kvcellar.memory.attention.reference import Reference, attend_dense
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Input, Sliding
from kvcellar.memory.kv import inputs
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Rotation, Scoring, StoredAs
from kvcellar.memory.spans import Span
from tests.laws import identity
from tests.laws.watch import highest, nothing_changes

SIZES = {0: (2, 16, 16), 1: (2, 16, 16), 2: (2, 16, 16), 10: (2, 16, 16), 11: (2, 16, 16), 12: (1, 32, 64)}
TEXT, INPUT = (0, 1, 2), (10, 11, 12)
FIRST = 1000  # the words of inputs begin here, those of texts at 0
PLAIN = Scoring(scale=0.25)


def groups(most: int = 20) -> list[Group]:
    """Two kinds of layers for text, two for inputs; those come first, in any order."""

    def planes(layer: int) -> tuple[Plane, ...]:
        heads, k, v = SIZES[layer]
        return Plane("k", heads, k), Plane("v", heads, v)

    return [
        Group("cross", Input(most), planes(10), (10, 11)),
        Group("full", Causal(), planes(0), (0, 1), no_shift=None),
        Group("wide", Input(most), planes(12), (12,)),
        Group("window", Sliding(3), planes(2), (2,), no_shift=None),
    ]


def memory(*, cells: int = 60, inputs: int = 40, backend: Backend | None = None, **more: int) -> Memory:
    counts = {"full": cells, "window": cells, "cross": inputs, "wide": inputs}
    return Memory(groups(**more), cells=counts, dtype=torch.float32, device="cpu", backend=backend or Sdpa())


def words(layer: int, tokens: range) -> tuple[Tensor, Tensor]:
    heads, k, v = SIZES[layer]
    return (
        identity.vectors(list(tokens), layer, 0, heads, k),
        identity.vectors(list(tokens), layer, 1, heads, v),
    )


def of(name: int, n: int) -> dict[int, tuple[Tensor, Tensor]]:
    """The planes of input `name`: its words are FIRST + 100 * name and following."""
    return {layer: words(layer, _tokens(name, n)) for layer in INPUT}


def _tokens(name: int, n: int) -> range:
    return range(FIRST + 100 * name, FIRST + 100 * name + n)


def step(mem: Memory, feeds: Mapping[int, int], *, commit: bool = True) -> None:
    """So many new tokens for each sequence, whose word is 100 * sequence + position; left open unless `commit`."""
    starts = {seq: mem.length(seq) for seq in feeds}
    mem.begin(Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items())))
    for layer in TEXT:
        parts = [words(layer, range(100 * s + starts[s], 100 * s + starts[s] + n)) for s, n in feeds.items()]
        mem.put(layer, *(torch.cat(planes) for planes in zip(*parts, strict=True)))
    if commit:
        mem.commit()


def seen(mem: Memory, layer: int) -> list[set[int]]:
    """The words that each row of the open step sees in a layer: keys and values spell the same."""
    k, v, visible = mem.get(layer).dense()
    keys, values = (identity.spelled(x, layer, plane) for plane, x in enumerate((k, v)))
    assert keys == values
    assert len(set(keys)) == len(keys), "a cell is there twice"
    return [{keys[column] for column in row.nonzero().flatten().tolist()} for row in visible]


# -- what is seen -----------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    inputs=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    turns=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 4), min_size=1), min_size=1, max_size=4),
)
def test_every_row_sees_all_of_its_own_input_and_nothing_of_others(inputs, turns):
    mem = memory(cells=200, inputs=100)
    for seq, n in enumerate(inputs):
        if n:
            assert mem.inputs.write(seq, n, of(seq, n))
    lengths = dict(enumerate(inputs))
    for feeds in turns:
        step(mem, feeds, commit=False)
        expected = [set(_tokens(seq, lengths.get(seq, 0))) for seq, rows in feeds.items() for _ in range(rows)]
        for layer in INPUT:
            assert seen(mem, layer) == expected
        mem.check()
        mem.commit()
    assert {seq: mem.inputs.length(seq) for seq in lengths} == lengths
    mem.check()


@pytest.mark.parametrize("backend", [Sdpa(), Reference()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_to_an_input_is_that_of_the_dense_view(backend, sinks):
    mem = memory(backend=backend)
    draw = torch.Generator().manual_seed(3)
    for seq, n in ((0, 7), (1, 1), (3, 20)):
        shapes = {layer: SIZES[layer] for layer in INPUT}
        planes = {
            layer: (torch.randn(n, g, k, generator=draw), torch.randn(n, g, v, generator=draw))
            for layer, (g, k, v) in shapes.items()
        }
        mem.inputs.write(seq, n, planes)
    step(mem, {0: 3, 1: 5, 2: 2, 3: 1}, commit=False)
    for layer in INPUT:
        q = torch.randn(11, 4, SIZES[layer][1], generator=draw)
        scoring = Scoring(0.3, sinks=torch.randn(4, generator=draw) if sinks else None)
        k, v, visible = mem.get(layer).dense()
        expected = attend_dense(q.double(), k, v, visible, scoring).float()
        for got in (mem.attend(layer, q, scoring), mem.attend(layer, q, scoring, dense=(k, v))):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert expected[:8].abs().min() > 0
        assert not expected[8:10].any(), "sequence 2 has no input: its rows answer zeros"


def test_without_inputs_the_result_is_zero():
    mem = memory()
    step(mem, {0: 2, 1: 1}, commit=False)
    for layer in INPUT:
        _, k, v = SIZES[layer]
        assert [len(x) for x in mem.get(layer).dense()] == [0, 0, 3]
        assert torch.equal(mem.attend(layer, torch.randn(3, 4, k), PLAIN), torch.zeros(3, 4, v))


def test_a_row_that_only_asks_sees_the_input_too():
    mem = memory()
    mem.inputs.write(0, 6, of(0, 6))
    step(mem, {0: 4})
    mem.begin(Batch((Feed(0, Span(3, 5), stores=False),)))
    assert seen(mem, 10) == [set(_tokens(0, 6))] * 2
    assert seen(mem, 0) == [{0, 1, 2, 3}] * 2
    mem.abandon()


def test_an_input_is_read_between_steps_too():
    mem = memory()
    mem.inputs.write(4, 6, of(4, 6))
    mem.inputs.write(5, 6, of(5, 6))
    mem.inputs.write(6, 2, of(6, 2))
    for layer in INPUT:
        for plane, name in enumerate("kv"):
            stored = mem.inputs.read(layer, name, [5, 4, 5])
            spelt = [identity.spelled(row, layer, plane) for row in stored]
            assert spelt == [list(_tokens(seq, 6)) for seq in (5, 4, 5)]
    with pytest.raises(BadRequest, match=re.escape("[2, 6]")):
        mem.inputs.read(10, "k", [4, 6])
    with pytest.raises(BadRequest, match="layer 0"):
        mem.inputs.read(0, "k", [4])


@pytest.mark.parametrize("kind", ["int8", "int4+hadamard", "fp8"])
def test_an_input_can_be_stored_in_fewer_bits(kind):
    stored = StoredAs.parse(f"k={kind},v={kind.partition('+')[0]}")
    planes = Plane("k", 2, 16, stored.k), Plane("v", 2, 16, stored.v)
    text = Group("full", Causal(), (Plane("k", 2, 16), Plane("v", 2, 16)), (0,))
    mem = Memory([text, Group("cross", Input(9), planes, (10,))], cells={"full": 9, "cross": 9}, dtype=torch.float32,
                 device="cpu", backend=Sdpa())  # fmt: skip
    k, v = torch.randn(2, 7, 2, 16, generator=torch.Generator().manual_seed(1))
    mem.inputs.write(0, 7, {10: (k, v)})
    mem.begin(Batch((Feed(0, Span(0, 1)),)))
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    stored_k, stored_v, visible = mem.get(10).dense()
    assert visible.all()
    torch.testing.assert_close(mem.attend(10, q, PLAIN), attend_dense(q, stored_k, stored_v, visible, PLAIN))
    assert (stored_k - k).norm() < 0.2 * k.norm()


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_an_input_is_shared_by_forks_stays_through_edits_and_is_free_when_the_last_one_goes():
    mem = memory()
    free = mem.free()
    mem.inputs.write(0, 8, of(0, 8))
    assert mem.free() == free | {"cross": 32, "wide": 32}
    step(mem, {0: 9})
    assert mem.fork(0, 1, upto=9) == 9
    assert mem.fork(0, 2, upto=0) == 0
    assert mem.free()["cross"] == 32, "nothing was copied"
    assert mem.remove(0, Span(8, 9)) == 8
    assert mem.remove(1, Span(0, 9)) == 0
    assert [mem.inputs.length(seq) for seq in (0, 1, 2, 3)] == [8, 8, 8, 0]
    assert mem.held(1)["cross"] == Span(0, 8)
    mem.drop(0)
    mem.check()
    step(mem, {1: 1, 2: 2}, commit=False)
    assert seen(mem, 12) == [set(_tokens(0, 8))] * 3
    mem.abandon()
    mem.inputs.write(7, 3, of(7, 3))
    assert mem.fork(2, 7, upto=0) == 0
    assert mem.inputs.length(7) == 8, "the sequence that it replaces is dropped with its input"
    mem.drop(1)
    mem.drop(2)
    assert mem.free()["wide"] == 32
    mem.drop(7)
    assert mem.free() == free


def test_a_shift_of_the_text_passes_the_input_by():
    mem = Memory(
        [g for g in groups() if g.name != "window"],
        cells={"full": 60, "cross": 40, "wide": 40}, dtype=torch.float32, device="cpu", backend=Sdpa(),
    )  # fmt: skip
    mem.inputs.write(0, 5, of(0, 5))
    mem.begin(Batch((Feed(0, Span(0, 12)),)))
    for layer in (0, 1):
        mem.put(layer, *words(layer, range(12)))
    mem.commit()
    mem.fork(0, 1, upto=12)
    assert mem.remove(0, Span(2, 7)) == 7
    mem.check()
    for seq in (0, 1):
        mem.begin(Batch((Feed(seq, Span(mem.length(seq), mem.length(seq) + 1)),)))
        assert seen(mem, 11) == [set(_tokens(0, 5))]
        mem.abandon()
    assert mem.can_cut(0, 4) == 4
    assert mem.free()["cross"] == 35


def test_who_has_the_same_digest_shares_the_cells_and_nothing_is_written_again():
    mem = memory()
    assert not mem.inputs.share(0, "cat")
    assert not mem.has(0)
    assert mem.inputs.write(0, 8, of(0, 8), digest="cat")
    with mock.patch.object(inputs, "write_planes", side_effect=AssertionError("written again")):
        assert not mem.inputs.write(1, 8, of(1, 8), digest="cat")
        assert mem.inputs.share(2, "cat")
    assert mem.inputs.write(3, 8, of(3, 8), digest="dog")
    assert mem.free()["cross"] == 40 - 16
    step(mem, {0: 1, 1: 2, 2: 1, 3: 1}, commit=False)
    assert seen(mem, 11) == [set(_tokens(0, 8))] * 4 + [set(_tokens(3, 8))]
    mem.commit()
    mem.fork(1, 4, upto=2)
    for seq in (0, 1, 2):
        mem.drop(seq)
        mem.check()
    assert mem.inputs.share(5, "cat"), "a fork has the digest of what it was forked from"
    mem.drop(4)
    mem.drop(5)
    assert not mem.inputs.share(6, "cat"), "the input is still shared"
    assert mem.inputs.write(6, 2, of(6, 2), digest="cat")
    mem.clear()
    assert mem.free() == mem.storage.capacity()
    assert not mem.inputs.share(1, "dog")


def test_an_input_that_is_imported_is_known_by_its_digest_once():
    mem, other = memory(), memory()
    mem.inputs.write(0, 20, of(0, 20), digest="cat")
    step(mem, {0: 3})
    claim = mem.claims.make(0, Span(0, 3))
    with mem.claims.reading(claim) as reading:
        record, chunks = reading.record, list(reading)
    first, second = (other.claims.write_back(record, chunks) for _ in range(2))
    other.check()
    assert [other.claims.of(number).digest for number in (first, second)] == ["cat", None]
    assert other.inputs.share(0, "cat")
    assert other.inputs.length(0) == 20
    other.claims.drop(first)
    assert other.inputs.share(1, "cat"), "a sequence has it"


def test_inputs_move_together():
    mem = memory()
    for seq, n in enumerate((7, 9, 5, 6)):
        mem.inputs.write(seq, n, of(seq, n), digest=str(seq))
    mem.fork(1, 5, upto=0)
    mem.drop(0)
    mem.drop(2)
    while mem.storage.compact(3):
        mem.check()
    assert [highest(store.cells) for store in mem.storage.stores if store.group.of_input] == [15, 15]
    step(mem, {1: 1, 3: 2, 5: 1}, commit=False)
    for layer in INPUT:
        assert seen(mem, layer) == [set(_tokens(1, 9)), *[set(_tokens(3, 6))] * 2, set(_tokens(1, 9))]


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_an_input_that_cannot_be_is_refused_and_nothing_has_changed():
    mem = memory(inputs=10)
    mem.inputs.write(0, 8, of(0, 8), digest="cat")
    short = {layer: planes for layer, planes in of(1, 2).items() if layer != 11}
    more = of(1, 2) | {0: words(0, range(2))}
    with nothing_changes(mem):
        with pytest.raises(BadRequest, match="has an input, of 8"):
            mem.inputs.write(0, 2, of(1, 2))
        with pytest.raises(BadRequest, match="has an input, of 8"):
            mem.inputs.share(0, "cat")
        with pytest.raises(BadRequest, match="8 positions, not 2"):
            mem.inputs.write(1, 2, of(1, 2), digest="cat")
        with pytest.raises(CacheFull) as full:
            mem.inputs.write(1, 3, of(1, 3), digest="dog")
        assert (full.value.group, full.value.need, full.value.free) == ("cross", 3, 2)
        for planes in (short, more, {}):
            with pytest.raises(BadRequest, match="for the layers"):
                mem.inputs.write(1, 2, planes)
        with pytest.raises(BadRequest, match="of floats, not"):
            mem.inputs.write(1, 1, of(1, 2))
        for n in (0, 21):
            with pytest.raises(BadRequest, match="take 1 to 20"):
                mem.inputs.write(1, n, of(1, n))
        with pytest.raises(UnknownSequence):
            mem.fork(1, 2, upto=0)
    step(mem, {0: 1}, commit=False)
    for call in (lambda: mem.inputs.write(1, 1, of(1, 1)), lambda: mem.inputs.share(1, "cat")):
        with pytest.raises(WrongStage):
            call()
    with pytest.raises(BadRequest, match=r"inputs.write"):
        mem.put(10, *words(10, range(1)))
    mem.abandon()
    assert mem.inputs.write(1, 2, of(1, 2)), "as much as is free"


def test_a_full_input_does_not_stop_the_text():
    mem = memory(inputs=4)
    mem.inputs.write(0, 4, of(0, 4))
    step(mem, {0: 9})
    step(mem, {0: 1}, commit=False)
    assert seen(mem, 10) == [set(_tokens(0, 4))]


def test_the_worst_case_has_the_longest_inputs():
    mem = memory(inputs=20)
    with nothing_changes(mem):
        mem.begin(Batch((Feed(0, Span(10, 12)), Feed(1, Span(3, 4)))), reserve=True)
        assert mem.get(10).dense()[2].sum(1).tolist() == [20, 20, 20]
        assert mem.attend(12, torch.zeros(3, 4, 32), PLAIN).shape == (3, 4, 64)
        mem.abandon()
    with pytest.raises(CapacityTooSmall, match="20 positions"):
        memory(inputs=19).begin(Batch((Feed(0, Span(0, 1)),)), reserve=True)


def test_a_memory_of_inputs_alone_and_keys_that_turn_are_refused():
    cross = groups()[0]
    with pytest.raises(BadRequest, match="tokens"):
        Memory([cross], cells={"cross": 9}, dtype=torch.float32, device="cpu", backend=Sdpa())
    with pytest.raises(BadRequest, match="never rotated"):
        Group("cross", Input(4), cross.planes, (10,), rotations={10: {"k": Rotation((1.0,) * 8)}})
    with pytest.raises(BadRequest, match="at most 0"):
        Input(0)
    text = Memory([groups()[1]], cells={"full": 9}, dtype=torch.float32, device="cpu", backend=Sdpa())
    with pytest.raises(BadRequest, match="no layers for an input"):
        text.inputs.write(0, 2, {})
    assert text.inputs.length(0) == 0
