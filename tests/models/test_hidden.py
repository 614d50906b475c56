"""Hidden states beside logits: those that the output head would read of all rows, and logits of the wanted ones."""

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar.engine.models.guest import Guest
from kvcellar.errors import ModelRefused
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.timeline import BOUND, guest_and_reference, read, relative, small_memory

# Full, sliding, chunked, latents, learned positions; convolutions, delta rules, scans; solo. By how much the model
# scales its last hidden states before its head reads them.
SCALES = {
    "llama": 1.0, "gemma4-e2b": 1.0, "llama4": 1.0, "deepseek-v3": 1.0, "opt": 1.0, "minicpm3": 0.5, "lfm3": 1.0,
    "qwen3.5": 1.0, "jamba": 1.0, "mamba2": 1.0, "bloom": 1.0, "gptj": 1.0, "inkling": 0.5,
}  # fmt: skip
TEXTS = {1: list(range(20, 41)), 2: [7, 9, 8, 60, 61]}
FIRST = {1: 16, 2: 2}  # tokens in memory before


def hidden_of(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """[L,hidden] of the reference."""
    with torch.no_grad():
        ids = torch.tensor([text])
        return model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0].float()


def again(guest: Guest, name: str, parts: list[int]) -> float:
    """One step over the rest of the texts, of which some rows are wanted, the last one first."""
    reference, memory = guest_and_reference(name)[1], small_memory(guest, 40)
    for seq in parts:
        read(guest, memory, (seq, TEXTS[seq][: FIRST[seq]]))
    feeds = tuple(Feed(seq, Span(FIRST[seq], len(TEXTS[seq]))) for seq in parts)
    ids = torch.tensor([token for seq in parts for token in TEXTS[seq][FIRST[seq] :]])
    want = torch.arange(1, len(ids)).flip(0)
    plan = memory.begin(Batch(feeds))
    logits, hidden = guest.forward_with_hidden(memory, plan, ids, want)
    memory.abandon()
    assert relative(logits, guest.forward(memory, memory.begin(Batch(feeds)), ids, want)) <= BOUND
    expected = torch.cat([hidden_of(reference, TEXTS[seq])[FIRST[seq] :] for seq in parts]) * SCALES[name]
    assert hidden.shape == expected.shape
    return relative(hidden.float(), expected)


@pytest.mark.parametrize("name", SCALES)
def test_hidden_states_are_those_of_a_plain_forward(name: str) -> None:
    guest = guest_and_reference(name)[0]
    for parts in [[2, 1]] if guest.mode == "flat" else [[1], [2]]:
        assert again(guest, name, parts) <= BOUND


def test_no_hook_stays_on_the_output_head() -> None:
    guest = guest_and_reference("llama")[0]
    again(guest, "llama", [1])
    assert not guest.model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("head", ["none", "not called"])
def test_hidden_states_are_refused_if_the_output_head_is_not_called(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = guest_and_reference("llama")[0]
    found = None if head == "none" else torch.nn.Linear(1, 1)
    monkeypatch.setattr(guest.model, "get_output_embeddings", lambda: found)
    with pytest.raises(ModelRefused, match="calls its output head 0 times"):
        again(guest, "llama", [1])
