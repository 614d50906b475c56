"""template: a conversation, written the way the model was taught to read it.

A chat template is a program that comes with a model; it never comes from a client. It runs in a sandbox with caps, sees
plain data only, and its output is taken as control tokens and text by the tokenizer, except that nothing a client wrote
can become a control token: see `Rendered.encode`.

The result is what transformers' `apply_chat_template` gives for the same messages, unless a message has content in
parts that the template does not know how to read (their text is joined), or text that looks like a control token.

One limit: a template that cuts a piece out of the middle of a client's text, and so joins a control token that was not
there, is not seen through. Templates cut reasoning off the assistant's words, which only somebody who could write the
assistant's words anyway can use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from kvcellar.errors import ModelRefused, TemplateFailed
from kvcellar.text.conversation import Copier, Marker, checked, joined, parted, strings, unmarked, unused
from kvcellar.text.sandbox import CappedEnvironment, Caps, OverCaps, Refused
from kvcellar.text.tokens import Words

MAX_SOURCE_CHARS = 2**20
MAX_REASON_CHARS = 1000

# What running a template may raise. Anything else is our fault and must be seen.
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # recursion, too
    TemplateError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as one text; `marks` are the places at which it is known to be a client's, not the template's."""

    text: str
    marks: tuple[int, ...] = ()

    def encode(self, words: Words) -> list[int]:
        """The ids: exactly those of `text`, but control tokens with a mark inside are spelled out as ordinary text."""
        return words.encode_marked(self.text, self.marks)


class ChatTemplate:
    """A model's template, compiled. Safe to use from several threads: each run has an environment of its own."""

    def __init__(self, source: str, words: Words, caps: Caps | None = None) -> None:
        """Raises `ModelRefused` if `source` is not a template."""
        self._source, self._words, self._caps = source, words, caps or Caps()
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelRefused(f"the chat template has {len(source)} characters; {MAX_SOURCE_CHARS} are allowed")
        try:
            self._code = CappedEnvironment(self._caps).translated(source)
        except TemplateSyntaxError as error:
            raise ModelRefused(f"the chat template does not compile: line {error.lineno}: {error}") from error
        except _FAULTS as error:
            raise ModelRefused(f"the chat template does not compile: {error}") from error
        self._marker = Marker(words.control.values())
        self._reads_text, self._reads_parts = self._probed()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Write the conversation. `variables` are the operator's (`enable_thinking`, ...), and are trusted.

        Raises `BadRequest` for messages that are wrong in themselves, `TemplateFailed` (one, too) for those that the
        template refuses, with its own words, or on which it fails or runs past its caps.
        """
        conversation = [self._fitting(message) for message in checked(messages, self._caps)]
        given = {
            "messages": conversation,
            "tools": Copier(self._caps, "tools").copy(tools, "tools"),
            "documents": Copier(self._caps, "documents").copy(documents, "documents"),
        }
        mark = unused((self._source, *strings(given)))
        own = {**self._words.special_tokens, **(variables or {}), "add_generation_prompt": add_generation_prompt}
        return Rendered(*unmarked(self._run({**own, **self._marker.marked(given, mark)}, mark), mark))

    def _run(self, variables: Mapping[str, Any], mark: str) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in CappedEnvironment(self._caps, mark).run(self._code, variables):
                parts.append(part)
                size += len(part)
                if size > self._caps.output_chars:
                    raise OverCaps(f"wrote more than {self._caps.output_chars} characters")
        except _FAULTS as error:
            raise _failed(error, mark) from error
        return "".join(parts)

    def _fitting(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in a form that the template reads."""
        if not self._reads_text:
            return parted(message)
        return message if self._reads_parts else joined(message)

    def _probed(self) -> tuple[bool, bool]:
        """Does the template read content that is text, and content in parts? Found out by trying.

        One that does not know parts prints them as they are in Python or JSON; one that knows nothing else prints
        nothing of a text. One that refuses the trial is taken to read text, as nearly all do.
        """
        word = "probe"
        text = self._tried(word)
        parts = self._tried([{"type": "text", "text": word}])
        as_they_are = any(f"text{q}: {q}{word}" in parts for q in "'\"")
        reads_parts = word in parts and not as_they_are
        return word in text or not reads_parts, reads_parts

    def _tried(self, content: Any) -> str:
        own = {**self._words.special_tokens, "add_generation_prompt": False, "tools": None, "documents": None}
        try:
            return self._run({**own, "messages": [{"role": "user", "content": content}]}, "")
        except TemplateFailed:
            return ""


def _failed(error: Exception, mark: str) -> TemplateFailed:
    """What to tell a client about an error that a template made."""
    reason = str(error).replace(mark, "") if mark else str(error)
    reason = reason[:MAX_REASON_CHARS]
    if isinstance(error, Refused):
        return TemplateFailed(f"the chat template refused these messages: {reason}", "messages")
    if isinstance(error, OverCaps):
        return TemplateFailed(f"the chat template was stopped: it {reason}. Send less, or mend it.", "messages")
    return TemplateFailed(f"the chat template failed on these messages: {type(error).__name__}: {reason}", "messages")
