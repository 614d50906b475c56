"""declared: the form that a checkpoint declares: the `response_template` of its tokenizer, in transformers' format.

Its marks are fixed texts, or patterns. No pattern is run, since it could take any time: those that stand for one text
are read as that text, and a template with others is not used.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcellar.text.replies.form import Body, ReplyForm, Section, Thought

DECLARED = "the checkpoint has a response_template"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_SPACE = re.compile(r"\\s[*+]?")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_SPECIAL = frozenset("()[]{}?*+|.^$\\")
_OBJECT = ({"name": "{content.name}", "arguments": "{content.arguments}"}, "{content}")
_PARAMETERS = {"name": "{content.name}", "arguments": "{content.parameters}"}


def declared(template: Any) -> ReplyForm | None:
    """The form of a template; None if there is none, or it has marks or calls of a kind that is not read."""
    fields = _mapping(_mapping(template).get("fields"))
    calls = _mapping(fields.get("tool_calls"))
    thoughts: list[Thought] = []
    for name in _REASONING:
        opens, closes = (_marks(_mapping(fields.get(name)), part) for part in ("open", "close"))
        thoughts += [Thought(opens[0], closes[0])] if opens and closes else []
    opens, closes = _marks(calls, "open"), _marks(calls, "close")
    function: Any = _mapping(calls.get("transform")).get("function")
    if calls.get("content") != "json" or calls.get("content_args") or not opens or not closes:
        return None
    if function not in (*_OBJECT, _PARAMETERS):
        return None
    key = "parameters" if function == _PARAMETERS else "arguments"
    section = Section(begin=tuple(opens), body=Body.OBJECT, arguments=key, finish=tuple(closes))
    return ReplyForm("declared", DECLARED, (section,), tuple(thoughts))


def _marks(field: Mapping[str, Any], part: str) -> Sequence[str]:
    """The texts that open or close a field; none if they are patterns that stand for more than one text."""
    fixed: Any = field.get(part)
    if isinstance(fixed, str):
        return [fixed] if fixed.strip() else []
    if isinstance(fixed, list):
        texts = [text for text in cast("list[Any]", fixed) if isinstance(text, str) and text.strip()]
        return texts if len(texts) == len(cast("list[Any]", fixed)) else []
    pattern: Any = field.get(f"{part}_pattern")
    text = _SPACE.sub("", pattern) if isinstance(pattern, str) else ""
    if not text.strip() or _SPECIAL & set(_ESCAPED.sub("", text)):
        return []
    return [_ESCAPED.sub(r"\1", text)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
