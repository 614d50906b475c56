"""ngram: drafts are what has followed the last tokens before: in the text itself, or in other texts of its namespace.

Always true:
  * a draft comes from the completion's own text or from one of the same namespace;
  * texts of a namespace that have ended are kept up to `shared_tokens` tokens, the latest, for `NAMESPACES` namespaces;
  * a call of `propose` indexes at most `INDEXED` tokens: what is behind is not found yet.

Always true of `Suffixes`, which tell where the last tokens of a text have occurred before:
  * every place where at least `LEAST` tokens end is in the chain of their hash, the latest first;
  * a token costs O(1) to append, 8 bytes here and 4 of the heads, and nothing is ever removed.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.memory.snapshot import requested

LEAST = 2  # tokens that have to occur again
LONGEST = 16  # tokens that are compared
TRIES = 16  # places that are compared, the latest first
BREAK = -1  # between two texts: equals no token


class Match(NamedTuple):
    """`length` tokens that end at `end` are the last ones of the text searched for."""

    length: int
    end: int


class Suffixes:
    """An index of the places in a text that grows. `expected` is about how many tokens it will have."""

    def __init__(self, expected: int) -> None:
        self.tokens = array("i")
        self._heads = array("i", bytes(4 << max(8, min(expected.bit_length(), 17))))  # latest place by hash; 0: none
        self._before = array("i")  # of each place, the one before it with the same hash; 0: none

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        own, heads, before = self.tokens, self._heads, self._before
        for token in tokens:
            own.append(token)
            end = len(own)
            if end >= LEAST:
                slot = self.slot(own[end - LEAST : end])
                before.append(heads[slot])
                heads[slot] = end

    def slot(self, tokens: Sequence[int]) -> int:
        """The hash of `LEAST` tokens."""
        return hash(tuple(tokens)) & (len(self._heads) - 1)

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest match of the last tokens of `tail` that something follows; of equally long ones, the latest."""
        n = len(tail)
        if n < LEAST:
            return None
        best, end = Match(LEAST - 1, 0), self._heads[self.slot(tail[n - LEAST :])]
        for _ in range(TRIES):
            if not end or best.length == min(n, LONGEST):
                break
            if end < len(self.tokens) and (length := self._length(tail, end)) > best.length:
                best = Match(length, end)
            end = self._before[end - LEAST]
        return best if best.end else None

    def _length(self, tail: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal the last ones of `tail`."""
        own, n = self.tokens, len(tail)
        most = min(n, end, LONGEST)
        length = 0
        while length < most and own[end - 1 - length] == tail[n - 1 - length]:
            length += 1
        return length

    def following(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens that follow a place, none behind a break."""
        found = self.tokens[end : end + count].tolist()
        return found[: found.index(BREAK)] if BREAK in found else found

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._before) == max(0, len(self.tokens) - LEAST + 1)
        for end in range(LEAST, len(self.tokens) + 1):
            at = self._heads[self.slot(self.tokens[end - LEAST : end])]
            while at > end:
                at = self._before[at - LEAST]
            assert at == end


INDEXED = 8192  # about 4 ms
NAMESPACES = 16
EXPECTED = 1024  # tokens that a completion may add; more are indexed too, in longer chains


@dataclass(slots=True)
class _Text:
    """The index of a completion's text."""

    index: Suffixes
    namespace: str
    shared: int  # its first tokens, which an earlier text of the namespace had
    expires: bool


@dataclass(slots=True)
class _Texts:
    """Texts of a namespace that have ended, in two indexes: `new` grows up to a size and then replaces `old`."""

    new: Suffixes
    old: Suffixes
    waiting: deque[int] = field(default_factory=deque[int])  # tokens to be indexed


class NGramDrafter:
    """Costs no forward. The longest match wins; of equally long ones that in the own text, then the latest."""

    name = "ngram"
    deepest = 16
    catches_up = False
    reads_hidden = False

    def __init__(self, *, shared_tokens: int = 2**16) -> None:
        self._half = max(1, shared_tokens // 2)
        self._own: dict[Key, _Text] = {}
        self._ended: OrderedDict[str, _Texts] = OrderedDict()  # by namespace, the least recently used first

    def propose(self, chains: Sequence[Chain]) -> None:
        left = INDEXED
        for chain in chains:
            left -= self._follow(chain, left)
        for namespace in dict.fromkeys(chain.namespace for chain in chains):
            if (texts := self._ended.get(namespace)) is not None:
                self._ended.move_to_end(namespace)
                left -= self._index(texts, left)
        for chain in chains:
            for token in self._drafts(chain):
                if chain.left:
                    chain.add(token)

    def committed(self, news: Sequence[Committed]) -> None:
        """Nothing depends on hidden states."""

    def close(self, key: Key, *, keep: bool) -> None:
        """Keep what is new of a text for others of its namespace, unless it is to be deleted after some time."""
        if (text := self._own.pop(key, None)) is None or text.expires or not keep:
            return
        texts = self._ended.get(text.namespace)
        if texts is None:
            texts = self._ended[text.namespace] = _Texts(Suffixes(self._half), Suffixes(0))
            while len(self._ended) > NAMESPACES:
                self._ended.popitem(last=False)
        new = text.index.tokens[max(0, text.shared - LONGEST) :]
        texts.waiting.extend((*new[-self._half :], BREAK))
        while len(texts.waiting) > 2 * self._half:
            texts.waiting.popleft()

    def fork(self, key: Key, other: Key) -> None:
        """The text of `other` is indexed when it is first drafted for."""

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop the texts of a namespace that have ended, or of all, whatever they begin with: where texts begin is not
        known."""
        if namespace is None:
            self._ended.clear()
        else:
            for one in [one for one in self._ended if requested(one) == namespace]:
                del self._ended[one]

    def _follow(self, chain: Chain, most: int) -> int:
        """Index up to `most` new tokens of a completion; returns how many."""
        text = self._own.get(chain.key)
        if text is None:
            index = Suffixes(len(chain.text) + EXPECTED)
            text = self._own[chain.key] = _Text(index, chain.namespace, chain.shared, chain.retention.ttl is not None)
        before = len(text.index)
        text.index.extend(chain.text[before : before + most])
        return len(text.index) - before

    def _index(self, texts: _Texts, most: int) -> int:
        count = min(most, len(texts.waiting))
        for _ in range(count):
            if len(texts.new) >= self._half:
                texts.old, texts.new = texts.new, Suffixes(self._half)
            texts.new.extend((texts.waiting.popleft(),))
        return count

    def _drafts(self, chain: Chain) -> list[int]:
        own = self._own[chain.key].index
        tail = chain.text[-LONGEST:]
        best, drafts = Match(0, 0), list[int]()
        if (match := own.find(tail)) is not None:
            best, drafts = match, own.following(match.end, chain.left)
            while len(own) == len(chain.text) and len(drafts) < chain.left:  # a text that repeats itself goes on so
                drafts.append(drafts[match.end - len(own)])
        texts = self._ended.get(chain.namespace)
        for index in (texts.new, texts.old) if texts is not None else ():
            match = index.find(tail)
            if match is not None and match.length > best.length and (found := index.following(match.end, chain.left)):
                best, drafts = match, found
        return drafts

    def check(self) -> None:
        """Assert what is always true."""
        assert len(self._ended) <= NAMESPACES
        for texts in self._ended.values():
            assert len(texts.new) <= self._half >= len(texts.old)
            for index in (texts.new, texts.old):
                index.check()
        for text in self._own.values():
            text.index.check()
