"""Drafts by MTP layers are those of transformers' own forward of the layers over the whole text, whatever was accepted
before, in any company, behind a gap, and from what is kept of other texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.mtp_head import MtpHead
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate import head as module
from kvcellar.engine.speculate.chain import Chain, verify
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.head import HeadDrafter
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.mtp import head_and_reference
from tests.models.timeline import small_memory
from tests.speculate.chains import sampler

VOCAB = 101
SINGLE, SEVERAL = ("glm4-moe", "mellum", "lfm3"), ("deepseek-v3", "llama", "gemma3")


@torch.inference_mode()
def expected(layers: MtpModel, text: Sequence[int], hidden: Tensor, first: int, count: int) -> list[int]:
    """The drafts after `text`, from the target's states [n,H] of its positions `first` to its last but one."""
    drafts: list[int] = []
    cache, depth = MtpCache(config=layers.config), len(layers.layers)
    out, rows = hidden[None], torch.arange(first, first + len(hidden))[None]
    for layer in range(depth):
        ids = torch.tensor([[*text, *drafts][first + 1 + layer :][: len(hidden)]])
        out = layers.forward_layer(layer, out, rows + 1 + layer, cache, input_ids=ids)
        drafts.append(int(layers._project_to_logits(out)[0, -1].argmax()))
    while depth == 1 and len(drafts) < count:
        place = torch.tensor([[len(text) + len(drafts) - 1]])
        out = layers.forward_layer(0, out[:, -1:], place, cache, input_ids=torch.tensor([drafts[-1:]]))
        drafts.append(int(layers._project_to_logits(out)[0, -1].argmax()))
    return drafts[:count]


def greedy(prompt: Sequence[int]) -> Sampler:
    return sampler(prompt, vocab=VOCAB, temperature=0.0)


@dataclass
class Line:
    text: list[int]
    sampler: Sampler
    first: int = 0  # position of the first state that the drafter was passed
    hidden: list[Tensor] = field(default_factory=list)  # of the target, by position
    namespace: str = ""


class World:
    """A target and a drafter with the MTP layers of the target's family."""

    def __init__(
        self, name: str, *, cells: int = 400, deepest: int = 4, step_tokens: int = 512, history: int = 0
    ) -> None:
        self.head: MtpHead
        self.guest: Guest
        self.head, self.guest, self.layers = head_and_reference(name)
        self.memory: Memory = small_memory(self.guest, 100, sequences=6)
        memory = self.head.memory({group.name: cells for group in self.head.shape.groups})
        self.cache = DraftMemory(memory, ahead=self.head.layers)
        how = {"history": history, "deepest": deepest, "step_tokens": step_tokens}
        self.drafter = HeadDrafter(name, self.head, self.cache, context=200, **how)
        self.lines: dict[int, Line] = {}
        self.steps = 0  # of the head

    def read(self, number: int, prompt: list[int], *, chunks: int = 1, gap: int = 0, namespace: str = "") -> None:
        """A new text, of which the target has restored the first `gap` tokens."""
        line = self.lines[number] = Line(list(prompt), greedy(prompt), gap, namespace=namespace)
        bounds = [gap + (len(prompt) - gap) * i // chunks for i in range(chunks + 1)]
        if gap:
            self.compute({number: gap})
        for start, end in pairwise(bounds):
            logits = self.compute({number: end - start})
            self.pass_on(number, start, end)
        line.text.append(self.accepted(number, logits)[0])

    def compute(self, counts: dict[int, int], chains: Sequence[Chain] = ()) -> Tensor:
        """So many more tokens of texts, or the last token and the drafts of each chain. -> logits [R,V] of the last
        token of each, or of all rows of the chains"""
        at = {number: self.memory.length(number) for number in counts}
        spans = {number: Span(at[number], at[number] + count) for number, count in counts.items()}
        drafts = {chain.key[0]: chain.tokens for chain in chains}
        ids = [
            token
            for number, span in spans.items()
            for token in [*self.lines[number].text, *drafts.get(number, [])][span.start : span.end]
        ]
        plan = self.memory.begin(
            Batch(tuple(Feed(number, span, revertible=bool(chains)) for number, span in spans.items()))
        )
        logits, hidden = self.guest.forward_with_hidden(self.memory, plan, ids, range(len(ids)))
        row = 0
        for number, span in spans.items():
            self.lines[number].hidden[span.start :] = list(hidden[row : row + len(span)])
            row += len(span)
        if not chains:
            self.memory.commit()
            return logits[[sum(list(counts.values())[: i + 1]) - 1 for i in range(len(counts))]]
        return logits

    def accepted(self, number: int, logits: Tensor) -> list[int]:
        (one,) = verify([self.chain(number, 0)], logits)
        tokens = [drawn.token_id for drawn in one.drawn]
        self.lines[number].sampler.accept(tokens[0])
        return tokens

    def chain(self, number: int, room: int) -> Chain:
        line = self.lines[number]
        return Chain((number, 0), line.text, line.sampler, len(line.text), room, namespace=line.namespace, shared=0)

    def pass_on(self, number: int, start: int, end: int) -> None:
        line = self.lines[number]
        hidden = torch.stack(line.hidden[start:end])
        self.drafter.committed([Committed((number, 0), line.namespace, line.text, start, line.text[start:end], hidden)])

    def drafts(self, numbers: Sequence[int], room: int) -> list[Chain]:
        chains = [self.chain(number, room) for number in numbers]
        self.drafter.propose([chain for chain in chains if chain.left])
        self.drafter.check()
        for number, chain in zip(numbers, chains, strict=True):
            assert chain.tokens == self.expected(number, len(chain.tokens)), number
        return chains

    def expected(self, number: int, count: int) -> list[int]:
        line = self.lines[number]
        hidden = torch.stack(line.hidden[line.first : len(line.text) - 1])
        return expected(self.layers, line.text, hidden, line.first, count) if count else []

    def round(self, numbers: Sequence[int], room: int, kept: Sequence[int]) -> list[Chain]:
        """Draft for texts; of each, the first `kept` drafts are accepted, whatever the target says, and then a token of
        the target's."""
        chains = self.drafts(numbers, room)
        logits = self.compute({number: chain.rows for number, chain in zip(numbers, chains, strict=True)}, chains)
        row, counts = 0, dict[int, int]()
        for number, chain, count in zip(numbers, chains, kept, strict=True):
            line, taken = self.lines[number], chain.tokens[: min(count, len(chain.tokens))]
            line.text += [*taken, int(logits[row + len(taken)].argmax())]
            counts[number] = 1 + len(taken)
            row += chain.rows
        self.memory.commit(counts)
        for number, count in counts.items():
            end = self.memory.length(number)
            del self.lines[number].hidden[end:]
            self.pass_on(number, end - count, end)
        self.drafter.check()
        return chains

    def sequence(self, number: int) -> int:
        """The head's."""
        (seq,) = self.cache.open([self.chain(number, 0)])
        assert seq is not None
        return seq

    def close(self, number: int, *, keep: bool = True) -> None:
        self.drafter.close((number, 0), keep=keep)
        self.memory.drop(number)
        self.lines.pop(number)
        self.drafter.check()


PROMPTS = {1: list(range(20, 41)), 2: [7, 9, 8], 3: [50, *range(3, 32)]}


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_drafts_are_those_of_the_layers_own_forward_in_any_company_after_any_acceptance(name: str) -> None:
    world = World(name)
    for number, prompt in PROMPTS.items():
        world.read(number, prompt, chunks=number)
    drafted = 0
    for turn in range(8):
        numbers = [number for number in PROMPTS if turn % (number + 1) < 2]
        chains = world.round(numbers, (4, 2, 1, 0)[turn % 4], [(turn + number) % 4 for number in numbers])
        drafted += sum(len(chain.tokens) for chain in chains)
    assert drafted > 15
    for number in list(PROMPTS):
        world.close(number)
    world.drafter.forget(None)
    assert all(world.cache.memory.free()[group.name] == 400 for group in world.head.shape.groups)


@pytest.mark.parametrize("name", ["glm4-moe", "mellum", "llama"])
def test_behind_a_restored_prefix_the_head_begins_where_its_states_begin(name: str) -> None:
    world = World(name)
    world.read(1, PROMPTS[1], gap=13, chunks=2)
    world.read(2, PROMPTS[3])
    for kept in range(4):
        chains = world.round([1, 2], 3, [kept, 1])
        assert all(chain.tokens for chain in chains)
    world.close(1)
    world.read(4, PROMPTS[1])  # what began behind a gap is not shared
    assert len(world.drafts([4], 3)[0].tokens) == min(3, world.drafter.deepest)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["glm4-moe", "mellum", "deepseek-v3"])
def test_a_text_begins_with_what_is_kept_of_another(name: str, known: bool) -> None:
    """The target restores a prefix, and so does the head: no state of it is passed again. Where the target restores all
    that it has, the states of the last entries are zeros."""
    world = World(name)
    world.read(1, PROMPTS[1])
    world.round([1], 2, [2])
    text, hidden = list(world.lines[1].text), list(world.lines[1].hidden)
    at = len(hidden)
    if known:
        at -= world.head.layers + 1
    world.close(1)
    prompt = [*text, 5, 6]
    for number, shared in ((2, True), (3, False)):
        world.read(number, prompt, gap=at, namespace="" if shared else "other")
        if shared:  # what is drafted then is compared with drafts from the states of the whole text
            line = world.lines[number]
            line.first = 0
            if not known:
                for pos in range(world.cache.memory.length(world.sequence(number)), at):
                    line.hidden[pos] = torch.zeros_like(line.hidden[pos])
        assert len(world.drafts([number], 2)[0].tokens) == 2


def test_namespaces_do_not_share() -> None:
    world = World("glm4-moe")
    world.read(1, PROMPTS[1], namespace="a")
    world.drafts([1], 1)
    world.close(1)
    world.read(2, PROMPTS[1], gap=15, namespace="b")
    world.drafts([2], 2)  # compared with what begins behind the gap


def test_siblings_begin_with_the_entries_of_the_prompt() -> None:
    world = World("glm4-moe")
    world.read(1, PROMPTS[1])
    world.drafter.fork((1, 0), (2, 0))
    world.memory.fork(1, 2, len(PROMPTS[1]))
    line = world.lines[1]
    world.lines[2] = Line([*line.text[:-1], 99], greedy(PROMPTS[1]), 0, list(line.hidden))
    for kept in (1, 3, 0):
        assert all(chain.tokens for chain in world.round([1, 2], 3, [kept, 3 - kept]))


@pytest.mark.parametrize("name", ["glm4-moe", "llama"])
def test_long_prompts_are_computed_in_steps_before_they_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH", 8)
    world = World(name, step_tokens=5)
    world.read(1, PROMPTS[3], chunks=2)
    assert len(PROMPTS[3]) - world.cache.memory.length(world.sequence(1)) <= world.head.layers
    assert world.round([1], 2, [1])[0].tokens


def test_what_does_not_fit_a_step_has_no_drafts_in_that_round() -> None:
    world = World("glm4-moe", step_tokens=12)
    world.read(1, PROMPTS[1])
    world.read(2, PROMPTS[2])
    one, two = world.drafts([1, 2], 2)
    assert not one.tokens
    assert two.tokens
    for _ in range(2):
        one, two = world.drafts([1], 2)[0], two
    assert one.tokens


def test_without_cells_there_are_no_drafts_and_idle_texts_are_ended() -> None:
    world = World("glm4-moe", cells=40)
    world.read(1, PROMPTS[1])
    assert world.drafts([1], 2)[0].tokens
    world.read(3, PROMPTS[3])
    assert world.drafts([3], 2)[0].tokens  # 1 has no sequence any more
    one, three = world.drafts([1, 3], 2)
    assert not (one.tokens and three.tokens)


def test_a_text_that_does_not_fit_beside_others_is_given_up_and_these_keep_what_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FLUSH", 8)
    world = World("glm4-moe", cells=40)
    world.read(1, PROMPTS[1])
    assert world.round([1], 2, [1])[0].tokens
    world.read(3, PROMPTS[3], chunks=3)
    assert not world.drafts([3], 2)[0].tokens
    assert [*world.drafter._lines] == [(1, 0)], "its hidden states are kept"
    assert world.round([1], 2, [1])[0].tokens
    world.close(3)
    world.close(1)
    assert not world.drafter._lost


def test_an_error_leaves_no_step_and_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("glm4-moe")
    world.read(1, PROMPTS[1])
    forward, calls = world.head.forward, list[int]()

    def failing(*given: object) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*given)

    monkeypatch.setattr(world.head, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        world.drafter.propose([world.chain(1, 4)])
    world.drafter.close((1, 0), keep=False)
    world.drafter.check()
    assert not world.cache.memory.sequences
    monkeypatch.undo()
    world.close(1)
    world.read(1, PROMPTS[1])
    assert len(world.drafts([1], 4)[0].tokens) == 4


def test_behind_a_gap_it_drafts_once_it_has_read_enough() -> None:
    world = World("glm4-moe", history=12)
    world.read(1, PROMPTS[1], gap=13)
    world.read(2, PROMPTS[3])
    drafted: list[int] = []
    while not drafted or not drafted[-1]:
        behind, whole = world.round([1, 2], 2, [2, 0])
        assert whole.tokens
        drafted.append(len(world.lines[1].hidden) - 13 if behind.tokens else 0)
        assert len(drafted) < 12
    assert drafted[-1] >= 12
    assert len(drafted) > 3
