"""What a step takes is measured before cells are counted, and a memory that leaves no room for it is refused."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvcellar.attention.choose import named
from kvcellar.engine import build as building
from kvcellar.engine.engine import Engine
from kvcellar.engine.reserve import ROWS, continued, peak, prove, scratch
from kvcellar.errors import CapacityTooSmall
from kvcellar.models.guest import Guest, adopt
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.zoo import ARCHS

CPU = torch.device("cpu")


def network() -> PreTrainedModel:
    return ARCHS["llama"].build(max_position_embeddings=512)


def guest(attention: str = "sdpa") -> Guest:
    return adopt(network(), named(attention))


@settings(derandomize=True, deadline=None)
@given(*[st.integers(0, 50)] * 4, st.integers(1, 900), st.integers(1, 900))
def test_bytes_that_grow_along_straight_lines_are_continued_exactly(a, b, c, d, x, y) -> None:
    def measure(rows: int, remembered: int) -> int:
        assert rows <= 160, "it was measured at full size"
        assert remembered <= 48, "it was measured at full size"
        return a + b * rows + c * remembered + d * rows * remembered

    assert continued(measure, (x, y), (ROWS, (16, 48))) == a + b * x + c * y + d * x * y


def test_the_meter_counts_what_is_there_at_once_and_nothing_that_was_there_before() -> None:
    before = torch.zeros(1000)
    with peak(CPU) as meter:
        for _ in range(5):
            made = before + 1  # 4 000 bytes, and the one before is still there while it is made
        made.add_(1)
        before[:10].mul_(2)
        del made
        torch.ones(500)
    assert meter.bytes == 8000


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_step_of_full_size_takes_no_more_than_was_said(attention: str) -> None:
    model = guest(attention=attention)
    said = scratch(model, context=480, max_sequences=9, step_tokens=200)
    memory = model.memory({group.name: 9 * 480 for group in model.shape.groups})
    truth = []
    for feeds in ([Feed(0, Span(280, 480))], [Feed(seq, Span(479, 480)) for seq in range(9)]):
        batch = Batch(tuple(feeds))
        with peak(CPU) as meter:
            plan = memory.begin(batch, reserve=True)
            model.forward(memory, plan, torch.zeros(batch.tokens, dtype=torch.long), torch.arange(len(feeds)))
            memory.abandon()
        truth.append(meter.bytes)
    assert max(truth) <= said <= 2 * max(truth)
    memory.check()
    assert memory.free() == memory.capacity()


def test_what_a_step_takes_is_not_turned_into_cells() -> None:
    with mock.patch.object(building, "free_cpu_bytes", return_value=3_000_000), Engine(network(), context=64) as engine:
        said = engine.capacity()
        assert "beside" in said, said
        assert engine.stats().cache_bytes < 0.3 * 3_000_000


def test_a_memory_that_leaves_no_room_for_a_step_is_refused_with_the_numbers_to_change() -> None:
    with (
        mock.patch.object(building, "free_cpu_bytes", return_value=200_000),
        pytest.raises(
            CapacityTooSmall, match=r"200000 are free. Lower cache_bytes; or lower step_tokens, max_sequences"
        ),
    ):
        Engine(network(), cache_bytes=190_000, context=64)


def test_a_device_that_cannot_run_the_worst_step_is_refused_at_the_door() -> None:
    model = guest()
    memory = model.memory({group.name: 100 for group in model.shape.groups})
    prove(model, memory, context=480, max_sequences=4, step_tokens=64)
    short = mock.patch.object(Guest, "forward", side_effect=torch.OutOfMemoryError("none left"))
    with short, pytest.raises(CapacityTooSmall, match=r"64 tokens at position 100 does not fit .* step_tokens"):
        prove(model, memory, context=480, max_sequences=4, step_tokens=64)
    memory.check()
    assert memory.free() == memory.capacity()
