"""Reads texts as answers, and the dumb way to look at pieces: all of a kind together."""

import json
from dataclasses import dataclass, field
from typing import Any

from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning
from kvcellar.text.replies.form import ReplyForm
from kvcellar.text.replies.machine import Machine, Outline, joined
from kvcellar.text.replies.tools import Tools, checked

TOOLS = checked(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "exact": {"type": "boolean"},
                        "more": {"type": "object"},
                        "list": {"type": "array"},
                        "share": {"type": "number"},
                        "nothing": {"type": "null"},
                    },
                },
            },
        }
        for name in ("weather", "get_time", "a-b_C9")
    ]
)


@dataclass
class Read:
    """What an answer has."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])  # complete ones
    ids: list[str] = field(default_factory=list[str])
    unclosed: int = 0  # calls that were opened and not closed


def pieces_of(
    form: ReplyForm,
    parts: list[str],
    *,
    tools: Tools | None = TOOLS,
    special: frozenset[str] = frozenset(),
    opening: str = "",
    **how: Any,
) -> list[Piece]:
    """The pieces of a text in parts; those in `special` are control tokens."""
    numbers = iter(range(1000))
    machine = Machine(Outline(form, tools, **how), lambda kind: f"id{next(numbers)}")
    if opening:
        machine.push(opening, special=True)
    found = [piece for part in parts for piece in machine.push(part, special=part in special)]
    return joined([*found, *machine.end()])


def read(pieces: list[Piece]) -> Read:
    """Checks the order of the pieces, too."""
    seen, names, arguments, closed = Read(), list[str](), list[str](), 0
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                seen.content += text
            case Reasoning(text):
                assert text
                seen.reasoning += text
            case CallOpened(call, call_id, name):
                assert call == len(names)
                names.append(name)
                arguments.append("")
                seen.ids.append(call_id)
            case CallArguments(call, text):
                assert call == len(names) - 1
                arguments[call] += text
            case CallClosed(call):
                assert call == len(names) - 1
                seen.calls.append((names[call], json.loads(arguments[call])))
                assert isinstance(seen.calls[-1][1], dict)
                closed += 1
    seen.unclosed = len(names) - closed
    return seen
