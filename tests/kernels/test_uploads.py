"""Between the plan of a step and its tokens, nothing waits for the device but the one transfer of the tokens."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.sample.draw import draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.kernels.uploads import upload, uploaded
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.attention.triton import Triton
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams
from tests.attention.by_tables import attend
from tests.models.graph_of_calls import READS_BACK
from tests.zoo import ARCHS


class Waits(TorchDispatchMode):
    """Counts the operators whose results the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS_BACK:
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted, plain = Waits(), Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        counted.seen["tolist"] += 1
        return plain(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    with counted:
        yield counted.seen


GREEDY = SamplingParams(temperature=0.0, logprobs=1)
SAMPLED = SamplingParams(top_k=20, min_p=0.1, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, logprobs=2)


@pytest.mark.parametrize("backend", [Sdpa(fused=True), Triton(attend, "cpu")], ids=lambda one: one.name)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_step_reads_back_its_tokens_and_nothing_else(
    name: str, params: SamplingParams, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding, and a prompt beside it."""
    guest = build_guest(ARCHS[name].build(), (backend, *backends()))
    memory = guest.memory({group.name: 200 for group in guest.shape.groups}, rows=8)
    size = guest.model.config.get_text_config().vocab_size
    sampler = Sampler(params, seed=0, index=0, prompt_ids=(5, 6), vocab_size=size, end_ids=frozenset())
    for counts in ({0: 7, 1: 3}, {0: 1, 1: 1}, {0: 1, 2: 6}):
        feeds = [Feed(seq, Span(memory.length(seq), memory.length(seq) + n)) for seq, n in counts.items()]
        rows = sum(counts.values())
        with waits(monkeypatch) as seen:
            plan = memory.begin(Batch(tuple(feeds)))
            logits = guest.forward(memory, plan, [5] * rows, range(rows))
            draw(logits, [sampler] * rows, [9] * rows)
        assert seen == {"tolist": 1}
        memory.commit()


def test_numbers_arrive_as_they_were() -> None:
    device = torch.device("cpu")
    assert torch.equal(uploaded([[1, 2], [3, 4]], torch.int64, device), torch.tensor([[1, 2], [3, 4]]))
    into = torch.full((4,), 9)
    upload([1, 2, 3], into)
    assert torch.equal(into, torch.tensor([1, 2, 3, 0]))
    on_meta = torch.empty(4, dtype=torch.int64, device="meta")  # a device that the host cannot write to
    upload([1], on_meta)
