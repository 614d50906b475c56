"""Drafts by Gemma 4's assistants are those of transformers' own loop over the target's stored keys and values, for
several completions at once, after any acceptance, before and after the window has wrapped."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.heads.assistant_head import AssistantHead, load_assistant
from kvcellar.engine.models.heads.heads import find_head
from kvcellar.engine.models.load import load
from kvcellar.engine.speculate.assistant import AssistantDrafter
from kvcellar.engine.speculate.chain import Chain
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.assistants import ORDERED, TEXTS, VOCAB, head_and_reference, saved, target
from tests.models.timeline import small_memory
from tests.speculate.chains import sampler
from tests.zoo import ARCHS

NONE: Mapping[int, int] = {}
PROMPTS = {1: list(range(20, 41)), 2: [7, 9, 8], 3: [50, *range(3, 12)]}


class World:
    def __init__(self, model_type: str, *, ordered: bool = False, rows: Mapping[int, int] = NONE) -> None:
        """`rows`: how many of the first tokens of texts stand for rows of images."""
        self.rows = {number: rows.get(number, 0) for number in range(9)}
        self.head, self.reference = head_and_reference(model_type, ordered=ordered)
        self.guest, self.memory = target(), small_memory(target(), 60, sequences=4)
        self.drafter = AssistantDrafter("assistant", self.head, self.memory, lambda key: key[0], context=100)
        self.texts = {number: list(prompt) for number, prompt in PROMPTS.items()}
        self.hidden: dict[int, torch.Tensor] = {}
        for number in self.texts:
            self.texts[number].append(self.compute({number: len(PROMPTS[number])}, {})[0])

    def chain(self, number: int, room: int) -> Chain:
        text, rows = self.texts[number], self.rows[number]
        draws = sampler(vocab=VOCAB, temperature=0.0)
        return Chain((number, 0), text[rows:], draws, len(text), room, namespace="", shared=0, rows_of_images=rows)

    def compute(
        self, counts: dict[int, int], drafts: dict[int, list[int]], kept: dict[int, int] | None = None
    ) -> list[int]:
        """So many tokens of texts and their drafts, of which some are kept. -> the target's token after those"""
        spans = {n: Span(self.memory.length(n), self.memory.length(n) + count) for n, count in counts.items()}
        ids = [t for n, span in spans.items() for t in [*self.texts[n], *drafts.get(n, [])][span.start : span.end]]
        plan = self.memory.begin(Batch(tuple(Feed(n, span) for n, span in spans.items())))
        logits, hidden = self.guest.forward_with_hidden(self.memory, plan, ids, range(len(ids)))
        counts = kept or counts
        self.memory.commit(counts)
        row, news, tokens = 0, list[Committed](), list[int]()
        for n, span in spans.items():
            text, states = [*self.texts[n], *drafts.get(n, [])], hidden[row : row + counts[n]]
            new, start = text[max(span.start, self.rows[n]) : span.start + counts[n]], span.start - self.rows[n]
            news.append(Committed((n, 0), "", text[self.rows[n] :], max(0, start), new, states[-len(new) :]))
            tokens.append(int(logits[row + counts[n] - 1].argmax()))
            self.hidden[n] = states[-1:]
            row += len(span)
        self.drafter.committed(news)
        return tokens

    @torch.inference_mode()
    def expected(self, number: int, count: int) -> list[int]:
        """As transformers' candidate generator: one completion, keys and values given."""
        end, hidden, drafts = self.memory.length(number), self.hidden[number], list[int]()
        self.memory.begin(Batch((Feed(number, Span(end - 1, end), stores=False),)))
        planes = {kind: self.memory.get(layer).in_order() for kind, layer in self.head.read.items()}
        self.memory.abandon()
        keys = {kind: tuple(plane.transpose(0, 1)[None] for plane in pair) for kind, pair in planes.items()}
        assert keys["sliding_attention"][0].shape[2] == min(end, 8)
        assert keys["full_attention"][0].shape[2] == end
        token = self.texts[number][-1]
        embedding: Any = self.guest.model.get_input_embeddings()
        for _ in range(count):
            inputs = torch.cat([embedding(torch.tensor([token])), hidden], -1)[None]
            out = self.reference(inputs_embeds=inputs, position_ids=torch.tensor([[end]]), shared_kv_states=dict(keys))
            token, hidden = int(out.logits[0, -1].argmax()), out.last_hidden_state[0]
            drafts.append(token)
        return drafts

    def round(self, numbers: Sequence[int], room: int, kept: Sequence[int]) -> None:
        chains = [self.chain(number, room) for number in numbers]
        before = {n: (self.memory.length(n), self.memory.held(n), self.memory.free()) for n in numbers}
        self.drafter.propose(chains)
        self.drafter.check()
        assert before == {n: (self.memory.length(n), self.memory.held(n), self.memory.free()) for n in numbers}
        self.memory.check()
        for number, chain in zip(numbers, chains, strict=True):
            assert chain.tokens == self.expected(number, room), number
        counts = {chain.key[0]: chain.rows for chain in chains}
        taken = {chain.key[0]: chain.tokens[:count] for chain, count in zip(chains, kept, strict=True)}
        drafts = {chain.key[0]: chain.tokens for chain in chains}
        tokens = self.compute(counts, drafts, {n: 1 + len(taken[n]) for n in numbers})
        for number, token in zip(numbers, tokens, strict=True):
            self.texts[number] += [*taken[number], token]


@pytest.mark.parametrize("rows", [NONE, {1: 4, 3: 9}])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("model_type", TEXTS)
def test_drafts_are_those_of_transformers_own_loop(model_type: str, ordered: bool, rows: Mapping[int, int]) -> None:
    world = World(model_type, ordered=ordered, rows=rows)
    for turn in range(5):
        numbers = [number for number in PROMPTS if (turn + number) % 3]
        world.round(numbers, 3, [(turn + number) % 4 for number in numbers])


def test_a_sibling_begins_with_the_state_of_the_prompt_and_closed_completions_have_none() -> None:
    world = World("gemma4_assistant")
    world.memory.fork(1, 4, len(PROMPTS[1]))
    world.drafter.fork((1, 0), (4, 0))
    world.texts[4] = [*world.texts[1][:-1], 11]
    world.hidden[4] = world.hidden[1]
    world.round([1, 4], 2, [0, 2])
    world.drafter.close((4, 0), keep=True)
    chains = [world.chain(1, 2), world.chain(4, 2)]
    world.drafter.propose(chains)
    assert chains[0].tokens == world.expected(1, 2)
    assert not chains[1].tokens


def test_an_error_leaves_the_targets_memory_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("gemma4_assistant")

    def failing(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(world.head, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        world.drafter.propose([world.chain(1, 2)])
    world.drafter.check()
    monkeypatch.undo()
    world.round([1], 2, [1])


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, ORDERED])
@pytest.mark.parametrize("model_type", TEXTS)
def test_an_assistant_is_loaded_from_its_directory(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / "assistant", model_type, **fields)
    loaded = load(ARCHS["gemma4-e2b"].build(vocab_size=VOCAB))
    guest = build_guest(loaded.model, backends())
    head = find_head(path, loaded, guest, backends())
    assert isinstance(head, AssistantHead)
    reference = head_and_reference(model_type, ordered=bool(fields))[1].state_dict()
    assert head.network.state_dict().keys() == reference.keys()
    assert all(torch.equal(head.network.state_dict()[name], value) for name, value in reference.items())


def refused(path: Path, **changes: Any) -> str:
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"] | changes.pop("text", {})
    (path / "config.json").write_text(json.dumps(config | changes | {"text_config": text}))
    with pytest.raises(ModelRefused) as found:
        load_assistant(path, target())
    return str(found.value)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"backbone_hidden_size": 80}, "reads hidden states of 80 values, and the target has 64"),
    "vocabulary": ({"text": {"vocab_size": 50}}, "it has 50 tokens, and the target has 100"),
    "keys": ({"text": {"head_dim": 8}}, "sliding_attention layers read keys of 2 heads of 8 values"),
    "layers": ({"text": {"enable_moe_block": True}}, "enable_moe_block must be False"),
    "depth": ({"text": {"num_hidden_layers": 9999}}, "num_hidden_layers is 9999"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_assistant_that_does_not_fit_is_refused_with_the_reasons(what: str, tmp_path: Path) -> None:
    changes, reason = UNFIT[what]
    assert reason in refused(saved(tmp_path / "assistant", "gemma4_assistant"), **changes)


def test_an_assistant_fits_no_other_family(tmp_path: Path) -> None:
    path = saved(tmp_path / "assistant", "gemma4_assistant")
    guest = build_guest(ARCHS["gemma3"].build(vocab_size=VOCAB), backends())
    with pytest.raises(ModelRefused, match="family: it is made for Gemma 4, and the target is a gemma3_text"):
        load_assistant(path, guest)


def test_an_order_that_leaves_out_tokens_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "assistant", "gemma4_assistant", **ORDERED)
    stored = load_file(path / "model.safetensors")
    stored["masked_embedding.token_ordering"][3] = 5000
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    assert "token_ordering does not name every token once" in refused(path)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "assistant", "gemma4_assistant")
    stored = load_file(path / "model.safetensors")
    stored["extra.weight"] = stored.pop("pre_projection.weight")
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    assert "pre_projection.weight" in refused(path)
