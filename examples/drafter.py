"""A drafter of your own: known phrases are proposed when a text begins one. Run it: python examples/drafter.py

The target here is a table of logits instead of a network, so the whole loop of speculative decoding is visible: draft,
compute all rows at once, verify, learn. The text is the same as without drafts, in fewer rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcellar.engine.sample.sampler import Sampler
from kvcellar.engine.speculate.chain import Chain, Key, verify
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.events import Speculation
from kvcellar.sampling_params import SamplingParams

VOCAB = 64
PHRASES = [list(range(start, start + 12)) for start in range(0, 48, 12)]


class PhraseDrafter:
    """Proposes the rest of a phrase when the last two tokens are in it. It keeps nothing for a completion."""

    name = "phrases"
    deepest = 8
    catches_up = False
    reads_hidden = False

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self.after = {tuple(phrase[i : i + 2]): phrase[i + 2 :] for phrase in phrases for i in range(len(phrase) - 2)}

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            for token in self.after.get(tuple(chain.text[-2:]), ())[: chain.left]:
                chain.add(token)

    def committed(self, news: Sequence[Committed]) -> None:
        pass

    def fork(self, key: Key, other: Key) -> None:
        pass

    def close(self, key: Key, *, keep: bool) -> None:
        pass

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        pass


def target() -> Tensor:
    """Logits [VOCAB,VOCAB] of the token after each token: mostly the next one of a phrase."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    for phrase in PHRASES:
        logits[phrase[:-1], phrase[1:]] += 8.0
    return logits


class Clock:
    """Every step takes a second, as on a large model that waits for its weights; drafts take no time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def generate(logits: Tensor, count: int, speculator: Speculator | None, clock: Clock) -> tuple[list[int], int]:
    """`count` tokens after token 0, and the number of steps."""
    params = SamplingParams(temperature=0.8, seed=1)
    sampler = Sampler(params, seed=1, index=0, prompt_ids=(0,), vocab_size=VOCAB, end_ids=frozenset())
    text, steps = [0], 0
    while len(text) <= count:
        room = count - len(text)  # one token of a round is not a draft
        chain = Chain((0, 0), text, sampler, len(text), room, namespace="", shared=0)
        if speculator is not None:
            speculator.draft([chain])
        clock.now += 1.0
        verified = verify([chain], logits[[text[-1], *chain.tokens]])
        for drawn in verified[0].drawn:
            sampler.accept(drawn.token_id)
            text.append(drawn.token_id)
        if speculator is not None:
            speculator.learn([chain], verified)
        steps += 1
    return text[1:], steps


def main() -> tuple[int, int, Speculation]:
    """Steps without drafts, steps with drafts, and the report."""
    logits = target()
    clock = Clock()
    speculator = Speculator(PhraseDrafter(PHRASES), clock=clock)
    plain, without = generate(logits, 400, None, clock)
    text, steps = generate(logits, 400, speculator, clock)
    assert text == plain, "drafts must not change the text"
    report = speculator.report(0)
    assert report is not None
    print(f"{without} steps without drafts, {steps} with: {report.accepted} of {report.drafted} drafts were accepted")
    return without, steps, report


if __name__ == "__main__":
    main()
