"""ngram: drafts are what has followed the last tokens before: in the text itself, or in other texts of its namespace.

Always true:
  * a draft comes from the completion's own text or from one of the same namespace;
  * texts of a namespace that have ended are kept up to `shared_tokens` tokens, the latest, for `NAMESPACES` namespaces;
  * a call of `propose` indexes at most `INDEXED` tokens: what is behind is not found yet.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcellar.snapshot import requested
from kvcellar.speculate.chain import Chain, Key
from kvcellar.speculate.drafter import Committed
from kvcellar.speculate.suffixes import BREAK, LONGEST, Match, Suffixes

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
