"""conversation: messages as a client sends them, checked before any template sees them.

Messages are copied into plain lists, dicts and strings. In the copy, a `Marker` inserts a character that occurs nowhere
else into every control token that a client wrote. So after rendering, control tokens of the client differ from those of
the template, even if the template changed the text around them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.tokens import check_unicode

PIECE = 32 * 2**10  # characters that are searched at once: a call keeps the interpreter until it returns
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms; templates read the first two


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits for rendering one conversation. Characters are Unicode code points."""

    messages: int = 10_000
    message_chars: int = 2**23  # all strings of the messages together
    depth: int = 32  # of lists and objects within a message
    marks: int = 100_000  # matches of control tokens in the messages' text
    seconds: float = 5.0  # of a run of the template
    output_chars: int = 2**24


LEAST_MESSAGE_CHARS = 2**20
SPARE = 4  # messages may have so many times the text that fits the context: templates omit some of it (reasoning)


def caps_for(characters: int | None, context: int) -> Caps:
    """Caps on a conversation, by how much text fits the context, whose tokens have at most so many characters."""
    caps = Caps()
    if characters is None:
        return caps
    return replace(caps, message_chars=min(caps.message_chars, max(LEAST_MESSAGE_CHARS, SPARE * context * characters)))


_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preamble:
    """The messages that a model puts in front of those of a request: `system` where a conversation does not begin with
    a system message of its own, and always `examples` of turns."""

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


def checked(messages: object, caps: Caps) -> list[dict[str, Any]]:
    """A copy of `messages` that is safe to pass to a template. Raises `BadRequest` with the place and the error."""
    if not isinstance(messages, list | tuple):
        raise _wrong(f"messages must be a list, not {type(messages).__name__}")
    given = cast("Sequence[object]", messages)
    if not 1 <= len(given) <= caps.messages:
        raise _wrong(f"messages has {len(given)} items; 1 to {caps.messages} are allowed")
    copier = Copier(caps, "messages")
    copies: list[dict[str, Any]] = []
    history = _Calls()
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        copy = copier.copy(message, where)
        if not isinstance(copy, dict):
            raise _wrong(f"{where} must be an object with role and content, not {type(message).__name__}")
        copies.append(_message(cast("dict[str, Any]", copy), where))
        history.add(copies[-1], where)
    return copies


class _Calls:
    """The tool calls so far: a result must follow its call."""

    def __init__(self) -> None:
        self._any = False
        self._ids: set[str] = set()

    def add(self, message: dict[str, Any], where: str) -> None:
        if message["role"] != "tool":
            calls = cast("list[dict[str, Any]]", message.get("tool_calls", []))
            self._any = self._any or bool(calls)
            self._ids.update(call["id"] for call in calls if isinstance(call.get("id"), str))
            return
        if not self._any:
            raise _wrong(f"{where} is the result of a tool call, but no message before it has tool_calls")
        if self._ids and message.get("tool_call_id", next(iter(self._ids))) not in self._ids:
            raise _wrong(f"{where}.tool_call_id is not the id of a call in the tool_calls of a message before it")


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """The validated message without null fields, as in transformers: templates test for missing fields, not null."""
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("role") not in (roles := sorted(ROLES)):
        raise _wrong(f"{where}.role must be one of {', '.join(roles)}")
    _with_tool_calls(message, where)
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{where}.content must be a string or a list of text and image parts")
    if isinstance(content, list):
        for index, part in enumerate(cast("list[Any]", content)):
            _check_part(part, f"{where}.content[{index}]")
    if content is None and message["role"] == "assistant" and any(name in message for name in REASONING):
        message["content"] = ""
    elif not content and not isinstance(content, str) and not message.get("tool_calls"):
        raise _wrong(f"{where}.content is required, and must not be an empty list")
    return _with_reasoning(message)


def _with_tool_calls(message: dict[str, Any], where: str) -> None:
    """Validate tool calls in place. OpenAI's deprecated functions become tools; an empty list is removed."""
    if message["role"] == "function":
        message["role"] = "tool"
    called: Any = message.pop("function_call", None)
    if called is not None and message.get("tool_calls"):
        raise _wrong(f"{where} has both tool_calls and function_call; send one of them")
    calls: Any = message.pop("tool_calls", []) if called is None else [{"type": "function", "function": called}]
    if calls != []:
        if message["role"] != "assistant":
            raise _wrong(f"{where}.tool_calls: only messages of the role assistant have tool calls")
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls must be a list")
        for index, call in enumerate(cast("list[Any]", calls)):
            _check_call(call, f"{where}.tool_calls[{index}]")
        message["tool_calls"] = calls


def _check_call(call: Any, where: str) -> None:
    outer = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    given: Any = outer.get("function", outer)
    function = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function must be an object with name and arguments")
    if not isinstance(function.get("arguments"), str | dict | None):
        raise _wrong(f"{where}.function.arguments must be a string that holds a JSON object, or an object")


def _check_part(given: object, where: str) -> None:
    """`image` in a part of the type image says what image it is."""
    part = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    kind = part.get("type")
    if kind not in ("text", "image"):
        raise _wrong(f"{where}.type must be text or image; audio, video and files are not supported")
    if not isinstance(part.get(kind), str):
        raise _wrong(f"{where}.{kind} must be a string")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Add the message's reasoning under both names that templates read, as transformers does."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined by newlines into one string, as in vLLM."""
    content = message.get("content")
    return {**message, "content": "\n".join(texts(message))} if isinstance(content, list) else message


def texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of the message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in cast("list[dict[str, str]]", content or []) if part["type"] == "text"]


def image_parts(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """The parts of the message's content that are images."""
    content = message.get("content")
    parts = cast("list[dict[str, str]]", content) if isinstance(content, list) else []
    return [part for part in parts if part["type"] == "image"]


def with_images(message: dict[str, Any], part: dict[str, str]) -> dict[str, Any]:
    """The message with `part` in place of each image."""
    parts = cast("list[dict[str, str]]", message["content"])
    return {**message, "content": [part if one["type"] == "image" else one for one in parts]}


def parted(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class Copier:
    """Copies JSON values within the caps on size and depth. All copies of one copier count towards one cap."""

    def __init__(self, caps: Caps, param: str) -> None:
        self._caps, self._param = caps, param
        self._left = caps.message_chars

    def copy(self, value: object, where: str, depth: int = 0) -> Any:
        """A copy of `value`. `where` is its place in the request, for error messages."""
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
    """Marks control tokens in a client's text with `mark`, a character that occurs nowhere else.

    Field names, roles and types that templates compare with are unchanged, except within the arguments of a call, where
    every string and every key is text of the client.

    A mark is inserted after the first character of each match of a control token, ignoring case. A text that ends with
    the beginning of a control token gets a mark at its end, because the next text may begin with the rest of the token.

    One conversation gets at most `most` such matches.
    """

    def __init__(self, control: Iterable[str], most: int) -> None:
        self._most = most
        tokens = sorted({token.lower() for token in control if token})
        self._whole = re.compile(_any_of(tokens) if tokens else "(?!)", re.IGNORECASE)
        self._beginnings = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)

    def marked(self, value: Any, mark: str) -> Any:
        """The JSON value with marks in all its texts. Raises `BadRequest` for more than `most` matches."""
        return self._marked(value, _Marking(mark, self._most))

    def _marked(self, value: Any, marking: "_Marking") -> Any:
        if isinstance(value, str):
            return self._text(value, marking)
        if isinstance(value, list):
            return [self._marked(item, marking) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            pairs = cast("dict[str, Any]", value).items()
            return dict(self._pair(key, item, marking) for key, item in pairs)
        return value

    def _pair(self, key: str, item: Any, marking: "_Marking") -> tuple[str, Any]:
        if key == "arguments":
            return key, self._everything(item, marking)
        if key in ("role", "type") and isinstance(item, str) and item in _WORDS:
            return key, item
        return key if key in _FIELDS else self._text(key, marking), self._marked(item, marking)

    def _everything(self, value: Any, marking: "_Marking") -> Any:
        if isinstance(value, dict):
            pairs = cast("dict[str, Any]", value).items()
            return {self._text(key, marking): self._everything(item, marking) for key, item in pairs}
        if isinstance(value, list):
            return [self._everything(item, marking) for item in cast("list[Any]", value)]
        return self._text(value, marking) if isinstance(value, str) else value

    def _text(self, text: str, marking: "_Marking") -> str:
        end = len(text.rstrip())  # templates often trim
        tail = text[max(0, end - self._longest) : end].lower()
        open_ended = any(tail[at:] in self._beginnings for at in range(len(tail)))
        parts: list[str] = []
        copied = 0
        for found in self._found(text, end):
            marking.count()
            parts += text[copied : found + 1], marking.mark
            copied = found + 1
        parts += text[copied:end], marking.mark if open_ended else "", text[end:]
        return "".join(parts)

    def _found(self, text: str, end: int) -> Iterator[int]:
        """Start of each match of a control token. Searches piece by piece; a match may extend beyond its piece."""
        at = 0
        for start in range(0, end, PIECE):
            stop = min(start + PIECE, end)
            while at < stop and (found := self._whole.search(text, max(at, start), min(stop + self._longest, end))):
                if found.start() >= stop:
                    break
                yield found.start()
                at = found.end()


class _Marking:
    """State while one conversation is marked."""

    def __init__(self, mark: str, most: int) -> None:
        self.mark = mark
        self._most = self._left = most

    def count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _wrong(f"messages has more than {self._most} pieces of text that read like control tokens")


def unmarked(text: str, mark: str) -> tuple[str, tuple[int, ...]]:
    """The text without marks, and the positions of the marks in it."""
    parts = text.split(mark)
    places = accumulate(len(part) for part in parts[:-1])
    return "".join(parts), tuple(places)


def unused(texts: Iterable[str], count: int = 1) -> list[str]:
    """Private-use characters that occur in none of the texts. Raises `BadRequest` if there are not so many."""
    if len(free := some_unused(texts, count)) < count:
        raise _wrong("messages has every character of a plane for private use; leave some of them out")
    return free


def some_unused(texts: Iterable[str], count: int) -> list[str]:
    """The first `count` private-use characters that occur in none of the texts, or fewer if there are not so many."""
    used = set[str]()
    for text in texts:
        for start in range(0, 0 if text.isascii() else len(text), PIECE):
            used.update(text[start : start + PIECE])
    return list(islice((char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in used), count))


# Strings in messages and tool definitions that templates look up or compare with, and that must not be changed.
_WORDS = ROLES | {"text", "image", "function", "object", "array", "string", "number", "integer", "boolean", "null"}
_FIELDS = frozenset(
    {
        *("role", "content", "name", "type", "text", "id", "tool_calls", "tool_call_id", "function", *REASONING),
        *("description", "parameters", "properties", "required", "enum", "items", "title"),
    }
)


def _any_of(tokens: list[str]) -> str:
    """A pattern that matches the longest of `tokens` without backtracking: a trie of their common prefixes."""
    first, last = min(tokens), max(tokens)  # a prefix that these two share is shared by all
    shared = first[: next((n for n, char in enumerate(first) if last[n : n + 1] != char), len(first))]
    rests: dict[str, list[str]] = {}
    for rest in (token[len(shared) :] for token in tokens):
        rests.setdefault(rest[:1], []).append(rest)
    branches = [_any_of(those) for first, those in rests.items() if first]
    ends_here = "?" if "" in rests else ""
    return re.escape(shared) + (f"(?:{'|'.join(branches)}){ends_here}" if branches else "")


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from chain.from_iterable(map(strings, cast("list[Any]", value)))
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(strings, chain.from_iterable(cast("dict[str, Any]", value).items())))


def common(one: Sequence[Any], other: Sequence[Any], at: int = 0) -> int:
    """How many elements of `one` the other has at `at`: characters, bytes or tokens. In a logarithm of steps."""
    low, high = 0, min(len(one), len(other) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _wrong(message: str, param: str = "messages") -> BadRequest:
    return BadRequest(message, param)
