"""conversation: messages as a client sends them, checked before any template sees them.

Everything is copied into plain lists, dicts and strings. In the copy, control tokens that a client wrote are marked: a
`Marker` puts a character that occurs nowhere else into them, so that after rendering it can be seen where a control
token came from, whatever the template did with the text around it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.sandbox import Caps
from kvcellar.text.tokens import check_unicode

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing under three names; templates know the first two


def checked(messages: object, caps: Caps) -> list[dict[str, Any]]:
    """A copy of `messages` that a template may see. Raises `BadRequest` ("messages") that says what is wrong where."""
    if not isinstance(messages, list | tuple):
        raise _wrong(f"messages must be a list, not {type(messages).__name__}")
    given = cast("Sequence[object]", messages)
    if not 1 <= len(given) <= caps.messages:
        raise _wrong(f"there are {len(given)} messages; 1 to {caps.messages} are allowed")
    copier = Copier(caps, "messages")
    copies: list[dict[str, Any]] = []
    calls = False
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        copy = copier.copy(message, where)
        if not isinstance(copy, dict):
            raise _wrong(f"{where} must be an object with role and content, not {type(message).__name__}")
        copies.append(_message(cast("dict[str, Any]", copy), where))
        calls = calls or bool(copies[-1].get("tool_calls"))
        if copies[-1]["role"] == "tool" and not calls:
            raise _wrong(f"{where} is a tool's answer, but no message before it has tool_calls")
    return copies


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message, if it is right. Without its nulls, as in transformers: templates know missing fields, not null."""
    if message.get("role") not in (roles := sorted(ROLES)):
        raise _wrong(f"{where}.role must be one of {', '.join(roles)}, not {message.get('role')!r}")
    content = message.get("content")
    calls = message["role"] == "assistant" and (message.get("tool_calls") or message.get("function_call"))
    if isinstance(content, list):
        for index, part in enumerate(cast("list[Any]", content)):
            _text_part(part, f"{where}.content[{index}]")
    if not content and not isinstance(content, str) and not calls:
        raise _wrong(f"{where} has no content")
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{where}.content must be text or a list of text parts")
    return _with_reasoning({name: value for name, value in message.items() if value is not None})


def _text_part(given: object, where: str) -> None:
    part = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if part.get("type") != "text":
        raise _wrong(f"{where} is of type {part.get('type')!r}; only parts of type 'text' can be read here")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where} has no text")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give the message's reasoning all names that templates read it by, as transformers does."""
    told = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if told is None else {"thinking": told, **message, "reasoning_content": told}


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the text of its parts in one: newlines between them, as in vLLM."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in cast("list[dict[str, str]]", content))}


def parted(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class Copier:
    """Copies JSON, and nothing else, within the caps on size and depth. One copier's copies share one allowance."""

    def __init__(self, caps: Caps, param: str) -> None:
        self._caps, self._param = caps, param
        self._left = caps.message_chars

    def copy(self, value: object, where: str, depth: int = 0) -> Any:
        """A copy of `value`, which is found at `where`."""
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise _wrong(f"{self._param}: more than {self._caps.message_chars} characters together", self._param)
        if depth > self._caps.depth:
            raise _wrong(f"{where} is nested more than {self._caps.depth} deep", self._param)
        if isinstance(value, str):
            check_unicode(value, self._param)
            return str(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            items = cast("Sequence[object]", value)
            return [self.copy(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(items)]
        if isinstance(value, Mapping):
            pairs = cast("Mapping[object, object]", value).items()
            return {self._key(key, where): self.copy(item, f"{where}.{key}", depth + 1) for key, item in pairs}
        raise _wrong(f"{where} must be JSON, not {type(value).__name__}", self._param)

    def _key(self, key: object, where: str) -> str:
        if not isinstance(key, str):
            raise _wrong(f"the keys of {where} must be strings, not {type(key).__name__}", self._param)
        return self.copy(key, where)


class Marker:
    """Marks control tokens in text that is not the template's, with a character `mark` that is nowhere else.

    A mark stands behind the first character of whatever reads like a control token, in any case of letters. A text that
    ends with the beginning of one has a mark there, too: the next text may begin with the rest of it.
    """

    def __init__(self, control: Iterable[str]) -> None:
        tokens = sorted({token.lower() for token in control if token})
        self._whole = re.compile(_any_of(tokens) if tokens else "(?!)", re.IGNORECASE)
        self._beginnings = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, self._beginnings), default=0)

    def marked(self, value: Any, mark: str) -> Any:
        """`value`, JSON, with marks in all its strings; keys, and the roles and types of messages, are not texts."""
        if isinstance(value, str):
            return self._text(value, mark)
        if isinstance(value, list):
            return [self.marked(item, mark) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            pairs = cast("dict[str, Any]", value).items()
            return {key: item if key in ("role", "type") else self.marked(item, mark) for key, item in pairs}
        return value

    def _text(self, text: str, mark: str) -> str:
        end = len(text.rstrip())  # templates like to trim
        tail = text[max(0, end - self._longest) : end].lower()
        open_ended = any(tail[at:] in self._beginnings for at in range(len(tail)))
        body = self._whole.sub(lambda found: found[0][0] + mark + found[0][1:], text[:end])
        return body + (mark if open_ended else "") + text[end:]


def unmarked(text: str, mark: str) -> tuple[str, tuple[int, ...]]:
    """The text without marks, and where they were."""
    parts = text.split(mark)
    places = accumulate(len(part) for part in parts[:-1])
    return "".join(parts), tuple(places)


def unused(texts: Iterable[str]) -> str:
    """A character that is in none of the texts, and in no text that means anything: it is for private use."""
    used = {char for text in texts for char in _PRIVATE.findall(text)}
    return next(char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in used)


_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


def _any_of(tokens: list[str]) -> str:
    """A pattern that matches the longest of `tokens`, and looks at no character twice to find out which."""
    first, last = min(tokens), max(tokens)  # what these two share, all between them share
    shared = first[: next((n for n, char in enumerate(first) if last[n : n + 1] != char), len(first))]
    rests: dict[str, list[str]] = {}
    for rest in (token[len(shared) :] for token in tokens):
        rests.setdefault(rest[:1], []).append(rest)
    branches = [_any_of(those) for first, those in rests.items() if first]
    ends_here = "?" if "" in rests else ""
    return re.escape(shared) + (f"(?:{'|'.join(branches)}){ends_here}" if branches else "")


def strings(value: Any) -> Iterator[str]:
    """All strings in JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from chain.from_iterable(map(strings, cast("list[Any]", value)))
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(strings, chain.from_iterable(cast("dict[str, Any]", value).items())))


def _wrong(message: str, param: str = "messages") -> BadRequest:
    return BadRequest(message, param)
