"""sampler: the state that sampling one completion needs beside its logits. No torch: plain arrays.

Always true:
  * `produced` counts every accepted token;
  * if any penalty is on, `seen_ids` names each token of the completion once, and `seen_counts` has how often it
    contains it; both of the last `repeat_last_n` tokens only, if that is limited;
  * what is collected from the prompt, for the repetition penalty and for n-grams, never changes, and is shared by all
    completions of the request; what each of them has is of its own tokens;
  * no id in `seen_ids`, `end_ids` or `never_ids`, or returned by `prompt_seen`, `forbidden` or `biases`, lies outside
    the vocabulary;
  * no id in `never_ids` ends the completion: a token that ends it does not become part of its text;
  * `matcher` has accepted the tokens of the completion; samplers of its drafts share it, and name them.
"""

import hashlib
import math
import struct
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import repeat
from typing import TYPE_CHECKING

from kvcellar.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcellar.engine.sample.matcher import Matcher

MAX_BOOST = 1e30  # so that no score becomes infinite
GREEDY_BELOW = 1e-5  # as vLLM's _SAMPLING_EPS: below it, sampling could differ from greedy by rounding only


def uniform(seed: int, index: int, pos: int, purpose: str = "draw") -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments on every machine. The only source of
    randomness: a keyed hash, so a draw depends on no other draw, batch or device.

    `seed` is from -2**63 to 2**64 - 1; the completion's `index` and `pos` are at least 0; `purpose` has at most 16
    ASCII characters and separates uses that must be independent (drawing a token, accepting a draft).
    """
    digest = hashlib.blake2b(
        struct.pack("<QQ", index, pos),
        digest_size=8,
        key=seed.to_bytes(16, "little", signed=True),
        person=purpose.encode("ascii"),
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """The sampling state of the completion number `index` of a request. Costs O(prompt) to make if repetition is
    penalised or forbidden, else O(1)."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        index: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: frozenset[int],
        never_ids: frozenset[int] = frozenset(),
        matcher: "Matcher | None" = None,
    ) -> None:
        """`end_ids` are the model's own: the request's stop ids are added, and with `ignore_eos` the model's are left
        out. `never_ids` cannot be in a text of this model (padding) and are never drawn. `matcher` is that of the
        constraint in `params`, at its start."""
        self.params, self.matcher = params, matcher
        self._drafts: tuple[int, ...] = ()  # which `matcher` has not accepted: it is shared with `after`
        self.late = False  # the last mask was not known in time
        self.seed, self.index, self.vocab_size = seed, index, vocab_size
        self.produced = 0
        self.greedy = params.temperature < GREEDY_BELOW
        # A text with a seed must not depend on what is drafted, nor must a greedy one.
        self.couples = params.seed is None and not self.greedy
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else end_ids)
        self.end_ids = frozenset(token for token in ends if token < vocab_size)
        self.end_array = array("q", sorted(self.end_ids))
        self.never_ids = array("q", sorted(token for token in never_ids - self.end_ids if token < vocab_size))
        self._rules = _Rules(params, prompt_ids, vocab_size, self.end_array, self.never_ids)
        self._see(prompt_ids)

    def _see(self, prompt_ids: Sequence[int]) -> None:
        """Collect the tokens of the prompt that penalties apply to."""
        params = self.params
        any_penalty = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self.penalised = bool(any_penalty) and params.repeat_last_n != 0
        repeats = self.penalised and params.repetition_penalty != 1.0
        self._prompt = _PromptTokens(prompt_ids, self.vocab_size, params.repeat_last_n) if repeats else None
        # The tokens of the completion that penalties apply to, oldest first. None: all of them.
        self._recent: deque[int] | None = None
        if self.penalised and params.repeat_last_n > 0:
            self._recent = deque(maxlen=params.repeat_last_n)
        self.seen_ids, self.seen_counts = array("q"), array("q")
        self._place: dict[int, int] = {}  # of each of `seen_ids`

    def fork(self, index: int) -> "Sampler":
        """The sampler of another completion of the same prompt. Only before the first token. Shares what was collected
        from the prompt."""
        assert not self.produced, "only a sampler that has drawn nothing can be forked"
        other = self._copy()
        other.index = index
        other.matcher = self.matcher.fork() if self.matcher is not None else None
        return other

    def after(self, token: int) -> "Sampler":
        """The sampler of the next position if `token`, a draft, is accepted. This one does not change, and the new one
        is not to be used once it does. Copies the tokens of the completion that penalties apply to."""
        other = self._copy()
        other._count(token)
        other._drafts = (*self._drafts, token)
        return other

    def _copy(self) -> "Sampler":
        other = copy(self)
        if self.penalised:
            other.seen_ids, other.seen_counts, other._place = self.seen_ids[:], self.seen_counts[:], self._place.copy()
            other._recent = copy(self._recent)
        if self._rules.reads_text:
            other._rules = self._rules.fork()
        return other

    def accept(self, token: int) -> None:
        """Append `token` to the completion."""
        if self.matcher is not None and token not in self.end_ids:  # nothing comes behind an end
            self.matcher.accept(token)
        self._count(token)

    def resume(self, tokens: Sequence[int]) -> str | None:
        """Append tokens that another sampler of this completion has drawn. Only before the first token. Returns None,
        or why the constraint does not allow them."""
        for token in tokens:
            self._count(token)
        return self.matcher.resume(tokens) if self.matcher is not None and tokens else None

    def _count(self, token: int) -> None:
        """All of `accept` but what the constraint says."""
        self.produced += 1
        self._rules.accept(token)
        if not self.penalised:
            return
        if self._recent is not None:
            self._slide(self._recent, token)
        if token >= self.vocab_size:
            return
        place = self._place.setdefault(token, len(self.seen_ids))
        if place == len(self.seen_ids):
            self.seen_ids.append(token)
            self.seen_counts.append(0)
        self.seen_counts[place] += 1

    def _slide(self, recent: deque[int], token: int) -> None:
        """Append `token` to the tokens that penalties apply to, and remove the oldest if they are too many then."""
        if len(recent) == recent.maxlen and recent[0] < self.vocab_size:
            self._unsee(recent[0])
        recent.append(token)

    def _unsee(self, token: int) -> None:
        place = self._place[token]
        self.seen_counts[place] -= 1
        if self.seen_counts[place]:
            return
        del self._place[token]
        last, count = self.seen_ids.pop(), self.seen_counts.pop()
        if last != token:  # the last one moves here: the order has no meaning
            self.seen_ids[place], self.seen_counts[place], self._place[last] = last, count, place

    def prompt_seen(self) -> "array[int]":
        """The tokens of the prompt that the repetition penalty applies to, each once; not to be changed. Costs a copy
        of them where it is limited to the last tokens, else nothing."""
        return self._prompt.seen(self.produced) if self._prompt is not None else _NONE

    def ends_with(self, token: int) -> bool:
        """Does the completion end when `token` is drawn?"""
        return token in self.end_ids

    def forbidden(self) -> "array[int]":
        """The tokens that cannot be drawn next, beside those that the constraint does not allow."""
        return self._rules.forbidden(self.produced)

    def matches(self, token: int) -> bool:
        """Does the constraint allow `token` next?"""
        return self.matcher is None or self.matcher.allows(self._drafts, token)

    def fill_mask(self, mask: "NDArray[np.int32]") -> None:
        """Write what the constraint allows next, a bit for each token of the vocabulary: none if it is `late`."""
        assert self.matcher is not None, "this completion has no constraint"
        self.late = not self.matcher.fill(self._drafts, mask)

    def biases(self) -> tuple["array[int]", "array[float]"]:
        """The tokens whose scores are biased in the next draw, each once, and the biases."""
        return self._rules.biases()

    def end_boost(self) -> float:
        """The share of its absolute value that is added to the score of each token that ends the completion: at most
        `MAX_BOOST`."""
        decay = self.params.exponential_decay_length_penalty
        if decay is None or self.produced <= decay[0] or not self.end_array:
            return 0.0
        start, factor = decay
        return math.exp(min((self.produced - start) * math.log(factor), math.log(MAX_BOOST))) - 1.0

    def uniform(self, pos: int, purpose: str = "draw") -> float:
        """The random number that draws the token at `pos`; with another purpose, an independent one."""
        return uniform(self.seed, self.index, pos, purpose)

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self.seen_ids) == len(self.seen_counts) == len(self._place)
        assert all(self._place[token] == place for place, token in enumerate(self.seen_ids))
        assert all(count > 0 for count in self.seen_counts)
        assert sum(self.seen_counts) <= self.produced
        if self._recent is not None:
            times = Counter(token for token in self._recent if token < self.vocab_size)
            assert dict(zip(self.seen_ids, self.seen_counts, strict=True)) == times
        assert self.end_ids.isdisjoint(self.never_ids)
        self._rules.check(self.produced)
        for ids in (self.seen_ids, self.prompt_seen(), self.end_array, self.never_ids):
            assert all(0 <= token < self.vocab_size for token in ids)


_NONE = array("q")  # never changed


class _PromptTokens:
    """The tokens of a prompt that are in the vocabulary, each once, the last ones first."""

    def __init__(self, prompt: Sequence[int], vocab: int, last: int) -> None:
        """`last`: only so many of the last tokens count; -1: all."""
        self._last = last
        kept = prompt if last < 0 else prompt[max(0, len(prompt) - last) :]
        unique = dict.fromkeys(reversed(kept))
        self._ids = array("q", unique if max(unique, default=0) < vocab else [one for one in unique if one < vocab])
        self._back = array("q")  # how far each is from the end of the prompt: 1 for its last token; empty if all count
        if last >= 0:
            back = dict(zip(kept, range(len(kept), 0, -1), strict=True))
            self._back.extend(back[token] for token in self._ids)

    def seen(self, produced: int) -> "array[int]":
        """Those that count after so many tokens of the completion."""
        return self._ids if self._last < 0 else self._ids[: bisect_right(self._back, self._last - produced)]


Followers = int | dict[int, None]  # one, or several


class _NGrams:
    """The tokens that have followed each `size - 1` tokens. Each token costs O(size) to add and to look up."""

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._back = size - 1
        self._tail = tuple(prompt[max(0, len(prompt) - self._back) :])
        self._own: dict[tuple[int, ...], Followers] = {}
        self._shared: tuple[dict[tuple[int, ...], Followers], ...] = ()  # by forks, which only read them
        before = zip(*(prompt[at:] for at in range(self._back)), strict=False) if self._back else repeat(())
        index = self._own
        for key, token in zip(before, prompt[self._back :], strict=False):
            if index.setdefault(key, token) != token:  # most are new: a long prompt has many
                _add(index, key, token)
        self._shared, self._own = (index,), {}

    def fork(self) -> "_NGrams":
        """The fork reads what this one has added itself, too, so it is of use until this one changes; if this one has
        added nothing, without end."""
        other = copy(self)
        other._shared = (*self._shared, self._own) if self._own else self._shared
        other._own = {}
        return other

    def add(self, token: int) -> None:
        if len(self._tail) == self._back:
            _add(self._own, self._tail, token)
        self._tail = (*self._tail, token)[-self._back :] if self._back else ()

    def banned(self) -> list[int]:
        """The tokens that would complete an n-gram which occurs already."""
        found = [index.get(self._tail, ()) for index in (*self._shared, self._own)]
        return [token for one in found for token in ((one,) if isinstance(one, int) else one)]

    def check(self) -> None:
        assert len(self._tail) <= self._back
        assert all(len(key) == self._back for index in (*self._shared, self._own) for key in index)


def _add(index: dict[tuple[int, ...], Followers], key: tuple[int, ...], token: int) -> None:
    found = index.setdefault(key, token)
    if isinstance(found, dict):
        found[token] = None
    elif found != token:
        index[key] = {found: None, token: None}


class _Phrases:
    """Sequences of token ids, each with a bias of its last token where the others precede it; -inf forbids it."""

    def __init__(self, biases: Mapping[tuple[int, ...], float]) -> None:
        self.single = {ids[0]: bias for ids, bias in biases.items() if len(ids) == 1}
        self.back = max((len(ids) - 1 for ids in biases), default=0)
        self._by_end: dict[int, list[tuple[tuple[int, ...], int, float]]] = {}
        for (*before, last), bias in biases.items():
            if before:
                self._by_end.setdefault(before[-1], []).append((tuple(before), last, bias))

    def after(self, tail: deque[int]) -> dict[int, float]:
        """The biases of tokens that would complete a sequence of two or more after `tail`, added up."""
        found: dict[int, float] = {}
        end = tuple(tail)
        for before, last, bias in self._by_end.get(end[-1], ()) if end else ():
            if end[-len(before) :] == before:
                found[last] = found.get(last, 0.0) + bias
        return found


class _Rules:
    """Which tokens are forbidden or biased next, by the parameters and by the text so far. Costs O(prompt) to make if
    n-grams must not repeat, else O(1) and the rules."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab: int, ends: "array[int]", never: "array[int]"
    ) -> None:
        """`ends` end the completion, and are forbidden below its minimum length; `never` always are."""
        self._vocab, self._ends = vocab, ends
        self._least = max(params.min_tokens, params.min_length - len(prompt) if params.min_length else 0)
        self._first = array("q", sorted(self._known(set(params.begin_suppress_tokens))))
        self._ngrams = _NGrams(size, prompt) if (size := params.no_repeat_ngram_size) else None
        phrases = _Phrases({**params.sequence_bias, **dict.fromkeys(params.bad_words_ids, -math.inf)})
        self._phrases = phrases if phrases.back else None
        self._tail = deque(prompt[-phrases.back :] if phrases.back else (), maxlen=phrases.back)
        bad = (token for token, bias in phrases.single.items() if bias == -math.inf)
        self._never = array("q", sorted(self._known({*never, *params.suppress_tokens, *bad})))
        single = dict(params.logit_bias)
        for token, bias in phrases.single.items():
            single[token] = single.get(token, 0.0) + bias
        self._biases = self._finite(single)

    @property
    def reads_text(self) -> bool:
        """Do they depend on the tokens so far? Otherwise only on their number, and `accept` changes nothing."""
        return self._ngrams is not None or self._phrases is not None

    def fork(self) -> "_Rules":
        other = copy(self)
        other._tail = self._tail.copy()
        other._ngrams = None if self._ngrams is None else self._ngrams.fork()
        return other

    def accept(self, token: int) -> None:
        self._tail.append(token)
        if self._ngrams is not None:
            self._ngrams.add(token)

    def forbidden(self, produced: int) -> "array[int]":
        """The tokens forbidden after `produced` tokens of the completion. Costs what it returns, and the phrases that
        the last token is in."""
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
        after = self._phrases.after(self._tail) if self._phrases is not None else {}
        if not after:
            return self._biases
        for token, bias in zip(*self._biases, strict=True):
            after[token] = after.get(token, 0.0) + bias
        return self._finite(after)

    def _finite(self, biases: Mapping[int, float]) -> tuple["array[int]", "array[float]"]:
        found = {token: biases[token] for token in self._known(biases) if math.isfinite(biases[token])}
        return array("q", found), array("d", found.values())

    def _known(self, tokens: Iterable[int]) -> Iterable[int]:
        """Those of the vocabulary."""
        return (token for token in tokens if token < self._vocab)

    def check(self, produced: int) -> None:
        if self._ngrams is not None:
            self._ngrams.check()
        assert self._phrases is None or self._tail.maxlen == self._phrases.back
        for ids in (self.forbidden(produced), self.biases()[0]):
            assert all(0 <= token < self._vocab for token in ids)
