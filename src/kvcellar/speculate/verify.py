"""verify: which drafts are tokens of their completions, and the token that follows them.

One rule for greedy and sampled texts, with all sampling options: every row draws its own token, and a draft is accepted
if it is the token of its row. A draft that was drawn by noise of its own is coupled with the draw of its row, so that
it is accepted as often as is possible (`sample/couple.py`). Every token of a text has the distribution of the target.
Without such drafts (n-grams, greedy texts, texts with a seed) tokens are drawn as in plain decoding, and the text is
the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcellar.sample.draw import Drawn, draw
from kvcellar.speculate.chain import Chain

PART = 64  # rows that are drawn at once: a draw takes up to 90 bytes for each token of the vocabulary and each row


@dataclass(frozen=True, slots=True)
class Verified:
    """The tokens of a completion in a round, in order: drafts that were accepted, and then one that was not a draft,
    unless an accepted draft ends the completion. The last one may be an error in place of a token.

    As in plain decoding the last token is not in memory: of the rows [current, drafts], the first `len(drawn)` are
    kept. `accepted` drafts are tokens of the text, one that ends it included; of the others, only the next was tried.
    """

    drawn: tuple[Drawn, ...]
    accepted: int
    tried: int


def verify(chains: Sequence[Chain], logits: Tensor) -> list[Verified]:
    """Verify the drafts of each chain by the logits [T,W] of its rows, chain by chain in order. Changes nothing."""
    samplers = [sampler for chain in chains for sampler in chain.samplers]
    if len(samplers) == len(chains):  # plain decoding
        drawn = draw(logits, samplers, [chain.pos for chain in chains])
        return [Verified((one,), 0, 0) for one in drawn]
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
        accepted = row < len(tokens) and one.error is None and one.token_id == tokens[row]
        ended = one.error is None and chain.samplers[row].ends_with(one.token_id)
        if ended or not accepted:
            return Verified(tuple(drawn[: row + 1]), row + accepted, min(row + 1, len(tokens)))
    raise AssertionError("the last row has no draft")
