"""text_codec: the text of one model: token ids of a text or a chat, and the text of what is generated."""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import groupby
from typing import Any, Unpack

from kvcellar.engine.arguments import namespace_name
from kvcellar.engine.card import TextCard
from kvcellar.errors import BadRequest
from kvcellar.frontend.chat_images import ChatImages
from kvcellar.frontend.shared_replies import ArchivedReplies
from kvcellar.images.image import has_rows, is_row
from kvcellar.text.conversation import Preamble, caps_for
from kvcellar.text.output import LONG_RUN, Output, ReadOutput, Stops, open_stream
from kvcellar.text.rendering import Renderer
from kvcellar.text.replay import Replays
from kvcellar.text.replies.machine import Machine
from kvcellar.text.template import ChatTemplate, RenderOptions
from kvcellar.text.tokens import TextAssets, TextTokenizer, longest_text

IMAGE = "<image>"  # in texts of prompts that are shown


class TextCodec:
    """Text to token ids and back, with the model's tokenizer and chat template. Safe to use from several threads.

    All methods raise `BadRequest` where the model has none.
    """

    def __init__(self, card: TextCard, shared: ArchivedReplies | None = None, images: ChatImages | None = None) -> None:
        """`shared`: the replies of all front ends. Raises `ModelRefused` for a template that cannot be used."""
        self._card, self._shared, self._preamble, assets = card, shared, card.preamble, card.assets
        self.images = images or ChatImages(None, why_not="there is no model that takes images")
        self._tokenizer: TextTokenizer | None = None
        self._template: ChatTemplate | None = None
        self._renderer = Renderer()  # that of variants, too
        self.replays: Replays | None = None  # where there is a tokenizer
        self.response_template = None if assets is None else assets.response_template  # of the checkpoint's template
        if assets is not None:
            most = longest_text(card.text_bytes)
            self._tokenizer = TextTokenizer(
                assets.tokenizer, end_ids=card.end_ids, special_tokens=assets.special, most_bytes=most
            )
            self.replays = Replays(
                self._tokenizer,
                card.replay_bytes,
                borders=card.borders,
                shared=shared,
                placeholder=self.images.placeholder,
            )
            self._template = self._opened(assets.chat_template, self._tokenizer)

    def variant(self, assets: TextAssets | None, preamble: Preamble) -> "TextCodec":
        """The same tokenizer, and memory of replies, with the chat template of `assets` and another preamble."""
        made = copy(self)
        made._preamble = preamble
        if assets is not None and made._tokenizer is not None:
            made.response_template = assets.response_template
            made._template = self._opened(assets.chat_template, made._tokenizer)
        return made

    def _opened(self, template: str | None, tokenizer: TextTokenizer) -> ChatTemplate | None:
        caps = caps_for(tokenizer.longest, self._card.context)
        return None if template is None else ChatTemplate(template, tokenizer, self._renderer, caps)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    @property
    def tokenizer(self) -> TextTokenizer | None:
        return self._tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text; empty without a tokenizer."""
        return self._tokenizer.special_ids if self._tokenizer is not None else frozenset()

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        return self._checked().encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids, in which each run of rows of images is `IMAGE`."""
        tokenizer = self._checked()
        if not has_rows(ids):
            return tokenizer.decode(ids, skip_special=not special)
        parts = groupby(ids, is_row)
        return "".join(IMAGE if rows else tokenizer.decode([*run], skip_special=not special) for rows, run in parts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: int | None = None,
        namespace: str = "",
        owner: str = "",
        replay: bool = True,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """As `Engine.render`."""
        namespace, tokenizer = namespace_name(namespace), self._checked()
        taken, images = self.images.taken(messages, namespace)
        rendered = self.template.render(self._preamble.before(taken), images=images, **options)
        if replay and self.replays is not None:
            return self.replays.encode(rendered, namespace, owner=owner, limit=limit)
        return rendered.encode(tokenizer, limit=limit)

    def rest(self) -> None:
        """End the threads of the tokenizer, unless they are at work, and the processes of the chat template and of
        images. The next text starts others. What is known of replies is shared by then."""
        self._renderer.rest()
        self.images.rest()
        if self._shared is not None:
            self._shared.rest()
        if self._tokenizer is not None:
            self._tokenizer.limit.rest()

    def output(self, stops: Stops, prompt: Sequence[int], machine: Machine | None = None) -> Output:
        """The text of one completion, which continues that of the prompt and is read by a copy of `machine`."""
        if self._tokenizer is None:
            return Output(None, stops)
        ended = is_row(prompt[-1]) or prompt[-1] in self._tokenizer.special_ids
        after = () if ended else [token for token in prompt[-LONG_RUN:] if not is_row(token)]
        if machine is not None:
            return ReadOutput(self._tokenizer, stops, after, machine.copy())
        return Output(open_stream(self._tokenizer, after=after), stops)

    @property
    def added(self) -> Mapping[str, int]:
        """Texts that are one token each, whatever is around them, with their ids."""
        return self._checked().added

    @property
    def template(self) -> ChatTemplate:
        self._checked()
        if self._template is None:
            raise BadRequest("this model has no chat template; send a prompt instead of messages", "messages")
        return self._template

    def token_bytes(self, token: int) -> bytes:
        return b"" if is_row(token) else self._checked().token_bytes(token)

    def written(self, token: int) -> str:
        return IMAGE if is_row(token) else self._checked().written(token) or ""

    def _checked(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise BadRequest(
                "this model has no tokenizer; send a prompt of token ids instead of text",
                "prompt",
                hint=f"The reason: {self._card.why_not}.",
            )
        return self._tokenizer
