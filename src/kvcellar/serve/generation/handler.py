"""handler: the one way from a request of any API to its response: a body is received and read, its prompts are
submitted, and what the engine generates is written, as one response or as a stream.

An error sets the status of the response until the first byte is sent; after that the writer of the API reports it in
the stream, which ends.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from starlette.types import Scope, Send

from kvcellar.engine.request_options import SubmitOptions
from kvcellar.frontend.engine import Engine
from kvcellar.serve.admin.conversation_turn import ConversationTurn
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.chat_request import ChatRequest, Prepared
from kvcellar.serve.generation.field_names import naming_fields
from kvcellar.serve.generation.http_request import Batch, HttpRequest
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.prepare import prepare
from kvcellar.serve.generation.replies import Replies, ReplyPart
from kvcellar.serve.generation.writer import Generation, MakeWriter, Parse, Writer
from kvcellar.serve.http.api_errors import api_error, shutting_down
from kvcellar.serve.http.body import RequestBody
from kvcellar.serve.http.json_text import CHUNK_ITEMS, json_size
from kvcellar.serve.http.parsing import Fields
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.sending import Stream, send_json
from kvcellar.serve.models.model_use import BodyRoute, KeepAlive, ModelUse, no_keep_alive
from kvcellar.serve.shared import Shared


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """What the events of a request are made into."""

    replies: Replies
    writer: Writer
    turn: ConversationTurn
    log: RequestLog

    def save(self) -> None:
        """Add the turn to the conversation that the request continues, if there is one, and keep the response."""
        if self.turn.begun:
            self.turn.save()
        if self.writer.keeps:
            self.writer.keep()

    def parts(self, batch: Batch) -> Iterator[ReplyPart]:
        """What the events add to the response; they are counted and collected."""
        self.log.count(batch)
        for part in self.replies.parts(batch):
            self.turn.add(part)
            yield part


class GenerationHandler(BodyRoute):
    def __init__(self, server: Shared, parse: Parse, keep_alive: KeepAlive = no_keep_alive) -> None:
        super().__init__(server)
        self._parse, self._keep_alive = parse, keep_alive

    async def respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        response = await self._answered(body, scope, send)
        if response is not None:  # sent without a reference to the engine, which may be unloaded meanwhile
            await send_json(send, response)

    async def _answered(self, body: RequestBody, scope: Scope, send: Send) -> Answer | None:
        """The response, when the model is not used any more; None if it was sent as a stream."""
        server, log = self._server, RequestLog.of(scope)
        caller = Caller(scope, server.settings)
        with ExitStack() as stack:
            use = stack.enter_context(ModelUse(server, body, self._keep_alive))
            request = stack.enter_context(HttpRequest(server.settings.max_backlog_events, server.arrivals))
            stack.enter_context(server.drain.on_start(request.refuse_if_queued))
            turn = stack.enter_context(ConversationTurn(caller.owner))

            def submit(engine: Engine, sent: Fields) -> tuple[MakeWriter, Prepared, int]:
                log.spec = use.spec
                read = self._parse(engine, sent, caller)
                with naming_fields(read.request.names, read.request.places):
                    prepared, prompts = prepare(engine, read.request, caller, turn)
                    log.set_prompts(prompts)
                    log.params, log.stream, log.conversation = prepared.params, prepared.stream, turn.name
                    retention = caller.retention(prepared.retention)
                    how = SubmitOptions(namespace=prepared.namespace, retention=retention, reading=prepared.reading)
                    how["breakpoints"] = prepared.breakpoints
                    request.submit(prompts, lambda ids, to: engine.submit(ids, prepared.params, deliver=to, **how))
                return read.writer, prepared, _kept(read, turn) if body.long else 0

            _, (writer, prepared, kept) = await server.drain.run_before(use.run(submit))
            body.keep(kept)
            replies = Replies(prepared)
            answer = ResponseParts(replies, writer(replies), turn, log)
            log.response_id, log.namespace, log.owner = answer.writer.id, prepared.namespace, caller.owner
            if prepared.stream:
                await self._stream(request, answer, Stream(scope, send, request.waiting_for_client))
                return None
            return await self._whole(request, answer)

    async def _whole(self, request: HttpRequest, answer: ResponseParts) -> Answer:
        while not request.finished:
            for part in answer.parts(await request.next_batch()):
                answer.writer.add(part)
        await self._save(answer)
        return answer.writer.response()

    async def _save(self, answer: ResponseParts) -> None:
        """Keep what later requests continue, if anything, before the client knows that the response is complete."""
        if answer.turn.begun or answer.writer.keeps:
            await self._server.threads.run("files", answer.save)

    async def _stream(self, request: HttpRequest, answer: ResponseParts, stream: Stream) -> None:
        """The status is sent with the first event, or after `ping_seconds` without one."""
        writer, batch = answer.writer, await request.next_batch(self._server.settings.ping_seconds)
        await stream.start(_headers(writer))
        try:
            await self._send_parts(request, answer, stream, batch)
            await self._save(answer)
            last = writer.last()
        except Exception as error:
            await stream.end(writer.failed(api_error(error)))
            raise
        except asyncio.CancelledError:  # the client has disconnected, and this is discarded; or the server shuts down
            await stream.end(writer.failed(shutting_down()))
            raise
        await stream.end(last)

    async def _send_parts(self, request: HttpRequest, answer: ResponseParts, stream: Stream, batch: Batch) -> None:
        writer, first = answer.writer, answer.writer.first()
        while chunks := list(islice(first, CHUNK_ITEMS)):
            await stream.part(b"".join(chunks))
        while True:
            data = b"".join(map(writer.chunk, answer.parts(batch))) if batch else writer.ping()
            if data:
                await stream.part(data)
            if request.finished:
                return
            batch = await request.next_batch(self._server.settings.ping_seconds)


def _kept(read: Generation, turn: ConversationTurn) -> int:
    """Bytes of a body that are in memory until its response has ended: for its writer, for reading the answers, and in
    the turn of a conversation."""
    request = read.request
    parts: list[object] = [request.tools] if isinstance(request, ChatRequest) else []
    if turn.begun:
        parts.append(request.messages if isinstance(request, ChatRequest) else request.prompts)
    constraint = 0 if request.constraint is None else len(request.constraint.source)
    return read.kept + constraint + sum(map(json_size, parts))


def _headers(writer: Writer) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", writer.media_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # stops nginx from buffering the stream
    ]
