"""Claims as bytes, beside what `tests/laws` plays: other memories, state rows, and steps while a claim is read out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcellar.errors import BadRequest, CacheFull
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.kv.record import Mark, Record, Stretch
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Arrangement, Plane, Recurrent, StatePlane, Storage
from kvcellar.memory.spans import Span
from tests.laws.watch import Wishes, nothing_changes

STORAGES = {"auto": None, "int4": Storage("int4"), "fp8": Storage("fp8"), "int8+hadamard": Storage("int8", True)}


def memory(
    storage: str = "auto",
    *,
    arrangement: Arrangement = "token",
    cells: int = 80,
    size: int = 16,
    rows: int = 6,
) -> Memory:
    planes = (Plane("k", 2, size, STORAGES[storage]), Plane("v", 2, 33, STORAGES[storage]))
    return Memory(
        [Group("full", Causal(), planes, (0, 3)), Group("window", Sliding(4), planes, (1,))],
        cells={"full": cells, "window": cells},
        dtype=torch.float32,
        device="cpu",
        backend=Wishes(arrangement),
        recurrent=Recurrent({2: (StatePlane("sum", (3,), "float32"), StatePlane("conv", (2, 2), "bfloat16"))}),
        rows=rows,
    )


def feed(made: Memory, seq: int, n: int, draw: torch.Generator) -> None:
    start = made.length(seq)
    plan = made.begin(Batch((Feed(seq, Span(start, start + n)),)))
    for layer in (0, 3, 1):
        k, v = (
            torch.randn(n, 2, plane.size, generator=draw)
            for group in made.storage.groups
            if layer in group.layers
            for plane in group.planes
        )
        made.put(layer, k, v)
    made.states.write(2, plan.states, {"sum": torch.randn(1, 3, generator=draw), "conv": torch.randn(1, 2, 2)})
    made.commit()


def filled(**how: object) -> tuple[Memory, int]:
    """A memory whose sequence 0 has two checkpoints with windows that overlap, and the claim on all of it."""
    made = memory(**how)  # pyright: ignore[reportArgumentType]
    draw = torch.Generator().manual_seed(0)
    feed(made, 7, 3, draw)
    feed(made, 0, 9, draw)
    first = made.claims.make(0, Span(0, 9), [9])
    feed(made, 7, 2, draw)
    feed(made, 0, 2, draw)
    made.claims.join(first, made.claims.make(0, Span(9, 11), [11]))
    return made, first


def read_out(made: Memory, claim: int) -> tuple[Record, list[Tensor]]:
    with made.claims.reading(claim) as reading:
        return reading.record, list(reading)


def as_numbers(chunks: list[Tensor]) -> list[list[int]]:
    return [chunk.tolist() for chunk in chunks]


@pytest.mark.parametrize("storage", STORAGES)
def test_another_memory_of_the_shape_takes_a_claim_over_bit_for_bit(storage) -> None:
    made, claim = filled(storage=storage)
    record, chunks = read_out(made, claim)
    other = memory(storage, arrangement="head", cells=50)
    copy = other.claims.write_back(record, chunks)
    other.check()
    again, same = read_out(other, copy)
    assert (again, as_numbers(same)) == (record, as_numbers(chunks))
    for pos in (9, 11):
        other.claims.assemble(pos, [copy], pos)
        made.claims.assemble(100 + pos, [claim], pos)
    query = Batch(tuple(Feed(pos, Span(pos, pos + 1), stores=False) for pos in (9, 11)))
    theirs = Batch(tuple(Feed(100 + pos, Span(pos, pos + 1), stores=False) for pos in (9, 11)))
    ours, wanted = other.begin(query), made.begin(theirs)
    for layer in (0, 3, 1):
        for a, b in zip(other.get(layer).dense(), made.get(layer).dense(), strict=True):
            assert torch.equal(a, b)
    for name, values in other.states.read(2, ours.states).items():
        assert torch.equal(values, made.states.read(2, wanted.states)[name])


def test_cells_of_a_claim_that_is_imported_follow_those_of_the_one_before() -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    other = memory(cells=400, rows=8)
    first = other.claims.write_back(record, chunks)
    other.claims.write_back(record, chunks)
    (run,) = other.claims.of(first).tables[0].runs
    for after, follows in ((None, False), (first, True)):
        (found,) = other.claims.of(other.claims.write_back(record, chunks, after)).tables[0].runs
        assert (found.cell == run.end) is follows
    other.check()


@pytest.mark.parametrize("offset", range(1, 9))
def test_chunks_at_any_address_are_imported_bit_for_bit(offset) -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    moved = [torch.cat([torch.zeros(offset, dtype=torch.uint8), chunk])[offset:] for chunk in chunks]
    other = memory()
    assert as_numbers(read_out(other, other.claims.write_back(record, moved))[1]) == as_numbers(chunks)


def test_windows_that_overlap_are_read_out_once_and_share_their_cells_again() -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    assert [one.group for one in record.stretches] == ["full", "window"]
    assert record.stretches[1].span == Span(6, 11)
    other = memory()
    other.claims.write_back(record, chunks)
    assert other.free() == {"full": 80 - 11, "window": 80 - 5}


def test_steps_and_compaction_between_two_chunks_change_nothing_of_what_is_read_out() -> None:
    made, claim = filled()
    _, chunks = read_out(made, claim)
    draw = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    with made.claims.reading(claim) as reading:
        for number, chunk in enumerate(reading):
            seen.append(chunk)
            if number == 0:
                made.drop(0)
                made.claims.drop(claim)
                made.drop(7)
            moved = made.storage.compact(9)
            feed(made, 50 + number, 2, draw)
            made.drop(50 + number)
            made.check()
            assert number or moved
    assert as_numbers(seen) == as_numbers(chunks)
    made.check()
    assert made.free() == made.storage.capacity()
    assert made.rows.free == made.rows.capacity


def test_memories_of_other_groups_are_told_apart() -> None:
    shapes = {
        memory().claims.shape,
        memory("int4").claims.shape,
        memory("int8+hadamard").claims.shape,
        memory(size=8).claims.shape,
    }
    assert len(shapes) == 4
    assert memory(arrangement="head", cells=20).claims.shape == memory().claims.shape


def test_too_few_cells_or_rows_are_said_before_anything_is_taken() -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    for other, error in ((memory(cells=10), "cells in group full"), (memory(rows=1), "rows")):
        with nothing_changes(other), pytest.raises(CacheFull, match=error):
            other.claims.write_back(record, chunks)
        assert other.rows.free == other.rows.capacity


def test_a_record_that_contradicts_itself_is_refused_before_anything_is_allocated() -> None:
    made, claim = filled()
    record, chunks = read_out(made, claim)
    full, window = record.stretches
    far = Span(0, 1 << 40)
    nine, eleven = record.checkpoints
    wrong = [
        replace(record, span=Span(0, 12)),
        replace(record, span=far, stretches=(Stretch("full", far), window)),
        replace(record, stretches=(full,)),
        replace(record, stretches=(full, full, window)),
        replace(record, stretches=(full, Stretch("window", Span(7, 11)))),
        replace(record, stretches=(full, Stretch("other", window.span))),
        replace(record, checkpoints=(eleven, nine)),
        replace(record, checkpoints=(replace(nine, pos=8), eleven)),
        replace(record, checkpoints=(Mark(9, ()), eleven)),
        replace(record, checkpoints=(Mark(9, (("window", ((5, Span(6, 9)),)),)), eleven)),
        replace(record, checkpoints=(Mark(9, (("window", ((0, Span(6, 9)),)),)), eleven)),
        replace(record, ahead=(Span(8, 10),)),
        replace(record, ahead=(Span(10, 12),)),
        replace(record, derived=11),
    ]
    other = memory()
    for one in wrong:
        with nothing_changes(other), pytest.raises((BadRequest, CacheFull)):
            other.claims.write_back(one, chunks)
