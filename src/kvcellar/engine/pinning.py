"""pinning: prompts that are pinned: what a chat begins with, and whether memory has it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvcellar.engine.transcript import Render
from kvcellar.errors import BadRequest
from kvcellar.prefix.node import common_prefix, key_of
from kvcellar.prefix.tree import Tree


def is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_prefix(render: Render, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens that all chats have in common which begin with these messages. After one of the user, that is the
    prompt of the answer; after others, what comes before the text of the user's next message."""
    if messages and messages[-1].get("role") == "user":
        return render(messages)
    one, other = (render([*messages, {"role": "user", "content": text}]) for text in ("a", "b"))
    if not (common := one[: common_prefix(one, other)]):
        raise BadRequest("chats that begin with these messages have no tokens in common", "messages")
    return common


def check_pinned(tree: Tree, namespace: str, ids: Sequence[int]) -> None:
    """Raise `BadRequest` if a prompt that was just computed is not pinned. To be called on the engine's thread."""
    if not any(node.retention.pinned for node in tree.match(tree.peek(namespace), key_of(ids), len(ids)).path):
        raise BadRequest(
            f"a prompt of {len(ids)} tokens cannot be pinned beside {tree.pins.tokens} tokens that are; "
            f"shorten it, pin fewer, or raise pin_share or cache_bytes",
            "prompt",
        )
