"""logprobs: the tokens of a choice that were not sent yet, with their text and log-probabilities.

A token may be a part of a character: then its text has U+FFFD, and what it is says its bytes.
"""

import codecs
import time

from kvcellar.events import Delta, TokenLogprob
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.text_codec import IMAGE
from kvcellar.images.image import is_row
from kvcellar.serve.answers import Answer

MIN_LOGPROB = -9999.0  # OpenAI's value for a token of probability 0; JSON has no -Infinity
UNREADABLE = "\ufffd"


class TokenScore(Answer):
    token: str
    logprob: float
    bytes: list[int] | None  # `null` where the token is a part of a character


class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


class TokenText:
    """The text and the bytes of single tokens, for logprobs. `as_ids`: the text is "token_id:N"."""

    def __init__(self, engine: Engine, as_ids: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token: int) -> str:
        """Where the token is a part of a character, with U+FFFD."""
        return id_text(token) if self._as_ids else self._of(token)[0]

    def raw(self, token: int) -> bytes | None:
        """The bytes that the token adds to a text; None for a model without text."""
        return self._of(token)[1]

    def scored(self, entry: TokenLogprob, *, unknown: list[int] | None = None) -> ScoredToken:
        """`unknown`: the bytes of a token of a model without text."""

        def one(token: int, logprob: float) -> tuple[str, float, list[int] | None]:
            raw = self.raw(token)
            return self.text(token), finite(logprob), unknown if raw is None else list(raw)

        return ScoredToken(*one(entry.token_id, entry.logprob), [TokenScore(*one(*top)) for top in entry.top])

    def name(self, token: int) -> str:
        """The text; where that does not say which token it is, `bytes:` and the bytes, as OpenAI writes them."""
        text, raw = self.text(token), self.raw(token)
        if UNREADABLE not in text or raw is None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _of(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, bytes | None]:
        if not self._engine.model.has_text:
            return id_text(token), None
        # Some tokenizers drop the space before the first word of a text; before the second word they keep it.
        once, twice = self._engine.decode([token]), self._engine.decode([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once
        return text, self._engine.token_bytes(token) if UNREADABLE in text else text.encode()


def id_text(token: int) -> str:
    return f"token_id:{token}"


class Places:
    """Where the tokens of a text begin, in its characters. A part of a character begins where the character does."""

    def __init__(self, tokens: TokenText, start: int = 0) -> None:
        self._tokens, self._at = tokens, start
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_image = False

    def add(self, token: int) -> int:
        """Where the next token begins."""
        begins, before = self._at, self._in_image
        self._in_image = is_row(token)
        if self._in_image and not before:
            self._at += len(IMAGE)  # which stands for rows that follow each other
        self._at += len(self._reader.decode(self._tokens.raw(token) or b""))
        return begins

    def at_least(self, characters: int) -> None:
        """The tokens so far have so much text: more than their bytes, where these are no characters."""
        self._at = max(self._at, characters)


class Tokens:
    """Of one choice: its tokens that were not sent yet."""

    def __init__(self, text: TokenText, before: str = "") -> None:
        """`before`: the text in front of the first token, which `offsets` count."""
        self.ids: list[int] = []
        self.ms: list[float] = []  # of each token, since the first one
        self._began: float | None = None
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []  # of each token, in characters of this choice's text; they never go back
        self._length = len(before)  # characters so far
        self._places = Places(text, self._length)

    def add(self, delta: Delta) -> None:
        self.ids += delta.token_ids
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self.ms += [round(1e3 * (now - self._began), 3)] * len(delta.token_ids)
        for entry in delta.logprobs or ():
            self.logprobs.append(entry)
            self.offsets.append(self._places.add(entry.token_id))
        self._length += len(delta.text)
        self._places.at_least(self._length)

    def mark_sent(self) -> None:
        self.ids, self.ms, self.logprobs, self.offsets = [], [], [], []


def top_by_text(entry: TokenLogprob, tokens: TokenText) -> dict[str, float]:
    """The most likely tokens and the token itself, the most likely first. Of tokens with equal names, the token itself,
    or else the most likely, has the name, and the others their ids."""
    own = tokens.name(entry.token_id)
    every = dict([*entry.top, (entry.token_id, entry.logprob)])
    named: dict[str, float] = {}
    for token, logprob in sorted(every.items(), key=lambda one: -one[1]):
        name = tokens.name(token)
        taken = name in named or (name == own and token != entry.token_id)
        named[id_text(token) if taken else name] = finite(logprob)
    return named


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
