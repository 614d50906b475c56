"""response_writer: writes the responses to chats and text completions. A `ResponseFormat` has what differs.

What clients rely on: only the first chunk of a choice has the role; its `finish_reason` comes before the chunk with the
usage, whose `choices` are empty; `prompt_tokens_details.cached_tokens` is always present, 0 if nothing was cached; a
stream ends with `data: [DONE]` if and only if it succeeded. An error in a stream is one more `data:` line,
`{"error": ...}`.

Beyond OpenAI's fields, a choice has `stop_reason` (the stop string that ended it, as in vLLM) and, on request,
`token_ids`, as each of its chunks has; `prompt_token_ids` are told with the prompt's first choice, or its first chunk.
A response has `timings`, with the names of llama.cpp. Where drafts were used, the usage has OpenAI's counts of them,
and the timings those of llama.cpp and a record of our own.

Lists as long as a prompt are iterators, which are encoded in chunks: they are made on the event loop.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from kvcellar.events import Delta, PromptScored, TokenLogprob
from kvcellar.frontend.engine import Engine
from kvcellar.images.image import is_row
from kvcellar.serve.answers import TEXT, Template
from kvcellar.serve.generation.records import recall_fields
from kvcellar.serve.generation.replies import Replies, Reply, ReplyPart, WholeReply
from kvcellar.serve.generation.writer import Writer, data_event
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.openai.fields import ResponseOptions
from kvcellar.serve.openai.formats import (
    ChatChunk,
    ChatCompletion,
    ChatFormat,
    PromptScore,
    TextChoice,
    TextChunk,
    TextChunkChoice,
    TextCompletion,
    TextFormat,
    TextLogprobs,
    Usage,
    timings,
    usage,
    usage_so_far,
)
from kvcellar.serve.openai.logprobs import Places, Tokens, TokenText, finite, top_by_text
from kvcellar.text.pieces import Content, Reasoning


class Echo:
    """The prompts of a text completion as it was sent: texts or token ids."""

    def __init__(self, engine: Engine, prompts: Sequence[str | list[int]]) -> None:
        """Decodes ids: call it in a thread. Ids that the engine will refuse have no text."""
        self._engine = engine
        self._texts = [one if isinstance(one, str) else _decoded(engine, one) for one in prompts]

    @property
    def size(self) -> int:
        """Characters."""
        return sum(map(len, self._texts))

    def text(self, prompt: int) -> str:
        return self._texts[prompt]

    def opening(
        self, index: int, prompt: int, scored: PromptScored | None, most: int | None, tokens: TokenText
    ) -> TextChunkChoice:
        """What is in front of the completion `index` of a prompt. `most`: the `logprobs` of the request."""
        opening = TextChunkChoice(index=index, text=self._texts[prompt])
        if scored is not None and most is not None:
            length = len(self._texts[prompt])
            opening.logprobs = TextLogprobs(
                tokens=(tokens.name(token) for token in scored.token_ids),
                token_logprobs=(None if one is None else finite(one.logprob) for one in scored.logprobs),
                top_logprobs=(None if one is None else _top(one, most, tokens) for one in scored.logprobs),
                text_offset=(min(at, length) for at in self._offsets(scored.token_ids, tokens)),
            )
        return opening

    def _offsets(self, ids: Sequence[int], tokens: TokenText) -> Iterator[int]:
        """Where each token of a prompt begins."""
        lost = 0  # the space in front of the first word, which some tokenizers drop
        if (first := next(filter(tokens.raw, ids), None)) is not None:
            lost = len((tokens.raw(first) or b"").decode(errors="replace")) - len(self._engine.decode([first]))
        places = Places(tokens, -lost)
        return (max(0, places.add(token)) for token in ids)


def join(opening: TextChunkChoice, choice: TextChoice) -> None:
    """Put the opening in front of a choice: of its text, and of the lists of `logprobs`."""
    choice.text = opening.text + choice.text
    before, after = opening.logprobs, choice.logprobs
    if before is not None and after is not None:
        for name in TextLogprobs.__struct_fields__:
            setattr(after, name, chain(getattr(before, name), getattr(after, name)))


def prompt_logprobs(scored: PromptScored, most: int, tokens: TokenText) -> Iterator[dict[str, PromptScore] | None]:
    """`prompt_logprobs` as vLLM writes them: of each token an object by token id."""
    for entry in scored.logprobs:
        if entry is None:
            yield None
            continue
        found = {
            str(token): PromptScore(finite(value), rank, tokens.text(token))
            for rank, (token, value) in enumerate(entry.top[:most], start=1)
        }
        own = PromptScore(finite(entry.logprob), entry.rank, tokens.text(entry.token_id))
        yield {str(entry.token_id): own} | found


def _top(entry: TokenLogprob, most: int, tokens: TokenText) -> dict[str, float]:
    return top_by_text(replace(entry, top=entry.top[:most]), tokens)


def _decoded(engine: Engine, ids: list[int]) -> str:
    model = engine.model
    known = len(ids) <= model.context and all(0 <= token < model.vocab_size or is_row(token) for token in ids)
    return engine.decode(ids) if known and model.has_text else ""


DONE = b"data: [DONE]\n\n"


class ResponseWriter(Writer):
    def __init__(
        self,
        engine: Engine,
        wanted: ResponseOptions,
        form: ChatFormat | TextFormat,
        replies: Replies,
        *,
        echo: Echo | None = None,
    ) -> None:
        """`echo`: the prompts, if they are in front of the completions."""
        super().__init__(form.id_prefix + uuid4().hex, replies)
        self._engine, self._wanted, self._format = engine, wanted, form
        self._echo, self._opened = echo, set[int]()
        self._text = TokenText(engine, wanted.tokens_as_ids)
        self._wholes = [WholeReply() for _ in replies.replies]
        self._tokens = [Tokens(self._text, self._before(reply)) for reply in replies.replies]
        self._of_each_token = (  # whether a chunk has more than the text of its part
            echo is not None
            or replies.prepared.params.logprobs is not None
            or wanted.token_ids
            or wanted.token_times
            or (wanted.include_usage and wanted.continuous_usage)
        )
        self._templates: dict[tuple[int, type[Content | Reasoning]], Template] = {}  # by choice
        created = int(time.time())
        self._head: dict[str, Any] = {"id": self.id, "created": created, "model": wanted.model}

    def _before(self, reply: Reply) -> str:
        """The text in front of a choice."""
        return "" if self._echo is None else self._echo.text(self._replies.prompt_of(reply))

    # -- one response -------------------------------------------------------------------------------------------

    def add(self, part: ReplyPart) -> None:
        self._wholes[part.reply.index].add(part.pieces)
        if part.delta is not None:
            self._tokens[part.reply.index].add(part.delta)

    def response(self) -> ChatCompletion | TextCompletion:
        choices, form = [*map(self._choice, self._replies.replies)], self._format
        response = form.response(choices=choices, usage=self._usage(), timings=timings(self._replies), **self._head)
        if isinstance(response, ChatCompletion):
            self._tell_prompt(response, self._replies.replies[0])
        return response

    def _tell_prompt(self, into: ChatCompletion | TextChoice, reply: Reply) -> None:
        """What vLLM tells of a prompt."""
        self._tell_prompt_ids(into, reply)
        if (most := self._wanted.prompt_logprobs) is not None:
            scored = self._replies.scored[self._replies.prompt_of(reply)]
            into.prompt_logprobs = prompt_logprobs(scored, most, self._text)

    def _tell_prompt_ids(self, into: ChatCompletion | ChatChunk | TextChoice | TextChunkChoice, reply: Reply) -> None:
        if prompts := self._replies.prepared.prompts:
            into.prompt_token_ids = iter(prompts[self._replies.prompt_of(reply)])

    def _choice(self, reply: Reply) -> Any:
        tokens = self._tokens[reply.index]
        choice: Any = self._format.choice(
            self._wholes[reply.index],
            index=reply.index,
            finish_reason=reply.finish_reason,
            stop_reason=reply.ended.stop_string,
        )
        if self._replies.prepared.params.logprobs is not None:
            choice.logprobs = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if self._wanted.token_ids:
            choice.token_ids = iter(tokens.ids)
        if self._wanted.token_times:
            choice.token_ms = iter(tokens.ms)
        if isinstance(choice, TextChoice):
            self._tell_prompt(choice, reply)
            if self._echo is not None:
                join(self._opening(reply, self._echo), choice)
        return choice

    def _opening(self, reply: Reply, echo: Echo) -> TextChunkChoice:
        """What is in front of a choice."""
        prompt, most = self._replies.prompt_of(reply), self._replies.prepared.params.logprobs
        return echo.opening(reply.index, prompt, self._replies.scored.get(prompt), most, self._text)

    # -- a stream -----------------------------------------------------------------------------------------------

    def first(self) -> Iterator[bytes]:
        for reply in self._replies.replies:
            if (choice := self._format.first(reply.index)) is not None:
                chunk = self._chunk(reply, choice)
                if reply.index == 0 and isinstance(chunk, ChatChunk):
                    self._tell_prompt_ids(chunk, reply)
                yield data_event(chunk)

    def chunk(self, part: ReplyPart) -> bytes:
        """No chunk for an empty text, unless it has logprobs or token ids, which are in the last chunk of a part."""
        if self._of_each_token or (piece := part.only_text) is None:
            return self._chunks(part)
        key = part.reply.index, type(piece)
        if (template := self._templates.get(key)) is None:
            template = self._templates[key] = Template(self._chunks(ReplyPart(part.reply, [type(piece)(TEXT)])))
        return template.fill(piece.text)

    def _chunks(self, part: ReplyPart) -> bytes:
        reply = part.reply
        choices: list[Any] = self._format.deltas(part)
        if part.delta is not None and self._of_each_token:
            self._add_tokens(part.delta, choices, reply)
        if part.end is not None:
            end = self._format.empty(reply.index)
            end.finish_reason, end.stop_reason = reply.finish_reason, part.end.stop_string
            choices.append(end)
        if choices and isinstance(first := choices[0], TextChunkChoice) and reply.index not in self._opened:
            self._opened.add(reply.index)
            if self._echo is not None:
                first = self._opening(reply, self._echo)
                choices.insert(0, first)
            self._tell_prompt_ids(first, reply)
        return b"".join([data_event(self._chunk(reply, choice)) for choice in choices])

    def _add_tokens(self, delta: Delta, choices: list[Any], reply: Reply) -> None:
        """The log-probabilities and ids of the tokens of a delta."""
        tokens, ids = self._tokens[reply.index], self._wanted.token_ids and delta.token_ids
        times = self._wanted.token_times and delta.token_ids
        tokens.add(delta)
        if (delta.logprobs or ids or times) and not choices:
            choices.append(self._format.empty(reply.index))
        if delta.logprobs:
            choices[-1].logprobs = self._format.logprobs(tokens.logprobs, tokens.offsets, self._text)
        if ids:
            choices[-1].token_ids = tokens.ids
        if times:
            choices[-1].token_ms = tokens.ms
        tokens.mark_sent()

    def last(self) -> bytes:
        if not self._wanted.include_usage:
            return DONE
        total = {"usage": self._usage(), "timings": timings(self._replies)}
        return data_event(self._format.chunk(choices=[], **total, **self._head)) + DONE

    def failed(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def _chunk(self, reply: Reply, choice: Any) -> ChatChunk | TextChunk:
        if self._wanted.token_ids and choice.token_ids is UNSET:
            choice.token_ids = []
        chunk = self._format.chunk(choices=[choice], **self._head)
        if self._wanted.include_usage:
            chunk.usage = usage_so_far(self._replies, reply) if self._wanted.continuous_usage else None
        return chunk

    # -- of both ------------------------------------------------------------------------------------------------

    def _usage(self) -> Usage:
        used = usage(self._replies)
        if self._wanted.recall:
            texts = self._wanted.recall_texts
            found = (one.recall for one in self._replies.done.values() if one.recall is not None)
            used.recall = [recall_fields(one, self._engine, texts=texts) for one in found]
        return used
