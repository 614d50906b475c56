"""logprobs: the tokens of a choice that were not sent yet, with their text and log-probabilities."""

from dataclasses import dataclass, field

from kvcellar.events import Delta, TokenLogprob
from kvcellar.serve.protocols import ServedEngine

MIN_LOGPROB = -9999.0  # OpenAI's value for a token of probability 0; JSON has no -Infinity


class TokenText:
    """The text of single tokens, for logprobs. Where a token is an incomplete character, its text contains U+FFFD."""

    def __init__(self, engine: ServedEngine, as_ids: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def utf8(self, token: int) -> list[int] | None:
        """The bytes of a token, or None where its text is incomplete."""
        text = self.text(token)
        return None if "\ufffd" in text else list(text.encode())

    def _decode(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        # Some tokenizers drop the space before the first word of a text; before the second word they keep it.
        once, twice = self._engine.decode([token]), self._engine.decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once


@dataclass(slots=True)
class Tokens:
    """Of one choice: its tokens that were not sent yet."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    offsets: list[int] = field(default_factory=list[int])  # of each token, in characters of this choice's text
    _length: int = 0  # characters of text so far, and of what is in front of it
    _pending: int = 0  # characters of tokens whose text has not arrived yet

    def put_in_front(self, text: str) -> None:
        """Before the first token."""
        self._length = len(text)

    def add(self, delta: Delta, tokens: TokenText) -> None:
        self.ids += delta.token_ids
        for entry in delta.logprobs or ():
            self.logprobs.append(entry)
            self.offsets.append(self._length + self._pending)
            self._pending += len(tokens.text(entry.token_id))
        if delta.text:
            self._length += len(delta.text)
            self._pending = 0

    def mark_sent(self) -> None:
        self.ids, self.logprobs, self.offsets = [], [], []


def top_by_text(entry: TokenLogprob, tokens: TokenText) -> dict[str, float]:
    """The most likely tokens and the token itself. Of tokens with equal text only the most likely is included."""
    top: dict[str, float] = {}
    for token, logprob in sorted([*entry.top, (entry.token_id, entry.logprob)], key=lambda one: -one[1]):
        top.setdefault(tokens.text(token), finite(logprob))
    return top


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
