"""Claims beside what `tests/laws` plays: state rows, compaction, and what is said of what is refused."""

import pytest
import torch

from kvcellar.errors import BadRequest, WrongStage
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane, Recurrent, StatePlane
from kvcellar.memory.spans import Span
from tests.laws.watch import highest

PLANES = (Plane("k", 1, 4), Plane("v", 1, 4))


def memory(*, recurrent: bool = True, cells: int = 64, rows: int = 8) -> Memory:
    return Memory(
        [Group("full", Causal(), PLANES, (0,)), Group("window", Sliding(4), PLANES, (1,))],
        cells={"full": cells, "window": cells},
        dtype=torch.float32,
        device="cpu",
        backend=Sdpa(),
        recurrent=Recurrent({2: (StatePlane("sum", (1,), "float32"),)}) if recurrent else None,
        rows=rows if recurrent else 0,
    )


def feed(made: Memory, seq: int, n: int) -> None:
    """Tokens whose K and V are their positions; the state is their sum."""
    start = made.length(seq)
    plan = made.begin(Batch((Feed(seq, Span(start, start + n)),)))
    values = torch.arange(start, start + n).float().view(n, 1, 1).expand(n, 1, 4)
    for layer in (0, 1):
        made.put(layer, values, values)
    for segments in (plan.states,) if plan.states else ():
        before = made.states.read(2, segments)["sum"]
        made.states.write(2, segments, {"sum": before + values[:, 0, 0].sum()})
    made.commit()


def state(made: Memory, seq: int) -> float:
    """What a step would begin with."""
    plan = made.begin(Batch((Feed(seq, Span(made.length(seq), made.length(seq) + 1)),)))
    found = float(made.states.read(2, plan.states)["sum"])
    made.abandon()
    return found


def test_a_state_row_lives_as_long_as_a_claim_has_its_checkpoint() -> None:
    made = memory()
    feed(made, 0, 6)
    first = made.claims.make(0, Span(0, 6), [6])
    feed(made, 0, 3)
    second = made.claims.make(0, Span(6, 9), [9])
    assert made.claims.exclusive(second) == ({"full": 0, "window": 0}, 0)
    made.drop(0)
    made.check()
    assert made.claims.exclusive(first) == ({"full": 6, "window": 3}, 1)
    assert made.claims.exclusive(second, 9) == ({"full": 0, "window": 3}, 1)
    free = made.rows.free
    assert free is not None
    made.claims.drop_checkpoint(first, 6)
    assert made.rows.free == free + 1
    made.claims.assemble(1, [first, second], 9)
    made.check()
    assert (made.length(1), state(made, 1)) == (9, sum(range(9)))
    feed(made, 1, 2)
    assert state(made, 1) == sum(range(11))
    made.clear()
    made.check()
    assert made.rows.free == made.rows.capacity
    assert made.free() == made.storage.capacity()


def test_rows_that_claims_hold_are_not_given_up_for_others() -> None:
    made = memory(rows=6)
    claims: list[int] = []
    for seq in range(3):
        feed(made, seq, 2 + seq)
        claims.append(made.claims.make(seq, Span(0, 2 + seq), [2 + seq]))
        made.drop(seq)
    for seq in range(10, 40):
        feed(made, seq, 3)
        made.fork(seq, seq + 100, 3)
        made.drop(seq + 100)
        made.drop(seq)
        made.check()
    for number, claim in enumerate(claims):
        made.claims.assemble(number, [claim], 2 + number)
        assert state(made, number) == sum(range(2 + number))


def test_a_model_of_recurrent_layers_alone_is_claimed_and_assembled() -> None:
    made = Memory(
        [],
        cells={},
        dtype=torch.float32,
        device="cpu",
        backend={},
        recurrent=Recurrent({2: (StatePlane("sum", (1,), "float32"),)}),
        rows=6,
    )
    plan = made.begin(Batch((Feed(0, Span(0, 5)),)))
    made.states.write(2, plan.states, {"sum": torch.tensor([[7.0]])})
    made.commit()
    claim = made.claims.make(0, Span(0, 5), [5])
    made.drop(0)
    made.claims.assemble(3, [claim], 5)
    made.check()
    assert (made.length(3), state(made, 3)) == (5, 7.0)


def test_compaction_ends_and_moves_what_only_claims_hold() -> None:
    made = memory(recurrent=False)
    claims: list[int] = []
    for seq in range(6):
        feed(made, seq, 5)
        claims.append(made.claims.make(seq, Span(1, 5), [5]))
    for seq in range(6):
        made.drop(seq)
    made.claims.drop(claims[2])
    moved = [made.storage.compact(7) for _ in range(100)]
    assert moved[0]
    assert not moved[-1], "it never ends"
    made.check()
    for held in made.storage.stores:
        assert highest(held.cells) == held.cells.used, "a hole is left"
    first = made.claims.of(claims[4])
    cells = [cell for run in first.tables[0].runs for cell in range(run.cell, run.end)]
    assert made.storage.stores[0].pool.planes(0)["k"].values(torch.tensor(cells))[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_what_cannot_be_claimed_is_refused_with_the_reason() -> None:
    made = memory()
    feed(made, 0, 9)
    claim = made.claims.make(0, Span(0, 9))
    for act, says in (
        (lambda: made.claims.make(0, Span(3, 3)), "of the 9 tokens"),
        (lambda: made.claims.make(0, Span(3, 10)), "of the 9 tokens"),
        (lambda: made.claims.make(0, Span(3, 9), [3]), "behind 3"),
        (lambda: made.claims.make(0, Span(0, 9), [4]), "at 4: (window layers no longer hold|the recurrent state)"),
        (lambda: made.claims.make(0, Span(0, 9), [8]), "at 8: (window layers no longer hold|the recurrent state)"),
        (lambda: made.claims.assemble(1, [claim], 9), "no checkpoint at 9, only at no position"),
        (lambda: made.claims.assemble(1, [], 9), "on, not none"),
        (lambda: made.claims.assemble(0, [claim], 9), "exists"),
        (lambda: made.claims.split(claim, 9), "cannot be split"),
        (lambda: made.claims.join(claim, claim), "does not follow"),
        (lambda: made.claims.drop(99), "no claim 99"),
        (lambda: made.claims.drop_checkpoint(claim, 9), "no checkpoint at 9"),
    ):
        with pytest.raises(BadRequest, match=says):
            act()
        made.check()
    made.begin(Batch((Feed(0, Span(9, 10)),)))
    with pytest.raises(WrongStage, match="make"):
        made.claims.make(0, Span(0, 9))
