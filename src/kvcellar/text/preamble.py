"""preamble: the messages that a model puts in front of those of a request: its system prompt, and examples of turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preamble:
    """`system` is used where a conversation does not begin with a system message of its own, `examples` always."""

    system: str | None = None
    examples: tuple[Mapping[str, Any], ...] = ()

    def before(self, messages: Sequence[Any]) -> Sequence[Any]:
        """The conversation with its preamble. What is not a conversation is returned as it is, to be refused."""
        if not (self.system or self.examples) or not isinstance(messages, list | tuple):
            return messages
        own = next((at for at, one in enumerate(messages) if _role(one) not in _SYSTEM), len(messages))
        system = messages[:own] or ([{"role": "system", "content": self.system}] if self.system else [])
        return [*system, *self.examples, *messages[own:]]


def _role(message: Any) -> Any:
    return cast("Mapping[str, Any]", message).get("role") if isinstance(message, Mapping) else None


NO_PREAMBLE = Preamble()
