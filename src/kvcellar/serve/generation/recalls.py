"""recalls: what came from memory, and why it was not more, as JSON: in responses, and in the records of requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from msgspec.structs import asdict

from kvcellar.events import Recall
from kvcellar.frontend.served_engine import ServedEngine
from kvcellar.serve.answers import Answer


class TokensFields(Answer):
    tokens: list[int]
    text: str | None


class RewriteFields(Answer):
    message: int | None
    role: str
    by: Literal["template", "client"]
    tokens: int


class RecallFields(Answer, kw_only=True):
    asked: int  # tokens of the prompt that can come from memory: all but the last
    matched: int  # of these, tokens that were found
    restored: int  # of these, tokens that were used
    # restored tokens by the tier that had them when the request arrived: device, host, disk, remote
    sources: dict[str, int]
    seconds: float  # seconds that the request waited for tokens to be read back
    # why it was not more: `all` (the last token is always computed), `no checkpoint`, `diverged`, `new`, `evicted`,
    # `damaged`, `other weights`, `other adapter`, `cheaper to recompute`, `tier unavailable` or `prompt read`
    reason: str
    detail: str  # what the reason means here, in words
    entry: str  # where it diverged: the name of the entry of the tree that goes on in another way; else empty
    # where it diverged: the next tokens of the prompt, as `tokens` and `text`; else `null`
    ours: TokensFields | None
    theirs: TokensFields | None  # where it diverged: the next tokens of the entry, likewise
    # of a chat, the message in which the prompt is not what the conversation was so far: `message` (its index), `role`,
    # `by` (`template`: rendered in another form, or `client`: sent in another form), and `tokens`, those of the
    # conversation that cannot be used because of that; else `null`. A server with API keys and `share_prefixes` leaves
    # it, `entry`, `ours` and `theirs` empty in responses
    rewrite: RewriteFields | None


class OperatorsRecall(RecallFields, kw_only=True):
    salted: int  # first tokens that are in memory for the same API key with another salt or user


def recall_fields(recall: Recall, engine: ServedEngine | None, *, texts: bool = True) -> RecallFields:
    """What a client gets: all but what other salts and users of its key have. `texts`: with what may be the text of
    other requests of its namespace."""
    if not texts:
        recall = replace(recall, entry="", ours=(), theirs=(), rewrite=None)
    return RecallFields(
        asked=recall.asked,
        matched=recall.matched,
        restored=recall.restored,
        sources=dict(recall.sources),
        seconds=recall.seconds,
        reason=recall.reason,
        detail=recall.detail,
        entry=recall.entry,
        ours=_side(recall.ours, engine),
        theirs=_side(recall.theirs, engine),
        rewrite=None if recall.rewrite is None else RewriteFields.of(recall.rewrite),
    )


def operators_recall(recall: Recall, engine: ServedEngine | None) -> OperatorsRecall:
    return OperatorsRecall(**asdict(recall_fields(recall, engine)), salted=recall.salted)


def _side(tokens: Sequence[int], engine: ServedEngine | None) -> TokensFields | None:
    if not tokens:
        return None
    text = engine.decode(tokens, special=True) if engine is not None and engine.model.has_text else None
    return TokensFields(list(tokens), text)
