"""history: the messages of a chat by digest, and which of them is not what it was in an earlier prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvcellar.text.conversation import texts
from kvcellar.text.template import Rendered

DIGEST = 8  # bytes, of one message


@dataclass(frozen=True, slots=True)
class History:
    """`said` has a digest of each message, `keys[n]` is one of the first `n`, of the namespace and of the settings of
    the template."""

    said: tuple[bytes, ...]
    keys: tuple[bytes, ...]

    @property
    def key(self) -> bytes:
        return self.keys[-1]


def history(rendered: Rendered, namespace: str) -> History:
    digest = blake2b(_json([namespace, rendered.settings]), digest_size=16)
    said, keys = list[bytes](), [digest.digest()]
    for message in rendered.messages:
        said.append(blake2b(_json(message), digest_size=DIGEST).digest())
        digest.update(said[-1])
        keys.append(digest.digest())
    return History(tuple(said), tuple(keys))


def changed(now: Sequence[bytes], before: Sequence[bytes]) -> int | None:
    """The first message that is another one than in an earlier request of the same conversation: one that has some of
    the messages from there on. None if there is none."""
    first = next((n for n, (one, other) in enumerate(zip(now, before, strict=False)) if one != other), None)
    return first if first is not None and not set(now[first:]).isdisjoint(before[first:]) else None


def as_generated(message: Mapping[str, Any], reply: str) -> bool:
    """Whether a client has sent a reply back as it was: what differs is the work of the template."""
    if message.get("tool_calls"):
        return True
    content = "".join(texts(message)).strip()
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str):
        return content == reply.strip()
    return reasoning.strip() in reply and content in reply


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
