"""Tables of steps for kernels on a GPU: what attention reads from them alone is what each row sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory.attention.blocks import FEW, MANY, SPLIT, Call
from kvcellar.memory.attention.triton import Triton
from kvcellar.memory.cells.layouts import Causal, Input, Sliding
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import AttentionSpec, Plane, Scoring
from kvcellar.memory.spans import Span
from tests.attention.by_tables import attend
from tests.attention.texts import Texts
from tests.cache.tagged import Tagged

STEPS = st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 2 * MANY + 3), min_size=1), min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(STEPS, st.data())
def test_every_row_reads_what_it_sees_on_every_layout(steps, data) -> None:
    """Also where some tokens look ahead."""
    tagged = Tagged(Triton(attend, "cpu"), 256)
    for feeds in steps:
        tagged.begin(feeds, tagged.some_ahead(feeds, lambda low, most: data.draw(st.integers(low, most))))
        for group in tagged.groups:
            tagged.attends(group.layers[0])
        tagged.memory.commit()


def test_rows_that_only_ask_and_rows_without_an_input() -> None:
    tagged = Tagged(Triton(attend, "cpu"), 128, names=["full"])
    tagged.step({0: 6, 1: 3})
    tagged.memory.begin(Batch((Feed(0, Span(5, 8), stores=False), Feed(1, Span(3, 4)))))
    tagged.put([900])
    tagged.attends(0)
    planes = (Plane("k", 2, 16), Plane("v", 2, 16))
    groups = [Group("text", Causal(), planes, (0,)), Group("input", Input(20), planes, (1,))]
    memory = Memory(
        groups, cells={"text": 40, "input": 40}, dtype=torch.float32, device="cpu", backend=Triton(attend, "cpu")
    )
    given_k = torch.randn(13, 2, 16)
    memory.inputs.write(0, 13, {1: (given_k, -given_k)})
    memory.begin(Batch((Feed(0, Span(0, 3)), Feed(1, Span(0, 2)))))
    got = memory.attend(1, torch.randn(5, 4, 16), Scoring(0.3, sinks=torch.zeros(4)))
    assert got[:3].ne(0).all()
    assert got[3:].eq(0).all()
    memory.abandon()
    memory.begin(Batch((Feed(1, Span(0, 2)),)))  # no sequence of the step has an input
    assert memory.attend(1, torch.randn(2, 4, 16), Scoring(0.3)).eq(0).all()


@pytest.mark.parametrize("layout", [Causal(), Sliding(SPLIT + 9)], ids=str)
def test_long_histories_in_pieces(layout) -> None:
    """Blocks of few and of many rows in one step, over more splits than one."""
    texts = Texts(layout, (2, 1, 8, 4), 3 * SPLIT, backend=Triton(attend, "cpu"))
    for n in (SPLIT - 40, 100, SPLIT - 90):
        for seq in (0, 1):
            texts.begin({seq: n if seq == 0 else n // 2})
            texts.memory.commit()
    assert texts.runs > 1
    texts.step({0: FEW + MANY, 1: FEW}, Scoring(0.4))
    texts.step({0: 1, 1: 1}, Scoring(0.4))


def test_steps_of_equal_shape_have_equal_keys() -> None:
    """So that a launch of one can be replayed in the other; a longer history or more sequences need another."""
    tagged = Tagged(Triton(attend, "cpu"), 4 * SPLIT, names=["full"])
    keys = []
    for feeds in ({0: 40, 1: 30}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 2, 1: 2}, {0: 900}, {0: 1, 1: 1}):
        tagged.begin(feeds)
        keys.append(tagged.memory.get(0).step.prepared.key)
        tagged.memory.commit()
    assert keys[1] == keys[2]
    assert len(set(keys)) == len(keys) - 1


ASK = AttentionSpec(14, 2, 64, 64, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": "cpu"}, "it runs on cuda, not on cpu"),
        ({"query_heads": 13}, "13 query heads cannot share 2 KV heads evenly"),
        (
            {"dtype": "float64"},
            "it cannot read keys stored as float64, only bfloat16, float16, float32, fp8, int4, int8",
        ),
        ({"value_size": 600}, "its heads have up to 512 elements, not 600"),
        ({"query_heads": 64}, "up to 16 query heads can share a KV head, not 32"),
    ],
)
def test_what_it_cannot_do_is_refused(changed, why) -> None:
    from dataclasses import replace

    backend = Triton(attend)
    assert backend.refuse(ASK) is None
    assert backend.refuse(replace(ASK, **changed)) == why


def test_it_launches_on_the_device_of_its_queries(monkeypatch) -> None:
    """Triton launches on the current device, wherever its arguments are."""
    entered: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.clear()

    def launched(call: Call) -> None:
        assert [one is call.q for one in entered] == [True]
        attend(call)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    tagged = Tagged(Triton(launched, "cpu"), 32, names=["full"])
    tagged.begin({0: 3})
    tagged.attends(0)
    assert not entered


def test_without_the_package_it_says_so(monkeypatch) -> None:
    from kvcellar.memory.attention import triton

    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    assert Triton().refuse(ASK) == "the package triton is not installed"
