"""answers: what the engine said, in the two shapes of OpenAI's API.

A `Scribe` follows one request and turns its events into chunks of a stream, or into one answer at the end. What differs
between completions and chat is in a `Shape`; everything else is the same.

Beside OpenAI's fields a choice has `stop_reason` (the stop string that was met, as in vLLM) and, if asked for,
`token_ids`; an answer has `timings`, with the names of llama.cpp.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from kvcellar.events import Delta, Done, Event, Finished, TokenLogprob
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.requests import Job

Json = dict[str, object]

NEVER = -9999.0  # OpenAI's number for a token that cannot be drawn; JSON has no -Infinity


class Spelling:
    """Token ids as text, for logprobs. A token can be a part of a character: its text then has U+FFFD in it."""

    def __init__(self, engine: ServedEngine, as_ids: bool) -> None:
        self._engine = engine
        self._as_ids = as_ids
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def utf8(self, token: int) -> list[int] | None:
        """The bytes of a token, or None where its text does not tell them."""
        text = self.text(token)
        return None if "\ufffd" in text else list(text.encode())

    def _spell(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        # Some tokenizers drop the space before the first word of a text; the second word keeps it.
        once, twice = self._engine.decode([token]), self._engine.decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else once


@dataclass(slots=True)
class Line:
    """What has been said of one choice."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each token, in characters of this choice's text
    end: Finished | None = None
    written: int = 0  # tokens
    _said: int = 0
    _ahead: int = 0  # characters of tokens whose text has not come yet

    def add(self, piece: Delta, spelling: Spelling) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.written += len(piece.token_ids)
        for entry in piece.logprobs or ():
            self.logprobs.append(entry)
            self.offsets.append(self._said + self._ahead)
            self._ahead += len(spelling.text(entry.token_id))
        if piece.text:
            self._said += len(piece.text)
            self._ahead = 0


class Shape(Protocol):
    """What differs between the two APIs. `text` None stands for a chunk that has none."""

    prefix: str
    kind: str
    chunk_kind: str

    def opening(self) -> Json | None:
        """The first chunk of a choice, if there is one of its own."""
        ...

    def part(self, text: str | None) -> Json: ...
    def whole(self, text: str) -> Json: ...
    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], spelling: Spelling) -> Json:
        """With iterators for lists that are as long as the answer: they are written piece by piece."""
        ...


class ChatShape:
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], spelling: Spelling) -> Json:
        def one(token: int, logprob: float) -> Json:
            return {"token": spelling.text(token), "logprob": _finite(logprob), "bytes": spelling.utf8(token)}

        content = (one(e.token_id, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries)
        return {"content": content, "refusal": None}


class CompletionShape:
    prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def opening(self) -> Json | None:
        return None

    def part(self, text: str | None) -> Json:
        return {"text": text or ""}

    def whole(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], spelling: Spelling) -> Json:
        return {
            "tokens": (spelling.text(entry.token_id) for entry in entries),
            "token_logprobs": (_finite(entry.logprob) for entry in entries),
            "top_logprobs": (self._top(entry, spelling) for entry in entries),
            "text_offset": iter(offsets),
        }

    def _top(self, entry: TokenLogprob, spelling: Spelling) -> dict[str, float]:
        """The likeliest tokens and the one drawn. Of tokens that look alike the likeliest is named."""
        top: dict[str, float] = {}
        for token, logprob in sorted([*entry.top, (entry.token_id, entry.logprob)], key=lambda one: -one[1]):
            top.setdefault(spelling.text(token), _finite(logprob))
        return top


class Scribe:
    """Writes the answer to one job: `chunks` for each batch of a stream, or `take` them all, then `answer`."""

    def __init__(self, engine: ServedEngine, job: Job, shape: Shape) -> None:
        self._job = job
        self._shape = shape
        self._spelling = Spelling(engine, job.tokens_as_ids)
        self._lines = [Line(index) for index in range(len(job.prompt_tokens) * job.params.n)]
        self._done: list[Done] = []
        self._head: Json = {
            "id": shape.prefix + uuid4().hex,
            "created": int(time.time()),
            "model": engine.model.name,
            "system_fingerprint": None,
        }

    def take(self, batch: Sequence[tuple[int, Event]]) -> None:
        for run, event in batch:
            match event:
                case Delta():
                    self._line(run, event.choice).add(event, self._spelling)
                case Finished():
                    self._line(run, event.choice).end = event
                case Done():
                    self._done.append(event)

    def answer(self) -> Json:
        choices = [self._whole(line) for line in self._lines]
        return self._record(self._shape.kind, choices) | {"usage": self._usage(), "timings": self._timings()}

    def opening(self) -> Iterator[Json]:
        """The chunks before the first text."""
        first = self._shape.opening()
        return iter(()) if first is None else (self._chunk(line, first) for line in self._lines)

    def chunks(self, batch: Sequence[tuple[int, Event]]) -> list[Json]:
        """The chunks that tell of `batch`; after the last `Done`, if it was asked for, the one with the usage."""
        told: list[Json] = []
        for run, event in batch:
            self.take([(run, event)])
            match event:
                case Delta():
                    told += self._part(self._line(run, event.choice), event)
                case Finished():
                    line = self._line(run, event.choice)
                    told.append(self._chunk(line, self._shape.part(None) | self._ending(line)))
                case _:
                    continue
        if self._job.include_usage and len(self._done) == len(self._job.prompt_tokens):
            last = self._record(self._shape.chunk_kind, [])
            told.append(last | {"usage": self._usage(), "timings": self._timings()})
        return told

    def _line(self, run: int, choice: int) -> Line:
        return self._lines[run * self._job.params.n + choice]

    def _part(self, line: Line, piece: Delta) -> list[Json]:
        """No chunk for an empty text, unless something else is to be told with it. The line forgets what was told."""
        body = self._shape.part(piece.text)
        if piece.logprobs:
            body["logprobs"] = self._shape.logprobs(line.logprobs, line.offsets, self._spelling)
        if self._job.token_ids and piece.token_ids:
            body["token_ids"] = line.token_ids
        line.text, line.token_ids, line.logprobs, line.offsets = [], [], [], []
        return [self._chunk(line, body)] if piece.text or len(body) > 1 else []

    def _chunk(self, line: Line, body: Json) -> Json:
        choice = {"index": line.index, "logprobs": None, "finish_reason": None} | body
        chunk = self._record(self._shape.chunk_kind, [choice])
        if self._job.include_usage:
            chunk["usage"] = self._usage_so_far(line) if self._job.continuous_usage else None
        return chunk

    def _usage_so_far(self, line: Line) -> Json:
        """Of one choice, without `prompt_tokens_details`: what came from memory is known at the end."""
        prompt = self._job.prompt_tokens[line.index // self._job.params.n]
        return {"prompt_tokens": prompt, "completion_tokens": line.written, "total_tokens": prompt + line.written}

    def _whole(self, line: Line) -> Json:
        choice = {"index": line.index, "logprobs": None} | self._shape.whole("".join(line.text)) | self._ending(line)
        if self._job.params.logprobs is not None:
            choice["logprobs"] = self._shape.logprobs(line.logprobs, line.offsets, self._spelling)
        if self._job.token_ids:
            choice["token_ids"] = iter(line.token_ids)
        return choice

    def _ending(self, line: Line) -> Json:
        assert line.end is not None, "a choice was told to its end before it had one"
        return {"finish_reason": line.end.reason, "stop_reason": line.end.stop_string}

    def _record(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}

    def _usage(self) -> Json:
        prompt = sum(done.usage.prompt_tokens for done in self._done)
        completion = sum(done.usage.completion_tokens for done in self._done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(done.usage.cached_tokens for done in self._done)},
        }

    def _timings(self) -> Json:
        """Milliseconds; of several prompts, which run side by side, the longest."""
        cached = sum(done.usage.cached_tokens for done in self._done)
        written = sum(done.usage.completion_tokens for done in self._done)
        decoding = max(done.timings.decoding for done in self._done)
        return {
            "queued_ms": 1e3 * max(done.timings.queued for done in self._done),
            "cache_n": cached,
            "prompt_n": sum(done.usage.prompt_tokens for done in self._done) - cached,
            "prompt_ms": 1e3 * max(done.timings.first_token - done.timings.queued for done in self._done),
            "predicted_n": written,
            "predicted_ms": 1e3 * decoding,
            "predicted_per_second": written / decoding if decoding > 0 else 0.0,
        }


def _finite(logprob: float) -> float:
    return max(logprob, NEVER)
