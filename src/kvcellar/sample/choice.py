"""choice: what the next draw of one answer depends on, besides its logits. No torch: plain arrays.

Always true:
  * `produced` counts every accepted token;
  * `seen_ids` names each token of the prompt (if the repetition penalty is on) and of the answer (if any penalty is on)
    once, and `seen_counts` says how often the answer has it; both of the last `repeat_last_n` tokens only, if limited;
  * no id in `seen_ids`, `end_ids` or `never_ids` lies outside the vocabulary;
  * no id in `never_ids` ends the answer: a token that ends it does not become part of its text.
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy

from kvcellar.sample.noise import uniform
from kvcellar.sample.params import SamplingParams
from kvcellar.sample.rules import Rules

MOST_GAIN = 1e30  # so that no score becomes infinite
GREEDY_BELOW = 1e-5  # as in vLLM (_SAMPLING_EPS): so cold that sampling could only differ from greedy by rounding


class Choice:
    """The state of one of a request's `n` answers. Costs O(prompt) to make if repetition is penalised or
    forbidden, else O(1)."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt_ids: Sequence[int],
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
        self._rules = Rules(params, prompt_ids, vocab_size=vocab_size, end_ids=self.end_array, never_ids=self.never_ids)
        any_penalty = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self.penalised = bool(any_penalty) and params.repeat_last_n != 0
        prompt = prompt_ids if self.penalised and params.repetition_penalty != 1.0 else ()
        # The tokens that penalties look at, oldest first, and how often each is there. None: the whole text.
        self._recent: deque[int] | None = None
        if self.penalised and params.repeat_last_n > 0:
            prompt = self._recent = deque(prompt, maxlen=params.repeat_last_n)
        self._times = Counter(self._recent)
        known = dict.fromkeys(t for t in prompt if t < vocab_size)
        self.seen_ids = array("q", known)
        self.seen_counts = array("q", bytes(8 * len(known)))
        self._place = {token: index for index, token in enumerate(self.seen_ids)}

    def twin(self, choice: int) -> "Choice":
        """That of another answer to the same prompt; nothing has been drawn yet. Copies what was read of the prompt."""
        assert not self.produced, "an answer that has begun has no twin"
        other = copy(self)
        other.choice = choice
        other.seen_ids, other.seen_counts, other._place = self.seen_ids[:], self.seen_counts[:], self._place.copy()
        other._rules = self._rules.twin()
        other._recent, other._times = copy(self._recent), self._times.copy()
        return other

    def accept(self, token: int) -> None:
        """`token` is now part of the answer."""
        self.produced += 1
        self._rules.accept(token)
        if not self.penalised:
            return
        if self._recent is not None:
            self._slide(self._recent, token)
        if token >= self.vocab_size:
            return
        index = self._place.setdefault(token, len(self.seen_ids))
        if index == len(self.seen_ids):
            self.seen_ids.append(token)
            self.seen_counts.append(0)
        self.seen_counts[index] += 1

    def _slide(self, recent: deque[int], token: int) -> None:
        """`token` is the newest of the tokens that penalties look at. If there are too many now, the oldest leaves."""
        if len(recent) == recent.maxlen:
            oldest = recent[0]
            self._times[oldest] -= 1
            if self._times[oldest] == 0:
                del self._times[oldest]
            if oldest < self.vocab_size:
                # Prompt tokens leave before any of the answer's, so one of the answer leaves only if all there are.
                self._unsee(oldest, of_answer=self.produced > len(recent))
        recent.append(token)
        self._times[token] += 1

    def _unsee(self, token: int, *, of_answer: bool) -> None:
        index = self._place[token]
        self.seen_counts[index] -= of_answer
        if token in self._times:
            return
        del self._place[token]
        last, count = self.seen_ids.pop(), self.seen_counts.pop()
        if last != token:  # the last one takes its place: their order means nothing
            self.seen_ids[index], self.seen_counts[index], self._place[last] = last, count, index

    def ends_with(self, token: int) -> bool:
        """Does the answer end when `token` is drawn?"""
        return token in self.end_ids

    def forbidden(self) -> "array[int]":
        """The tokens that cannot be drawn next."""
        return self._rules.forbidden(self.produced)

    def biases(self) -> tuple["array[int]", "array[float]"]:
        """The tokens whose scores are biased next, each once, and by how much."""
        return self._rules.biases()

    def ends_gain(self) -> float:
        """How much of its size is added to the score of each token that ends the answer: at most `MOST_GAIN`."""
        decay = self.params.exponential_decay_length_penalty
        if decay is None or self.produced <= decay[0] or not self.end_array:
            return 0.0
        start, factor = decay
        return math.exp(min((self.produced - start) * math.log(factor), math.log(MOST_GAIN))) - 1.0

    def uniform(self, pos: int) -> float:
        """The chance with which the token at `pos` is drawn."""
        return uniform(self.seed, self.choice, pos)

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self.seen_ids) == len(self.seen_counts) == len(self._place)
        assert all(self._place[token] == index for index, token in enumerate(self.seen_ids))
        assert all(count >= 0 for count in self.seen_counts)
        assert sum(self.seen_counts) <= self.produced
        if self._recent is not None:
            assert self._times == Counter(self._recent)
            assert set(self.seen_ids) == {token for token in self._times if token < self.vocab_size}
        assert self.end_ids.isdisjoint(self.never_ids)
        self._rules.check(self.produced)
        for ids in (self.seen_ids, self.end_array, self.never_ids):
            assert all(0 <= token < self.vocab_size for token in ids)
