"""rules: which tokens may not come next and which are biased, by the request and by the text before them. No torch.

Always true:
  * an n-gram of the prompt is in the index that all answers share, any other in that of its own answer;
  * `_tail` holds the last tokens of prompt and answer, as many as the longest phrase looks back at;
  * no id that `forbidden` or `biases` returns lies outside the vocabulary.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from kvcellar.sample.params import SamplingParams


class NGrams:
    """Which tokens have followed the last `size - 1` tokens before. Each token costs O(size) to add and to look up."""

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._back = size - 1
        self._tail: list[int] = []
        self._prompt: dict[bytes, dict[int, None]] = {}  # never changes once the prompt is read
        self._answer = self._prompt
        for token in prompt:
            self.add(token)
        self._answer = {}

    def twin(self) -> "NGrams":
        """That of another answer to the same prompt, whose index both share. Only before the first token."""
        other = object.__new__(NGrams)
        other._back, other._tail, other._prompt, other._answer = self._back, self._tail[:], self._prompt, {}
        return other

    def add(self, token: int) -> None:
        if len(self._tail) == self._back:
            self._answer.setdefault(self._key(), {})[token] = None
        self._tail.append(token)
        if len(self._tail) > self._back:
            del self._tail[0]

    def banned(self) -> list[int]:
        """The tokens that would complete an n-gram that is there already."""
        if len(self._tail) < self._back:
            return []
        key = self._key()
        return [*self._prompt.get(key, ()), *self._answer.get(key, ())]

    def _key(self) -> bytes:
        return array("q", self._tail).tobytes()

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._tail) <= self._back
        assert all(len(key) == 8 * self._back for index in (self._prompt, self._answer) for key in index)


class Phrases:
    """Sequences of token ids, each with a bias for its last token where the others stand before it; -inf forbids it."""

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        self.single = {ids[0]: bias for ids, bias in biases.items() if len(ids) == 1}
        self.back = max((len(ids) - 1 for ids in biases), default=0)
        self._by_end: dict[int, list[tuple[tuple[int, ...], int, float]]] = {}
        for (*before, last), bias in biases.items():
            if before:
                self._by_end.setdefault(before[-1], []).append((tuple(before), last, bias))

    def after(self, tail: deque[int]) -> dict[int, float]:
        """The biases of tokens that would complete a sequence of two or more behind `tail`, added up."""
        found: dict[int, float] = {}
        end = tuple(tail)
        for before, last, bias in self._by_end.get(end[-1], ()) if end else ():
            if end[-len(before) :] == before:
                found[last] = found.get(last, 0.0) + bias
        return found


class Rules:
    """The rules of one answer. Costs O(prompt) to make if n-grams must not repeat, else O(1) and the rules."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        vocab_size: int,
        end_ids: "array[int]",
        never_ids: "array[int]",
    ) -> None:
        """`end_ids` end the answer, and may not come before its least length; `never_ids` may not come at all."""
        self._vocab, self._ends = vocab_size, end_ids
        self._least = max(params.min_tokens, params.min_length - len(prompt) if params.min_length else 0)
        self._first = array("q", sorted(self._known(set(params.begin_suppress_tokens))))
        self._ngrams = NGrams(size, prompt) if (size := params.no_repeat_ngram_size) else None
        phrases = Phrases({**params.sequence_bias, **dict.fromkeys(params.bad_words_ids, -math.inf)})
        self._phrases = phrases if phrases.back else None
        self._tail = deque(prompt[-phrases.back :] if phrases.back else (), maxlen=phrases.back)
        bad = (token for token, bias in phrases.single.items() if bias == -math.inf)
        self._never = array("q", sorted(self._known({*never_ids, *params.suppress_tokens, *bad})))
        single = dict(params.logit_bias)
        for token, bias in phrases.single.items():
            single[token] = single.get(token, 0.0) + bias
        self._biases = self._finite(single)

    def twin(self) -> "Rules":
        """Those of another answer to the same prompt. Only before the first token."""
        other = copy(self)
        other._tail = self._tail.copy()
        other._ngrams = None if self._ngrams is None else self._ngrams.twin()
        return other

    def accept(self, token: int) -> None:
        """`token` is now part of the answer."""
        self._tail.append(token)
        if self._ngrams is not None:
            self._ngrams.add(token)

    def forbidden(self, produced: int) -> "array[int]":
        """The tokens that cannot come after `produced` tokens of the answer. Costs what it returns, and the phrases
        that the last token is in."""
        found = self._never
        if produced < self._least:
            found = found + self._ends
        if not produced:
            found = found + self._first
        if self._ngrams is not None:
            found = found + array("q", self._known(self._ngrams.banned()))
        if self._phrases is not None:
            after = self._phrases.after(self._tail)
            found = found + array("q", self._known(token for token, bias in after.items() if bias == -math.inf))
        return found

    def biases(self) -> tuple["array[int]", "array[float]"]:
        """The tokens whose scores are biased next, each once, and by how much."""
        after = self._phrases.after(self._tail) if self._phrases is not None else {}
        if not after:
            return self._biases
        for token, bias in zip(*self._biases, strict=True):
            after[token] = after.get(token, 0.0) + bias
        return self._finite(after)

    def _finite(self, biases: Mapping[int, float]) -> tuple["array[int]", "array[float]"]:
        known = {token: biases[token] for token in self._known(biases) if math.isfinite(biases[token])}
        return array("q", known), array("d", known.values())

    def _known(self, tokens: Iterable[int]) -> Iterable[int]:
        return (token for token in tokens if token < self._vocab)

    def check(self, produced: int) -> None:
        """Assert what is always true."""
        if self._ngrams is not None:
            self._ngrams.check()
        assert self._phrases is None or self._tail.maxlen == self._phrases.back
        for ids in (self.forbidden(produced), self.biases()[0]):
            assert all(0 <= token < self._vocab for token in ids)
