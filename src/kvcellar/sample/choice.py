"""choice: what the next draw of one answer depends on, besides its logits. No torch: plain arrays.

Always true:
  * `produced` counts every accepted token;
  * `seen_ids` names each token of the prompt (if the repetition penalty is on) and of the answer (if any penalty is on)
    once, in order of first appearance, and `seen_counts` says how often the answer holds it;
  * no id in `seen_ids`, `bias_ids`, `end_ids` or `never_ids` lies outside the vocabulary;
  * no id in `never_ids` ends the answer: a token that ends it does not become part of its text.
"""

from array import array
from collections.abc import Iterable
from copy import copy

from kvcellar.sample.noise import uniform
from kvcellar.sample.params import SamplingParams

GREEDY_BELOW = 1e-5  # as in vLLM (_SAMPLING_EPS): so cold that sampling could only differ from greedy by rounding


class Choice:
    """The state of one of a request's `n` answers. Costs O(prompt) to make if repetition is penalised, else O(1)."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt_ids: Iterable[int],
        vocab_size: int,
        end_ids: frozenset[int],
        never_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`end_ids` are the model's own; the request's stop ids are added, and `ignore_eos` leaves the model's out.
        `never_ids` cannot stand in a text of this model (padding), so they are not drawn, whatever the request says."""
        self.params = params
        self.seed, self.choice, self.vocab_size = seed, choice, vocab_size
        self.produced = 0
        self.greedy = params.temperature < GREEDY_BELOW
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else end_ids)
        self.end_ids = frozenset(token for token in ends if token < vocab_size)
        self.end_array = array("q", sorted(self.end_ids))
        self.never_ids = array("q", sorted(token for token in never_ids - self.end_ids if token < vocab_size))
        self.bias_ids = array("q", (token for token in params.logit_bias if token < vocab_size))
        self.bias_values = array("d", (params.logit_bias[token] for token in self.bias_ids))
        self.penalised = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        known = dict.fromkeys(t for t in prompt_ids if t < vocab_size) if params.repetition_penalty != 1.0 else {}
        self.seen_ids = array("q", known)
        self.seen_counts = array("q", bytes(8 * len(known)))
        self._place = {token: index for index, token in enumerate(self.seen_ids)}

    def twin(self, choice: int) -> "Choice":
        """That of another answer to the same prompt; nothing has been drawn yet. Copies what was read of the prompt."""
        assert not self.produced, "an answer that has begun has no twin"
        other = copy(self)
        other.choice = choice
        other.seen_ids, other.seen_counts, other._place = self.seen_ids[:], self.seen_counts[:], self._place.copy()
        return other

    def accept(self, token: int) -> None:
        """`token` is now part of the answer."""
        self.produced += 1
        if not self.penalised or token >= self.vocab_size:
            return
        index = self._place.setdefault(token, len(self.seen_ids))
        if index == len(self.seen_ids):
            self.seen_ids.append(token)
            self.seen_counts.append(0)
        self.seen_counts[index] += 1

    def ends_with(self, token: int) -> bool:
        """Does the answer end when `token` is drawn?"""
        return token in self.end_ids

    @property
    def must_go_on(self) -> bool:
        """Are the tokens that would end the answer still forbidden?"""
        return self.produced < self.params.min_tokens

    def uniform(self, pos: int) -> float:
        """The chance with which the token at `pos` is drawn."""
        return uniform(self.seed, self.choice, pos)

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self.seen_ids) == len(self.seen_counts) == len(self._place)
        assert all(self._place[token] == index for index, token in enumerate(self.seen_ids))
        assert all(count >= 0 for count in self.seen_counts)
        assert sum(self.seen_counts) <= self.produced
        assert self.end_ids.isdisjoint(self.never_ids)
        for ids in (self.seen_ids, self.bias_ids, self.end_array, self.never_ids):
            assert all(0 <= token < self.vocab_size for token in ids)
