"""A draft model on a memory of its own, and a target that keeps a part of each step: hand-written attention models with
a window, on real memory."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvcellar import Batch, Feed, Memory, Plan, Span
from kvcellar.engine.speculate.chain import Chain, verify
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import Forward, ModelDrafter
from tests.examples.test_examples import example
from tests.speculate.chains import chain, sampler

HAND = example("handwritten")
VOCAB = HAND.VOCAB
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5], [40, 2, 9]]


def forward_of(model: object) -> Forward:
    def forward(memory: Memory, plan: Plan, ids: list[int], rows: list[int]) -> Tensor:
        return model.forward(memory, plan, ids)[rows]  # type: ignore[attr-defined]

    return forward


def drafter(seed: int = 0, *, memory: Memory | None = None, deepest: int = 4, **options: object) -> ModelDrafter:
    memory = memory if memory is not None else HAND.new_memory()
    return ModelDrafter(
        "small", forward_of(HAND.Model(seed)), DraftMemory(memory), context=60, deepest=deepest, **options
    )  # type: ignore[arg-type]


def generated(
    draft: ModelDrafter | None, prompts: Sequence[list[int]], count: int, depth: int = 4, **options: object
) -> tuple[list[list[int]], int, Memory]:
    """Texts of the target, the accepted drafts, and its memory. Rounds draft for all texts that are not complete."""
    target, memory, accepted = forward_of(HAND.Model(0)), HAND.new_memory(), 0
    texts = [list(prompt) for prompt in prompts]
    samplers = [sampler(text, vocab=VOCAB, noise=i, **options) for i, text in enumerate(texts)]
    while running := [i for i, text in enumerate(texts) if len(text) < len(prompts[i]) + count]:
        chains: list[Chain] = []
        for i in running:
            room = len(prompts[i]) + count - len(texts[i]) - 1
            chains.append(chain(samplers[i], min(depth, room), text=texts[i], number=i))
        if draft is not None:
            if asked := [one for one in chains if one.left]:
                draft.propose(asked)
            draft.check()
        spans = [
            Span(memory.length(i), len(one.text) + len(one.drafts)) for i, one in zip(running, chains, strict=True)
        ]
        ids = [
            token for span, one in zip(spans, chains, strict=True) for token in [*one.text, *one.tokens][span.start :]
        ]
        ends = torch.tensor([len(span) for span in spans]).cumsum(0).tolist()
        rows = [row for end, one in zip(ends, chains, strict=True) for row in range(end - one.rows, end)]
        plan = memory.begin(Batch(tuple(Feed(i, span) for i, span in zip(running, spans, strict=True))))
        verified = verify(chains, target(memory, plan, ids, rows))
        rounds = zip(running, spans, chains, verified, strict=True)
        memory.commit({i: len(span) - one.rows + len(found.drawn) for i, span, one, found in rounds})
        for i, one in zip(running, verified, strict=True):
            accepted += one.accepted
            for drawn in one.drawn:
                samplers[i].accept(drawn.token_id)
                texts[i].append(drawn.token_id)
        memory.check()
    return texts, accepted, memory


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 1, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("batched", [True, False])
def test_texts_equal_those_of_plain_decoding_and_so_does_memory(
    options: dict[str, object], seed: int, batched: bool
) -> None:
    expected, _, plain = generated(None, PROMPTS, 24, **options)
    draft = drafter(seed, batched=batched)
    texts, accepted, memory = generated(draft, PROMPTS, 24, **options)
    assert texts == expected
    for seq in range(len(PROMPTS)):
        assert memory.length(seq) == plain.length(seq)
        assert memory.held(seq) == plain.held(seq)
    assert memory.free() == plain.free()
    if seed == 0:
        assert accepted >= 0.7 * 24 * len(PROMPTS)  # the target itself drafts


def test_the_memory_holds_texts_and_no_drafts() -> None:
    draft = drafter()
    texts, _, _ = generated(draft, PROMPTS, 12)
    lengths = sorted(draft._memory.length(seq) for seq in draft._memory.sequences)
    assert all(length <= longest for length, longest in zip(lengths, sorted(map(len, texts)), strict=True))
    for number in range(len(PROMPTS)):
        draft.close((number, 0), keep=True)
    draft.check()
    assert not draft._memory.sequences
    draft.forget(None)
    draft.check()
    assert set(draft._memory.free().values()) == {256}


def one_call(draft: ModelDrafter, texts: Sequence[list[int]], room: int = 3) -> list[int]:
    chains = [chain(sampler(vocab=VOCAB, temperature=0.0), room, text=text, number=i) for i, text in enumerate(texts)]
    draft.propose(chains)
    draft.check()
    return [len(one.drafts) for one in chains]


def test_a_long_text_is_computed_in_parts() -> None:
    draft = drafter(step_tokens=10)
    text = list(range(25))
    assert [one_call(draft, [text]) for _ in range(3)] == [[0], [0], [3]]
    assert one_call(draft, [[*text, 1]]) == [3]


def test_a_text_without_room_in_the_context_has_no_drafts() -> None:
    draft = drafter()
    assert one_call(draft, [[1] * 58, [1] * 57]) == [0, 3]


def test_sequences_that_are_not_in_use_make_room() -> None:
    draft = drafter(step_tokens=1000)
    texts = [[number] * 50 for number in range(5)]
    for number, text in enumerate(texts):
        one = chain(sampler(vocab=VOCAB, temperature=0.0), 3, text=text, number=number)
        draft.propose([one])
        assert len(one.drafts) == 3
    one = chain(sampler(vocab=VOCAB, temperature=0.0), 3, text=[9] * 50, number=9)
    draft.propose([one])
    assert len(one.drafts) == 3
    draft.check()
    assert len(draft._memory.sequences) == 5


def test_where_memory_is_full_of_what_is_used_those_that_fit_have_drafts() -> None:
    draft = drafter(step_tokens=1000)
    assert one_call(draft, [[number] * 50 for number in range(6)]) == [2] * 5 + [0]
    assert one_call(draft, [[number] * 51 for number in range(5)], room=9) == [1] * 5


def test_an_error_in_the_draft_leaves_the_texts() -> None:
    fails = False
    inner = forward_of(HAND.Model(0))

    def forward(memory: Memory, plan: Plan, ids: list[int], rows: list[int]) -> Tensor:
        if fails and len(ids) == 1:
            raise RuntimeError("out of memory")
        return inner(memory, plan, ids, rows)

    draft = ModelDrafter("small", forward, DraftMemory(HAND.new_memory()), context=60)
    assert one_call(draft, [[1, 2, 3]]) == [3]
    fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        one_call(draft, [[1, 2, 3, 4, 5]])
    draft.check()
    assert [draft._memory.length(seq) for seq in draft._memory.sequences] == [5]
    fails = False
    draft.close((0, 0), keep=False)
    assert one_call(draft, [[1, 2, 3, 4, 5]]) == [3]


def test_a_long_text_that_is_new_keeps_no_drafts_from_others() -> None:
    draft = drafter(step_tokens=8)
    assert one_call(draft, [[1, 2, 3]]) == [3]
    assert one_call(draft, [[4] * 40, [1, 2, 3, 4]]) == [0, 3]
