"""chain: the drafts of one completion in one round: which are proposed, and which of them are its tokens.

A round computes the rows [current, draft 1, ..., draft D] of a completion in one step: `current` is its last token,
which is not in memory yet, and the logits of row i are those of the token after i drafts.

One rule for greedy and sampled texts, with all sampling options: every row draws its own token, and a draft is accepted
if it is the token of its row. A draft that was drawn by noise of its own is coupled with the draw of its row, so that
it is accepted as often as is possible (`engine/sample/couple.py`). Every token of a text has the distribution of the
target. Without such drafts (n-grams, greedy texts, texts with a seed) tokens are drawn as in plain decoding, and the
text is the same.

Always true:
  * `samplers[i]` is the state of sampling after the first i drafts: penalties and bans see these;
  * every draft is a token of the vocabulary, there are at most `room`, and none follows one that ends the completion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.engine.sample.couple import Draft
from kvcellar.engine.sample.draw import BY_TORCH, Drawn, Draws
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions

PART = 64  # rows that are drawn at once: a draw takes up to 90 bytes for each token of the vocabulary and each row

Key = tuple[int, int]  # a completion: number of the request, index of the completion


class Chain:
    """What a drafter reads of a completion, and the drafts that it adds.

    `text` is the prompt and the tokens so far, of which the first `shared` were in the prefix cache when the request
    began. The target has `rows_of_images` more in its memory, which are not tokens. `pos` is the position of the first
    draft. `room` is how many drafts are wanted. What a drafter computes of
    the text is kept for others of the `namespace` as `retention` says.
    """

    def __init__(
        self,
        key: Key,
        text: Sequence[int],
        sampler: Sampler,
        pos: int,
        room: int,
        *,
        namespace: str,
        shared: int,
        rows_of_images: int = 0,
        retention: RetentionOptions = NO_OPTIONS,
        draws: Draws = BY_TORCH,
    ) -> None:
        self.key, self.text, self.pos, self.room = key, text, pos, max(0, room)
        self.namespace, self.shared, self.retention = namespace, shared, retention
        self.rows_of_images = rows_of_images
        self.draws = draws  # of all chains of an engine the same
        self.drafts: list[Draft] = []
        self.samplers = [sampler]
        self._closed = False

    @property
    def left(self) -> int:
        """How many more drafts are of use."""
        return 0 if self._closed else self.room - len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        return [draft.token_id for draft in self.drafts]

    @property
    def rows(self) -> int:
        """Rows of the step: the current token's, and one for each draft."""
        return len(self.drafts) + 1

    def add(self, token: int, weights: Tensor | None = None) -> None:
        """Append a draft; one that the constraint of the completion does not allow closes the chain instead.
        `weights`: see `Draft`. Raises `ValueError` for one that cannot follow."""
        sampler = self.samplers[-1]
        if self.left < 1:
            raise ValueError(f"{len(self.drafts)} drafts of {self.room}: no other can follow")
        if not 0 <= token < sampler.vocab_size:
            raise ValueError(f"draft {token} is not a token; these are 0 to {sampler.vocab_size - 1}")
        if weights is not None and (weights.dtype != torch.int64 or weights.shape != (sampler.vocab_size,)):
            raise ValueError(f"weights of a draft are [{sampler.vocab_size}] int64, as `weights_of` makes them")
        if not sampler.matches(token):
            self._closed = True
            return
        self.drafts.append(Draft(token, weights))
        self.samplers.append(sampler.after(token))
        self._closed = sampler.ends_with(token)

    def close(self) -> None:
        """No other draft follows."""
        self._closed = True

    def cut(self, most: int) -> None:
        """Keep the first `most` drafts at most, and close. With none, the round is plain decoding."""
        del self.drafts[most:]
        del self.samplers[most + 1 :]
        self._closed = True

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self.samplers) == len(self.drafts) + 1 <= self.room + 1
        assert not any(map(self.samplers[0].ends_with, self.tokens[:-1]))
        assert all(0 <= token < self.samplers[0].vocab_size for token in self.tokens)


def extend(chains: Sequence[Chain], logits: Tensor) -> None:
    """Append a draft to each chain, drawn from its row of a draft model's logits [R,W] with the sampling options of its
    completion. A chain gets none, and is closed, where no token can be drawn.

    Tokens that the draft model does not have are never drafted. A draft is drawn by noise of its own; that of a greedy
    completion, or of one with a seed, by the noise that draws the token itself, so that the text does not depend on the
    drafts.
    """
    samplers = [chain.samplers[-1] for chain in chains]
    noise = [_noise(chain) for chain in chains]
    found = chains[0].draws.propose(_widened(logits, samplers[0].vocab_size), samplers, noise)
    for chain, sampler, one in zip(chains, samplers, found, strict=True):
        if math.isfinite(one.score):
            chain.add(one.token_id, one.weights if sampler.couples else None)
        else:
            chain.close()


def _widened(logits: Tensor, vocab: int) -> Tensor:
    """The columns [R,V] that are tokens of the completion; those that the draft model does not have are forbidden."""
    missing = max(0, vocab - logits.shape[1])
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits[:, :vocab]


def _noise(chain: Chain) -> float:
    """The random number that draws the next draft."""
    sampler = chain.samplers[-1]
    return sampler.uniform(chain.pos + len(chain.drafts), "draft" if sampler.couples else "draw")


@dataclass(frozen=True, slots=True)
class Verified:
    """The tokens of a completion in a round, in order: drafts that were accepted, and then one that was not a draft,
    unless an accepted draft ends the completion. The last one may be an error in place of a token.

    A row whose mask is late ends it; `drawn` may be empty then.

    As in plain decoding the last token is not in memory: of the rows [current, drafts], the first `len(drawn)` are
    kept. `accepted` drafts are tokens of the text, one that ends it included; of the others, only the next was tried.
    """

    drawn: tuple[Drawn, ...]
    accepted: int
    tried: int


def verify(chains: Sequence[Chain], logits: Tensor) -> list[Verified]:
    """Verify the drafts of each chain by the logits [T,W] of its rows, chain by chain in order. Changes nothing."""
    samplers, draw = [sampler for chain in chains for sampler in chain.samplers], chains[0].draws.draw
    if len(samplers) == len(chains):  # plain decoding
        drawn = draw(logits, samplers, [chain.pos for chain in chains])
        return [Verified(() if one.late else (one,), 0, 0) for one in drawn]
    positions = [chain.pos + row for chain in chains for row in range(chain.rows)]
    drafts = [draft for chain in chains for draft in (*chain.drafts, None)]
    parts = [slice(start, start + PART) for start in range(0, len(samplers), PART)]
    drawn = [one for at in parts for one in draw(logits[at], samplers[at], positions[at], drafts[at])]
    verdicts: list[Verified] = []
    row = 0
    for chain in chains:
        verdicts.append(judge(chain, drawn[row : row + chain.rows]))
        row += chain.rows
    return verdicts


def judge(chain: Chain, drawn: Sequence[Drawn]) -> Verified:
    """`drawn` has the token of each row."""
    tokens = chain.tokens
    for row, one in enumerate(drawn):
        if one.late:
            return Verified(tuple(drawn[:row]), row, row)
        accepted = row < len(tokens) and one.error is None and one.token_id == tokens[row]
        ended = one.error is None and chain.samplers[row].ends_with(one.token_id)
        if ended or not accepted:
            return Verified(tuple(drawn[: row + 1]), row + accepted, min(row + 1, len(tokens)))
    raise AssertionError("the last row has no draft")
