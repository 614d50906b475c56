"""codec: the model's tokenizer: text to ids and back, conversations, and the text of answers. Or why there are none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcellar.errors import BadRequest
from kvcellar.models.text_assets import TextAssets
from kvcellar.text.meter import Caps
from kvcellar.text.output import Output, Stops, open_stream
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import TextTokenizer, longest_text

LEAST_MESSAGE_CHARS = 2**20
SPARE = 4  # messages may have so many times the text that fits the context, as templates leave some out (reasoning)


class TextCodec:
    """Safe to use from several threads."""

    def __init__(
        self, assets: TextAssets | None, why_not: str, end_ids: frozenset[int], *, context: int, text_bytes: int
    ) -> None:
        """`text_bytes` of memory are for tokenizing."""
        self._tokenizer: TextTokenizer | None = None
        self._template: ChatTemplate | None = None
        self._why_not = why_not
        if assets is not None:
            most = longest_text(text_bytes)
            self._tokenizer = TextTokenizer(
                assets.tokenizer, end_ids=end_ids, special_tokens=assets.special, most_bytes=most
            )
            if assets.chat_template is not None:
                self._template = ChatTemplate(assets.chat_template, self._tokenizer, _caps(self._tokenizer, context))

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        return self._known().encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int]) -> str:
        return self._known().decode(ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, limit: int | None = None, **options: Any) -> list[int]:
        """`options` are those of `ChatTemplate.render`."""
        tokenizer = self._known()
        if self._template is None:
            raise BadRequest("this model has no chat template; send a prompt instead of messages", "messages")
        return self._template.render(messages, **options).encode(tokenizer, limit=limit)

    def output(self, stops: Stops, prompt: Sequence[int]) -> Output:
        """The text of one answer: what is to be written behind the prompt's text."""
        if self._tokenizer is None:
            return Output(None, stops)
        after = prompt[-1:] if prompt[-1] not in self._tokenizer.special_ids else ()
        return Output(open_stream(self._tokenizer, after=after), stops)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text; they may be a part of a character."""
        return self._known().token_bytes(token)

    def _known(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise BadRequest(
                "this model has no tokenizer; send a prompt of token ids instead of text",
                "prompt",
                hint=f"The reason: {self._why_not}.",
            )
        return self._tokenizer


def _caps(tokenizer: TextTokenizer, context: int) -> Caps:
    """What a conversation may cost, given how much text could be of use."""
    caps = Caps()
    if tokenizer.bound.characters is None:
        return caps
    useful = max(LEAST_MESSAGE_CHARS, SPARE * context * tokenizer.bound.characters)
    return replace(caps, message_chars=min(caps.message_chars, useful))
