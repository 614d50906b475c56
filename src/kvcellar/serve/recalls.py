"""recalls: what came from memory, and why it was not more, as JSON: in responses, and in the records of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.events import Recall

Json = dict[str, object]

RECALL: Mapping[str, str] = MappingProxyType(  # meaning of the fields of `recall`
    {
        "asked": "tokens of the prompt that can come from memory: all but the last",
        "matched": "of these, tokens that were found",
        "restored": "of these, tokens that were used",
        "sources": "restored tokens by the tier that had them when the request arrived: device, host, disk, remote",
        "seconds": "seconds that the request waited for tokens to be read back",
        "reason": "why it was not more: `all` (the last token is always computed), `no checkpoint`, `diverged`, `new`, "
        "`evicted`, `damaged`, `other weights`, `other adapter`, `cheaper to recompute`, `tier unavailable` or "
        "`prompt read`",
        "detail": "what the reason means here, in words",
        "entry": "where it diverged: the name of the entry of the tree that goes on in another way; else empty",
        "ours": "where it diverged: the next tokens of the prompt, as `tokens` and `text`; else `null`",
        "theirs": "where it diverged: the next tokens of the entry, likewise",
        "rewrite": "of a chat, the message in which the prompt is not what the conversation was so far: `message` (its "
        "index), `role`, `by` (`template`: rendered in another form, or `client`: sent in another form), and `tokens`, "
        "those of the conversation that cannot be used because of that; else `null`. A server with API keys and "
        "`share_prefixes` leaves it, `entry`, `ours` and `theirs` empty in responses",
    }
)


def recall_fields(recall: Recall, engine: ServedEngine | None, *, texts: bool = True) -> Json:
    """What a client gets: all but what other salts and users of its key have. `texts`: with what may be the text of
    other requests of its namespace."""
    if not texts:
        recall = replace(recall, entry="", ours=(), theirs=(), rewrite=None)
    values = (
        *(recall.asked, recall.matched, recall.restored, dict(recall.sources), recall.seconds),
        *(recall.reason, recall.detail, recall.entry),
        *(_side(tokens, engine) for tokens in (recall.ours, recall.theirs)),
        asdict(recall.rewrite) if recall.rewrite is not None else None,
    )
    return dict(zip(RECALL, values, strict=True))


def _side(tokens: Sequence[int], engine: ServedEngine | None) -> Json | None:
    if not tokens:
        return None
    return {
        "tokens": list(tokens),
        "text": engine.decode(tokens, special=True) if engine is not None and engine.model.has_text else None,
    }
