"""voice: the model's words: text to ids and back, conversations, and the text of answers. Or why there are none."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.errors import BadRequest
from kvcellar.models.load import TextAssets
from kvcellar.text.output import Output
from kvcellar.text.stops import Stops
from kvcellar.text.stream import open_stream
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import Words


class Voice:
    """Safe to use from several threads."""

    def __init__(self, assets: TextAssets | None, why_not: str, end_ids: frozenset[int]) -> None:
        self._words: Words | None = None
        self._template: ChatTemplate | None = None
        self._why_not = why_not
        if assets is not None:
            self._words = Words(assets.tokenizer, end_ids=end_ids, special_tokens=assets.special)
            if assets.chat_template is not None:
                self._template = ChatTemplate(assets.chat_template, self._words)

    @property
    def has_text(self) -> bool:
        return self._words is not None

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        return self._known().encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._known().decode(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`options` are those of `ChatTemplate.render`."""
        words = self._known()
        if self._template is None:
            raise BadRequest("this model has no chat template; give it a prompt instead of messages", "messages")
        return self._template.render(messages, **options).encode(words)

    def output(self, stops: Stops, prompt: Sequence[int]) -> Output:
        """The text of one answer: what is to be written behind the prompt's text."""
        if self._words is None:
            return Output(None, stops)
        after = prompt[-1:] if prompt[-1] not in self._words.special_ids else ()
        return Output(open_stream(self._words, after=after), stops)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; they may be a part of a character."""
        return self._known().token_bytes(token)

    def _known(self) -> Words:
        if self._words is None:
            raise BadRequest(
                f"this model has no tokenizer ({self._why_not}); give it token ids instead of text: "
                "with `kvcellar run --ids`, or as a list from Python or over HTTP",
                "prompt",
            )
        return self._words
