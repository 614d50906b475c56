"""Drafters with a memory of their own, in the engine: text and target memory are those of plain decoding, whatever of
their drafts is right, and what they are passed of the target is the target's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.heads.assistant_head import build_assistant
from kvcellar.engine.models.heads.mtp_head import build_mtp_head
from kvcellar.engine.speculate.assistant import AssistantDrafter
from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import ModelDrafter
from kvcellar.engine.speculate.drafter import Drafter
from kvcellar.engine.speculate.head import HeadDrafter
from kvcellar.memory.attention.choose import backends
from tests.engine.mixes import assert_at_rest, made
from tests.engine.speculating import Oracle, Rounds, Text, ask, report, speculates, told, watched
from tests.models.assistants import VOCAB, network
from tests.models.mtp import model_with_layers, new_layers
from tests.models.timeline import small_memory
from tests.zoo import ARCHS

PROMPTS = [[*range(5, 16)], [33, 34, 33]]
TOKENS = 20
DEPTH = 4
GREEDY = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 4, "n": 2, "ignore_eos": True, "logprobs": 1}
HOW = {"greedy": GREEDY, "sampled": SAMPLED}


class Mended(Oracle):
    """Another drafter's drafts, of which some are replaced by the right ones: more are accepted than of a random
    network's."""

    name = "mended"

    def __init__(self, inner: Drafter, texts: Sequence[Text]) -> None:
        super().__init__(texts)
        self.inner, self.deepest, self.reads_hidden = inner, inner.deepest, inner.reads_hidden
        self.proposed = 0
        self.committed, self.fork = inner.committed, inner.fork  # type: ignore[method-assign]
        self.forget, self.close = inner.forget, inner.close  # type: ignore[method-assign]

    def propose(self, chains: Sequence[Chain]) -> None:
        rights = [self.draw.randrange(DEPTH + 1) for _ in chains]
        after = [self._after(chain) for chain in chains]
        self.inner.propose(chains)
        for chain, right, text in zip(chains, rights, after, strict=True):
            drafts, room = chain.tokens, chain.room
            self.proposed += len(drafts)
            chain.cut(0)
            chain._closed, chain.room = False, room
            for place, token in enumerate(drafts):
                if chain.left:
                    chain.add(text[place] if place < min(right, len(text)) else token)


@dataclass
class Pair:
    """An engine, and a drafter for it."""

    engine: Engine
    drafter: Drafter
    check: Callable[[], None]

    def plainly(self, **how: object) -> tuple[list[Text], Rounds, object]:
        speculates(self.engine, None)
        with watched(self.engine) as rounds:
            ears = ask(self.engine, PROMPTS, **how)
        return told(PROMPTS, ears), rounds, [ear.answers() for ear in ears]

    def drafted(self, drafter: Drafter, **how: object) -> tuple[Rounds, object, int]:
        speculates(self.engine, drafter, DEPTH)
        with watched(self.engine) as rounds:
            ears = ask(self.engine, PROMPTS, **how)
        self.engine.check()
        self.check()
        return rounds, [ear.answers() for ear in ears], sum(report(ear).accepted for ear in ears)


def near(network: PreTrainedModel, share: float) -> PreTrainedModel:
    """The network, with noise on the weights of its output head."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = network.get_output_embeddings().weight
        weight += share * weight.std() * torch.randn(weight.shape, generator=draw)
    return network


# A target, the network that drafts for it, and by how much its output head is off. Each as target and as draft: full,
# sliding and chunked layers, convolutions, linear attention, latents.
PAIRS = {
    "itself": ("ministral", "ministral", 0.0),
    "hybrid for sliding": ("mistral", "lfm2", 0.0),
    "almost itself, hybrid": ("lfm2", "lfm2", 0.4),
    "sliding for hybrid": ("qwen3-next", "mistral", 0.0),
    "almost itself, chunked": ("llama4-untempered", "llama4-untempered", 0.4),
}


@contextmanager
def with_draft_model(name: str) -> Iterator[Pair]:
    target, draft, off = PAIRS[name]
    guest = build_guest(near(ARCHS[draft].build(), off), backends())
    cache = DraftMemory(small_memory(guest, 600, sequences=12))
    drafter = ModelDrafter(draft, guest.forward, cache, context=200, deepest=DEPTH)
    with made(ARCHS[target].build(), cache_bytes=40_000_000) as engine:
        yield Pair(engine, drafter, drafter.check)


@contextmanager
def with_head(name: str) -> Iterator[Pair]:
    with made(model_with_layers(name), cache_bytes=40_000_000) as engine:
        guest = engine._built.guest
        head = build_mtp_head(new_layers(guest.model), guest, backends())
        cache = DraftMemory(head.memory({group.name: 600 for group in head.shape.groups}), ahead=head.layers)
        drafter = HeadDrafter(name, head, cache, context=200, deepest=DEPTH)
        yield Pair(engine, drafter, drafter.check)


@contextmanager
def with_assistant(name: str) -> Iterator[Pair]:
    """It has no memory of its own: it reads the target's cells."""
    with made(ARCHS["gemma4-e2b"].build(vocab_size=VOCAB), cache_bytes=40_000_000) as engine:
        built = engine._built

        def sequence(key: Key) -> int | None:
            return next((one.seq for one in built.loop.scheduler.running if one.key == key), None)

        head = build_assistant(network(name), built.guest)
        drafter = AssistantDrafter(name, head, built.memory, sequence, context=200, deepest=DEPTH)
        yield Pair(engine, drafter, built.memory.check)


HEADS = ("deepseek-v3", "glm4-moe", "gemma3", "lfm3")


ASSISTANT = "gemma4_assistant"


@pytest.fixture(scope="module", params=[*PAIRS, *HEADS, ASSISTANT])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = with_draft_model if request.param in PAIRS else with_head if request.param in HEADS else with_assistant
    with opened(request.param) as found:
        yield found
        speculates(found.engine, None)
        assert_at_rest(found.engine)


@pytest.mark.parametrize("how", HOW)
def test_its_own_drafts_change_neither_text_nor_memory(pair: Pair, how: str) -> None:
    _, plain, answers = pair.plainly(**HOW[how])
    rounds, drafted, _ = pair.drafted(pair.drafter, **HOW[how])
    assert drafted == answers
    rounds.assert_as_in(plain)


@pytest.mark.parametrize("how", HOW)
def test_nor_do_they_where_more_are_accepted(pair: Pair, how: str) -> None:
    """And what the drafter has of the text follows the target, whatever was accepted."""
    texts, plain, answers = pair.plainly(**HOW[how])
    drafter = Mended(pair.drafter, texts)
    rounds, drafted, accepted = pair.drafted(drafter, **HOW[how])
    assert drafted == answers
    rounds.assert_as_in(plain)
    assert drafter.proposed >= accepted > 5


@pytest.mark.parametrize("how", HOW)
def test_a_draft_model_that_is_the_target_is_always_right(how: str) -> None:
    """Sampled texts with a seed, too: drafts are drawn by the noise of the text."""
    with with_draft_model("itself") as pair:
        _, _, answers = pair.plainly(**HOW[how])
        rounds, drafted, accepted = pair.drafted(pair.drafter, **HOW[how])
        assert drafted == answers
        tokens = sum(rounds.kept)
        assert accepted == tokens - len(rounds.kept) > 0.7 * tokens
