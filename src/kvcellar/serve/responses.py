"""responses: builds chat and text completion responses of OpenAI's API from the engine's events.

A `ResponseBuilder` turns the events of one request into the chunks of a stream or into one response. A `ResponseFormat`
has what differs between chat and text completions.

Beyond OpenAI's fields, a choice has `stop_reason` (the stop string that ended it, as in vLLM) and, on request,
`token_ids`; a response has `timings`, with the names of llama.cpp. Where drafts were used, the usage has OpenAI's
counts of them, and the timings those of llama.cpp and a record of our own.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from uuid import uuid4

from kvcellar.events import Delta, Done, Event, Finished, TokenLogprob
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.recalls import recall_fields
from kvcellar.serve.requests import ParsedRequest
from kvcellar.serve.speculations import draft_counts, speculation_fields

Json = dict[str, object]

TIMINGS: Mapping[str, str] = MappingProxyType(  # meaning of `timings` of a response, with the names of llama.cpp
    {
        "queued_ms": "milliseconds from submission to admission",
        "cache_n": "prompt tokens that came from memory",
        "prompt_n": "prompt tokens that were computed",
        "prompt_ms": "milliseconds from admission to the first token",
        "predicted_n": "generated tokens",
        "predicted_ms": "milliseconds from the first token to the last",
        "predicted_per_second": "generated tokens per second",
    }
)
DRAFT_TIMINGS: Mapping[str, str] = MappingProxyType(  # and of what they have where drafts were used
    {
        "draft_n": "drafts that were computed",
        "draft_n_accepted": "drafts that became tokens",
        "speculation": "for each prompt: what its drafts have done, described below; `null` without a round",
    }
)
MIN_LOGPROB = -9999.0  # OpenAI's value for a token of probability 0; JSON has no -Infinity


class TokenText:
    """The text of single tokens, for logprobs. Where a token is an incomplete character, its text contains U+FFFD."""

    def __init__(self, engine: ServedEngine, as_ids: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def utf8(self, token: int) -> list[int] | None:
        """The bytes of a token, or None where its text is incomplete."""
        text = self.text(token)
        return None if "\ufffd" in text else list(text.encode())

    def _decode(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        # Some tokenizers drop the space before the first word of a text; before the second word they keep it.
        once, twice = self._engine.decode([token]), self._engine.decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once


@dataclass(slots=True)
class Choice:
    """One choice: its text and tokens that were not sent yet, and its counts."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each token, in characters of this choice's text
    end: Finished | None = None
    completion_tokens: int = 0
    _length: int = 0  # characters of text so far
    _pending: int = 0  # characters of tokens whose text has not arrived yet

    def add(self, delta: Delta, tokens: TokenText) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.completion_tokens += len(delta.token_ids)
        for entry in delta.logprobs or ():
            self.logprobs.append(entry)
            self.offsets.append(self._length + self._pending)
            self._pending += len(tokens.text(entry.token_id))
        if delta.text:
            self._length += len(delta.text)
            self._pending = 0

    def mark_sent(self) -> None:
        self.text, self.token_ids, self.logprobs, self.offsets = [], [], [], []


class ResponseFormat(Protocol):
    """What differs between the two routes."""

    id_prefix: str
    object_type: str
    chunk_type: str

    def first_chunk(self) -> Json | None:
        """What the first chunk of a choice contains before any text, if there is such a chunk."""
        ...

    def delta(self, text: str | None) -> Json:
        """The part of a chunk with new text; None: a chunk without text."""
        ...

    def message(self, text: str) -> Json: ...
    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        """Lists as long as the completion are iterators, which are encoded in chunks."""
        ...


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def first_chunk(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        def one(token: int, logprob: float) -> Json:
            return {"token": tokens.text(token), "logprob": _finite(logprob), "bytes": tokens.utf8(token)}

        content = (one(e.token_id, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries)
        return {"content": content, "refusal": None}


class CompletionFormat:
    id_prefix = "cmpl-"
    object_type = "text_completion"
    chunk_type = "text_completion"

    def first_chunk(self) -> Json | None:
        return None

    def delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def message(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        return {
            "tokens": (tokens.text(entry.token_id) for entry in entries),
            "token_logprobs": (_finite(entry.logprob) for entry in entries),
            "top_logprobs": (self._top(entry, tokens) for entry in entries),
            "text_offset": iter(offsets),
        }

    def _top(self, entry: TokenLogprob, tokens: TokenText) -> dict[str, float]:
        """The most likely tokens and the sampled one. Of tokens with equal text only the most likely is included."""
        top: dict[str, float] = {}
        for token, logprob in sorted([*entry.top, (entry.token_id, entry.logprob)], key=lambda one: -one[1]):
            top.setdefault(tokens.text(token), _finite(logprob))
        return top


class ResponseBuilder:
    """The response to one request: `chunks` for every batch of a stream; or `add` for every batch, then `response`."""

    def __init__(
        self, engine: ServedEngine, request: ParsedRequest, form: ResponseFormat, recall_texts: bool = True
    ) -> None:
        """`recall_texts`: whether `recall` may have the text of other requests of the namespace."""
        self._engine, self._request, self._recall_texts = engine, request, recall_texts
        self._format = form
        self._tokens = TokenText(engine, request.tokens_as_ids)
        self._choices = [Choice(index) for index in range(len(request.prompt_tokens) * request.params.n)]
        self._done: dict[int, Done] = {}  # by number of the prompt
        self.id = form.id_prefix + uuid4().hex
        self._head: Json = {
            "id": self.id,
            "created": int(time.time()),
            "model": engine.model.name,
            "system_fingerprint": None,
        }

    def add(self, batch: Sequence[tuple[int, Event]]) -> None:
        for number, event in batch:
            match event:
                case Delta():
                    self._choice(number, event.choice).add(event, self._tokens)
                case Finished():
                    self._choice(number, event.choice).end = event
                case Done():
                    self._done[number] = event

    def response(self) -> Json:
        choices = [self._whole(choice) for choice in self._choices]
        return self._record(self._format.object_type, choices) | {"usage": self._usage(), "timings": self._timings()}

    def first_chunks(self) -> Iterator[Json]:
        """The chunks before any text."""
        first = self._format.first_chunk()
        return iter(()) if first is None else (self._chunk(choice, first) for choice in self._choices)

    def chunks(self, batch: Sequence[tuple[int, Event]]) -> list[Json]:
        """The chunks for the events of `batch`; after the last `Done`, on request, the one with the usage."""
        chunks: list[Json] = []
        for number, event in batch:
            self.add([(number, event)])
            match event:
                case Delta():
                    chunks += self._delta(self._choice(number, event.choice), event)
                case Finished():
                    choice = self._choice(number, event.choice)
                    chunks.append(self._chunk(choice, self._format.delta(None) | self._end(choice)))
                case _:
                    continue
        if self._request.include_usage and len(self._done) == len(self._request.prompt_tokens):
            last = self._record(self._format.chunk_type, [])
            chunks.append(last | {"usage": self._usage(), "timings": self._timings()})
        return chunks

    def _choice(self, number: int, choice: int) -> Choice:
        return self._choices[number * self._request.params.n + choice]

    def _delta(self, choice: Choice, delta: Delta) -> list[Json]:
        """No chunk for an empty text, unless it has logprobs or token ids."""
        body = self._format.delta(delta.text)
        if delta.logprobs:
            body["logprobs"] = self._format.logprobs(choice.logprobs, choice.offsets, self._tokens)
        if self._request.token_ids and delta.token_ids:
            body["token_ids"] = choice.token_ids
        choice.mark_sent()
        return [self._chunk(choice, body)] if delta.text or len(body) > 1 else []

    def _chunk(self, choice: Choice, body: Json) -> Json:
        fields = {"index": choice.index, "logprobs": None, "finish_reason": None} | body
        chunk = self._record(self._format.chunk_type, [fields])
        if self._request.include_usage:
            chunk["usage"] = self._usage_so_far(choice) if self._request.continuous_usage else None
        return chunk

    def _usage_so_far(self, choice: Choice) -> Json:
        """The usage of one choice, without `prompt_tokens_details`, which are known only at the end."""
        prompt = self._request.prompt_tokens[choice.index // self._request.params.n]
        completion = choice.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _whole(self, choice: Choice) -> Json:
        fields = {"index": choice.index, "logprobs": None} | self._format.message("".join(choice.text))
        fields |= self._end(choice)
        if self._request.params.logprobs is not None:
            fields["logprobs"] = self._format.logprobs(choice.logprobs, choice.offsets, self._tokens)
        if self._request.token_ids:
            fields["token_ids"] = iter(choice.token_ids)
        return fields

    def _end(self, choice: Choice) -> Json:
        assert choice.end is not None, "the choice has not ended"
        return {"finish_reason": choice.end.reason, "stop_reason": choice.end.stop_string}

    def _record(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}

    def _usage(self) -> Json:
        done = self._done.values()
        prompt = sum(one.usage.prompt_tokens for one in done)
        completion = sum(one.usage.completion_tokens for one in done)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(one.usage.cached_tokens for one in done)},
        }
        if (counts := draft_counts(self._done)) is not None:
            drafted, accepted = counts
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            usage["completion_tokens_details"] = details
        if self._request.recall:
            usage["recall"] = [
                recall_fields(one.recall, self._engine, texts=self._recall_texts)
                for one in done
                if one.recall is not None
            ]
        return usage

    def _timings(self) -> Json:
        """Of several prompts, which run at the same time, the longest times."""
        done = self._done.values()
        cached = sum(one.usage.cached_tokens for one in done)
        completion = sum(one.usage.completion_tokens for one in done)
        decoding = max(one.timings.decoding for one in done)
        values = (
            1e3 * max(one.timings.queued for one in done),
            cached,
            sum(one.usage.prompt_tokens for one in done) - cached,
            1e3 * max(one.timings.first_token - one.timings.queued for one in done),
            completion,
            1e3 * decoding,
            completion / decoding if decoding > 0 else 0.0,
        )
        return dict(zip(TIMINGS, values, strict=True)) | self._draft_timings()

    def _draft_timings(self) -> Json:
        if (counts := draft_counts(self._done)) is None:
            return {}
        records = [
            speculation_fields(one.speculation) if one.speculation is not None else None
            for _, one in sorted(self._done.items())
        ]
        return dict(zip(DRAFT_TIMINGS, (*counts, records), strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
