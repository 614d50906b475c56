"""template: renders a conversation as the prompt format that the model was trained on.

A chat template is a program that is part of the model; clients cannot send one. It runs in a sandbox with caps, on
plain data only. The tokenizer encodes its output as control tokens and text, but text that a client wrote never becomes
a control token: see `Rendered.encode`.

The result equals that of transformers' `apply_chat_template`, except where templates differ among themselves: content
in parts that the template does not read (their text is joined), tool calls and results in a form that it does not read
(see `calls`), a message that has reasoning only (its content is ""), and text that looks like a control token.

One limit: a template that removes text from the middle of a client's text can form a control token from the remaining
pieces, which is not detected. Templates do this only with the reasoning of assistant messages, and a client that sends
assistant messages controls their text anyway.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict, cast

from jinja2 import TemplateSyntaxError

from kvcellar.errors import BadRequest, ModelRefused, TemplateFailed, shown
from kvcellar.text.calls import Arguments, CallForm, probe
from kvcellar.text.conversation import (
    Caps,
    Copier,
    Marker,
    checked,
    common,
    image_parts,
    joined,
    parted,
    some_unused,
    strings,
    texts,
    unmarked,
    unused,
    with_images,
)
from kvcellar.text.labels import NO_IMAGES, Labelled, label
from kvcellar.text.rendering import FAULTS, OVER, ChatEnvironment, Outcome, Refused, Renderer
from kvcellar.text.tokens import TextTokenizer

MAX_SOURCE_CHARS = 2**20
MAX_REASON_CHARS = 1000

_IMAGE_PROBE = [{"type": "text", "text": "probe"}, {"type": "image"}, {"type": "text", "text": "probe"}]
_ID = "probe0123"  # nine letters and digits: some templates accept no other ids
_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # variables that a client cannot set
_THINKING = ("enable_thinking", "thinking")  # variables by which templates switch reasoning on and off


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as one text; `marks` are positions where the text was written by a client, not by the template,
    and labels stand for `images`. It was made of `messages` with `settings`. `places` finds where messages are in the
    text (see `message_places`)."""

    text: str
    marks: tuple[int, ...] = ()
    images: Labelled = NO_IMAGES
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    places: Callable[[], "Sequence[Place]"] = field(default=tuple, compare=False, repr=False)

    @property
    def written(self) -> str:
        """What the tokenizer gets."""
        return self.images.written(self.text)[0]

    def encode(self, tokenizer: TextTokenizer, *, lead: str = "", limit: int | None = None) -> list[int]:
        """The token ids of `text` behind `lead`, where control tokens with a mark inside are encoded as ordinary text.

        Raises `PromptTooLong` for more than `limit`, and `BadRequest`, as `TextTokenizer.encode` does.
        """
        marks = [len(lead) + mark for mark in self.marks] if lead else self.marks
        return self.images.encode(tokenizer, lead + self.text, marks, limit=limit)

    def until(self, end: int) -> "Rendered":
        """The first `end` characters."""
        return Rendered(self.text[:end], self.marks[: bisect_right(self.marks, end)], self.images)

    def since(self, start: int) -> "Rendered":
        """What follows the first `start` characters."""
        marks = self.marks[bisect_right(self.marks, start) :]
        return Rendered(self.text[start:], tuple(mark - start for mark in marks), self.images)


class Place(NamedTuple):
    """Where the text of `messages[message]` is in what was rendered. `start` is None where the template does not write
    it as it was sent."""

    start: int | None
    end: int
    message: int


class CommonOptions(TypedDict, total=False):
    """See `ChatTemplate.render`."""

    variables: Mapping[str, Any] | None
    effort: str | None
    add_generation_prompt: bool


class OpeningOptions(CommonOptions, total=False):
    """What decides how a prompt ends. `continued`: the last message, if the answer continues it."""

    continued: Mapping[str, Any] | None


class RenderOptions(CommonOptions, total=False):
    """What a conversation is rendered with beside its messages."""

    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None


class ChatTemplate:
    """A model's compiled template. Thread-safe: each run has an environment of its own."""

    def __init__(self, source: str, tokenizer: TextTokenizer, renderer: Renderer, caps: Caps | None = None) -> None:
        """Raises `ModelRefused` if `source` is not a template."""
        self.source, self._tokenizer, self._renderer, self._caps = source, tokenizer, renderer, caps or Caps()
        self._seen: dict[tuple[str, str], bool] = {}  # by role and token: whether it writes images in such messages
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelRefused(f"the chat template has {len(source)} characters; {MAX_SOURCE_CHARS} are allowed")
        try:
            ChatEnvironment().compiled(source)
        except TemplateSyntaxError as error:
            raise ModelRefused(f"the chat template does not compile: line {error.lineno}: {error}") from error
        except FAULTS as error:
            raise ModelRefused(f"the chat template does not compile: {error}") from error
        self.variables = ChatEnvironment().variables(source)  # read by the template
        self._marker = Marker(tokenizer.control.values(), self._caps.marks)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        images: Labelled = NO_IMAGES,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        effort: str | None = None,
    ) -> Rendered:
        """Render the conversation. `variables` (`enable_thinking`, ...) may come from a client, like the messages.

        `effort` is how much the model should reason, "none" to "xhigh". It sets the variable `reasoning_effort`, and
        the booleans `enable_thinking` and `thinking` (false for "none"), if the template reads them and `variables`
        does not set them.

        With `continue_final_message`, the last message is the beginning of the answer: the text ends where its content
        does, whatever `add_generation_prompt` is. White space at its end is kept where the template keeps it.

        `images` are those of the parts of the type image, in order.

        Raises `BadRequest` for invalid messages, and its subclass `TemplateFailed` if the template rejects the
        messages, fails on them, or exceeds its caps.
        """
        conversation = checked(messages, self._caps)
        settings = {
            **self._settings(variables, effort),
            "tools": Copier(self._caps, "tools").copy(tools, "tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if continue_final_message:
            check_continued(conversation)
        write = partial(self._continued if continue_final_message else self._written, settings=settings, images=images)
        rendered = write(conversation)
        return replace(rendered, places=partial(message_places, conversation, rendered.text, write))

    def opening(self, options: OpeningOptions) -> str:
        """What the template writes in front of an answer, where it asks for one, with the text that the answer
        continues; models do not write that again. "" where the template refuses a conversation of one message."""
        probe = [{"role": "user", "content": "probe"}]
        how: dict[str, Any] = {name: options.get(name) for name in ("variables", "effort")}
        continued = options.get("continued")
        if continued is None and not options.get("add_generation_prompt", True):
            return ""
        try:
            if continued is None:
                text = self.render(probe, **how).text
            else:
                text = self.render([*probe, continued], continue_final_message=True, **how).text
            before = self.render(probe, add_generation_prompt=False, **how).text
        except TemplateFailed:
            return ""
        return text[common(text, before) :]

    @cached_property
    def renders_tools(self) -> bool:
        """Are definitions of tools in what it writes?"""
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        function: dict[str, Any] = {"name": "probe_name", "description": "probe", "parameters": schema}
        for role in ("user", "system"):
            messages = [{"role": role, "content": "x"}] + [{"role": "user", "content": "x"}] * (role == "system")
            try:
                if "probe_name" in self.render(messages, tools=[{"type": "function", "function": function}]).text:
                    return True
            except BadRequest:
                continue
        return False

    def written_call(self, name: str, arguments: Mapping[str, Any], count: int) -> str | None:
        """What it writes for an answer of so many calls alone; None where it refuses that, or has no calls."""
        call = {"id": "probe0123", "type": "function", "function": {"name": name, "arguments": arguments}}
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call] * count}]
        try:
            before = self.render(chat[:1]).text
            text = self.render(chat, add_generation_prompt=False).text
        except BadRequest:
            return None
        return text[common(before, text) :] if self._calls.arguments is not Arguments.NONE else None

    def _written(
        self, conversation: Sequence[dict[str, Any]], settings: Mapping[str, Any], images: Labelled
    ) -> Rendered:
        fitted = self._with_calls(conversation)
        mark, sign = unused((self.source, *strings([*fitted, dict(settings)])), 2)
        given = {**settings, "messages": [self._fitting(message, sign, images.token) for message in fitted]}
        variables = {**self._tokenizer.special_tokens, **self._marker.marked(given, mark)}
        text = self._with_labels(self._run(variables, mark), sign, images)
        return Rendered(*unmarked(text, mark), images, conversation, settings)

    def _with_labels(self, text: str, sign: str, images: Labelled) -> str:
        """A text with a label for each image that the template has written, in order. What a client has written like an
        image has a mark inside; `sign` stands for an image where the template writes none."""
        if not images.images:
            return text
        parts = re.split(f"({re.escape(images.token)}|{sign})", text)
        found = len(parts) // 2
        if found != len(images.images):
            raise BadRequest(
                f"the chat template writes {found} images, and the messages have {len(images.images)}", "messages"
            )
        before, after = self._around(images.token) if sign in parts else ("", "")
        for at, image in zip(range(1, len(parts), 2), images.images, strict=True):
            written = label(image.input)
            parts[at] = before + written + after if parts[at] == sign else written
        return "".join(parts)

    def _continued(
        self, conversation: Sequence[dict[str, Any]], settings: Mapping[str, Any], images: Labelled
    ) -> Rendered:
        """What is written up to the end of the content of the last message, which is found by a character that occurs
        nowhere else, and a space behind it: as transformers, which looks whether the template trims the content."""
        (sign,) = unused((self.source, *strings([list(conversation), dict(settings)])))
        written = self._written([*conversation[:-1], _extended(conversation[-1], sign + " ")], settings, images)
        end = written.text.rfind(sign)
        if end < 0:
            raise BadRequest("the chat template does not write the text of the message that is continued", "messages")
        text = written.text[:end] if written.text.startswith(sign + " ", end) else written.text[:end].rstrip()
        return replace(written.until(len(text)), messages=conversation, settings=settings)

    def _with_calls(self, conversation: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """The messages with calls and results in the form that the template reads."""
        if any(message["role"] == "tool" or "tool_calls" in message for message in conversation):
            return self._calls.fit(conversation, Copier(self._caps, "messages").copy)
        return conversation

    def _settings(self, variables: Any, effort: Any) -> dict[str, Any]:
        """The client's variables that the template reads."""
        if variables is not None and not isinstance(variables, Mapping):
            raise BadRequest(f"variables of a template are given by name, not as {shown(variables)}", "variables")
        if effort is not None and not isinstance(effort, str):
            raise BadRequest(f"effort is a word, not {shown(effort)}", "effort")
        name = "chat_template_kwargs"
        copy: dict[str, Any] = Copier(self._caps, name).copy(cast("Any", variables or {}), name)
        if taken := sorted(copy.keys() & {*_OWN, *self._tokenizer.special_tokens}):
            raise BadRequest(f"{name}.{taken[0]} cannot be set: the template gets it from the server", name)
        thinks = {} if effort is None else {"reasoning_effort": effort, **dict.fromkeys(_THINKING, effort != "none")}
        return {name: value for name, value in {**thinks, **copy}.items() if name in self.variables}

    @cached_property
    def _calls(self) -> CallForm:
        return probe(self._tried, lambda text: self._fitting({"content": text})["content"])

    def _run(self, variables: Mapping[str, Any], mark: str) -> str:
        caps = self._caps
        outcome = self._renderer.run(self.source, variables, mark, seconds=caps.seconds, most=caps.output_chars)
        if outcome.fault:
            raise _failed(outcome, mark)
        return outcome.text

    def _fitting(self, message: dict[str, Any], sign: str = "", token: str = "") -> dict[str, Any]:
        """The message with its content in the form that the template reads. `sign` stands for an image where it does
        not write `token`."""
        reads_text, reads_parts = self._reads
        if image_parts(message):
            if self._writes_images(message["role"], token):
                return with_images(message, {"type": "image"})
            message = joined(with_images(message, {"type": "text", "text": sign}))
        if not reads_text:
            return parted(message)
        return message if reads_parts else joined(message)

    @cached_property
    def _reads(self) -> tuple[bool, bool]:
        """Whether the template reads content as text, and whether it reads content in parts. Renders a probe of each.

        A template without support for parts prints them as Python or JSON; one that supports only parts does not print
        a text. A template that fails on both probes is assumed to read text, as nearly all do.
        """
        word = "probe"
        text = self._tried([{"role": "user", "content": word}])
        parts = self._tried([{"role": "user", "content": [{"type": "text", "text": word}]}])
        as_they_are = any(f"text{q}: {q}{word}" in parts for q in "'\"")
        reads_parts = word in parts and not as_they_are
        return word in text or not reads_parts, reads_parts

    def _writes_images(self, role: str, token: str) -> bool:
        """Whether the template writes `token` for an image in a message of this role. Renders a probe."""
        if (role, token) not in self._seen:
            asked = {"role": "user", "content": "x"}
            function: dict[str, Any] = {"name": "x", "arguments": {}}
            called = {"role": "assistant", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
            before = {"assistant": [asked], "tool": self._with_calls([asked, called])}.get(role, [])
            shown = {"role": role, "content": _IMAGE_PROBE, "tool_call_id": _ID}
            written = self._tried(
                [*map(self._fitting, before), shown, *map(self._fitting, [asked] * (role == "system"))]
            )
            self._seen[role, token] = written.count(token) == 1
        return self._seen[role, token]

    def _around(self, token: str) -> tuple[str, str]:
        """What the template writes before and after `token`, between texts in a message of the user."""
        parts = self._tried([{"role": "user", "content": _IMAGE_PROBE}]).split("probe")
        before, found, after = parts[1].strip().partition(token) if len(parts) == 3 else ("", "", "")
        return (before, after) if found else ("", "")

    def _tried(self, messages: list[dict[str, Any]]) -> str:
        own = {**self._tokenizer.special_tokens, "add_generation_prompt": False, "tools": None, "documents": None}
        try:
            return self._run({**own, "messages": messages}, "")
        except TemplateFailed:
            return ""


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `BadRequest` if the last message cannot be the beginning of an answer."""
    where, last = f"messages[{len(messages) - 1}]", messages[-1]
    if last.get("role") != "assistant":
        raise BadRequest(f"{where} cannot be continued: its role is not assistant", "messages")
    if last.get("tool_calls") or last.get("function_call"):
        raise BadRequest(
            f"{where} cannot be continued: it has calls of tools; send their results behind it", "messages"
        )


def _extended(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with more text at the end of its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    *parts, last = cast("list[dict[str, str]]", content)
    if last["type"] != "text":
        return {**message, "content": [*parts, last, {"type": "text", "text": text}]}
    return {**message, "content": [*parts, {**last, "text": last["text"] + text}]}


def message_places(
    messages: Sequence[dict[str, Any]], text: str, write: Callable[[Sequence[dict[str, Any]]], Rendered]
) -> list[Place]:
    """Where messages are in the text that `write` makes of them, ascending; none if that cannot be found out. Renders
    them again, with a character in the middle of each that occurs nowhere else."""
    free = some_unused((text, *strings(list(messages))), len(messages))
    if len(free) < len(messages):
        return []
    signs = dict(zip(free, range(len(messages)), strict=False))
    signed = [_signed(message, sign) for message, sign in zip(messages, free, strict=False)]
    try:
        written = write(signed).text
    except BadRequest:
        return []
    found = list(re.finditer(f"[{''.join(signs)}]", written))
    if written.translate(dict.fromkeys(map(ord, signs))) != text:
        return []
    places, start = list[Place](), len(text)
    for before, sign in reversed([*enumerate(found)]):
        index, at = signs[sign[0]], sign.start() - before
        head, _, rest = "".join(texts(signed[index])).partition(sign[0])
        # calls are rendered after the text: up to where the next message begins
        end = start if messages[index].get("tool_calls") else at + common(rest, text, at)
        said = head if text.endswith(head, 0, at) else head.lstrip()  # a template may keep white space, or not
        start = at - len(said)
        places.append(Place(start if text.startswith(said, start) else None, end, index))
    return sorted(places, key=lambda place: (place.end, place.message))


def _signed(message: dict[str, Any], sign: str) -> dict[str, Any]:
    """The message with `sign` in the middle of its text, or, if it has none, of the name of a call."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and content.strip():
        return {**message, "content": _with_sign(content, sign)}
    if isinstance(content, list) and texts(message):
        parts = cast("list[dict[str, str]]", content)
        longest = max(range(len(parts)), key=lambda n: len(parts[n].get("text", "").strip()))
        signed = {**parts[longest], "text": _with_sign(parts[longest]["text"], sign)}
        return {**message, "content": [*parts[:longest], signed, *parts[longest + 1 :]]}
    if calls:
        call = calls[0].get("function", calls[0])
        named = {**call, "name": _with_sign(call["name"], sign)}
        return {
            **message,
            "tool_calls": [named if call is calls[0] else {**calls[0], "function": named}, *calls[1:]],
        }
    return message


def _with_sign(text: str, sign: str) -> str:
    start = len(text) - len(text.lstrip())
    middle = start + (len(text.strip()) + 1) // 2
    return text[:middle] + sign + text[middle:]


def _failed(outcome: Outcome, mark: str) -> TemplateFailed:
    """The error for the client of a run that has failed."""
    reason = outcome.text.replace(mark, "") if mark else outcome.text
    reason = reason[:MAX_REASON_CHARS]
    if outcome.fault == Refused.__name__:
        return TemplateFailed(f"the chat template refused these messages: {reason}", "messages")
    if outcome.fault == OVER:
        message, hint = f"the chat template was stopped: it {reason}. Send shorter messages", "Or correct the template."
        return TemplateFailed(message, "messages", hint=hint)
    message, hint = f"the chat template failed on these messages: {reason}", f"It raised {outcome.fault}."
    return TemplateFailed(message, "messages", hint=hint)
