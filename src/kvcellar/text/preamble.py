"""preamble: the messages that a model puts in front of those of a request: its system prompt, and examples of turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preamble:
    """`system` is used where a conversation does not begin with a system message of its own, `examples` always."""

    system: str | None = None
    examples: tuple[Mapping[str, Any], ...] = ()

    def before(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The conversation with its preamble. What is not a conversation is returned as it is, to be refused."""
        if not (self.system or self.examples) or not isinstance(messages, list | tuple):
            return messages
        own = 0
        while own < len(messages) and isinstance(one := messages[own], Mapping) and one.get("role") in _SYSTEM:
            own += 1
        system = messages[:own] or ([{"role": "system", "content": self.system}] if self.system else [])
        return [*system, *self.examples, *messages[own:]]


NO_PREAMBLE = Preamble()
