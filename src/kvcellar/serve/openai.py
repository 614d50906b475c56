"""openai: the routes of OpenAI's API.

What clients rely on: only the first chunk of a choice has the role; its `finish_reason` comes before the chunk with the
usage, whose `choices` are empty; `prompt_tokens_details.cached_tokens` is always present, 0 if nothing was cached; a
stream ends with `data: [DONE]` if and only if it succeeded. An error sets the status of the response until the first
byte is sent; after that it is one more `data:` line, `{"error": ...}`, and the stream ends.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvcellar.serve.api_errors import ClientDisconnected, api_error, shutting_down
from kvcellar.serve.body import RequestBody, receive_json
from kvcellar.serve.conversation_turn import ConversationTurn
from kvcellar.serve.http_request import Batch, HttpRequest
from kvcellar.serve.json_text import CHUNK_ITEMS, json_chunks, to_json
from kvcellar.serve.model_use import ModelUse
from kvcellar.serve.models_list import ModelsHandler
from kvcellar.serve.namespaces import namespace, owner
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.request_log import RequestLog
from kvcellar.serve.requests import Fields, ParsedRequest, Parser, parse_chat, parse_completion
from kvcellar.serve.responses import ChatFormat, CompletionFormat, Json, ResponseBuilder, ResponseFormat
from kvcellar.serve.retained import allowed
from kvcellar.serve.shared import Shared

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # stops nginx from buffering the stream
]
PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
SEND_BYTES = 2**18  # of a response that are sent at once


def openai_routes(server: Shared) -> list[Route]:
    models = ModelsHandler(server)
    return [
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.get, methods=["GET"]),
        Route("/v1/completions", CompletionHandler(server, parse_completion, CompletionFormat()), methods=["POST"]),
        Route("/v1/chat/completions", CompletionHandler(server, parse_chat, ChatFormat()), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the events of a request are made into."""

    builder: ResponseBuilder
    turn: ConversationTurn
    log: RequestLog

    def note(self, batch: Batch) -> None:
        """Count and collect the events. The builder gets them beside this, because it returns chunks of a stream."""
        self.log.count(batch)
        self.turn.add(batch)


class CompletionHandler:
    """Handles requests for chat or text completions. An ASGI application."""

    def __init__(self, server: Shared, parse: Parser, form: ResponseFormat) -> None:
        self._server = server
        self._parse = parse
        self._format = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, body = self._server, RequestBody(self._server.bodies)
        try:
            await server.drain.run_before(receive_json(scope, receive, server.settings, body))
            await until_disconnected(receive, self._respond(body, scope, send))
        finally:
            body.release()

    async def _respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        response = await self._answered(body, scope, send)
        if response is not None:  # sent without a reference to the engine, which may be unloaded meanwhile
            await _send_json(send, response)

    async def _answered(self, body: RequestBody, scope: Scope, send: Send) -> Json | None:
        """The response, when the model is not used any more; None if it was sent as a stream."""
        server, log = self._server, RequestLog.of(scope)
        with ExitStack() as stack:
            use = stack.enter_context(ModelUse(server.host, server.threads, body))
            request = stack.enter_context(HttpRequest(server.settings.max_backlog_events))
            stack.enter_context(server.drain.on_start(request.refuse_if_queued))
            turn = stack.enter_context(ConversationTurn(owner(scope)))

            def submit(engine: ServedEngine, sent: Fields) -> ParsedRequest:
                naming = partial(namespace, scope, server.settings.share_prefixes)
                log.servable = use.servable
                parsed, prompts = self._parse(engine, sent, naming, turn)
                log.set_prompts(prompts)
                retention = allowed(parsed.retention, scope, server.settings)
                request.submit(engine, prompts, parsed.params, parsed.namespace, retention)
                return parsed

            engine, parsed = await server.drain.run_before(use.run(submit))
            body.release()
            texts = not (server.settings.share_prefixes and server.settings.key_digests)
            answer = Answer(ResponseBuilder(engine, parsed, self._format, texts), turn, log)
            log.response_id, log.namespace, log.owner = answer.builder.id, parsed.namespace, owner(scope)
            if parsed.stream:
                await self._stream(request, answer, send)
                return None
            while not request.finished:
                batch = await request.next_batch()
                answer.note(batch)
                answer.builder.add(batch)
            await self._save(turn)
            return answer.builder.response()

    async def _save(self, turn: ConversationTurn) -> None:
        """Add the turn to the conversation that the request continues, if there is one."""
        if turn.begun:
            await self._server.threads.for_conversation(RequestBody(self._server.bodies), turn.save)

    async def _stream(self, request: HttpRequest, answer: Answer, send: Send) -> None:
        """The status is sent with the first event, or after `ping_seconds` without one."""

        async def send_to_client(message: Message) -> None:
            with request.waiting_for_client():
                await send(message)

        batch = await request.next_batch(self._server.settings.ping_seconds)
        await send_to_client({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            await self._send_events(request, answer, send_to_client, batch)
            await self._save(answer.turn)
        except Exception as error:
            await _end_stream(send_to_client, _data([api_error(error).body()]))
            raise
        except asyncio.CancelledError:  # the client has disconnected, and this is discarded; or the server shuts down
            await _end_stream(send_to_client, _data([shutting_down().body()]))
            raise
        await _end_stream(send_to_client, DONE)

    async def _send_events(self, request: HttpRequest, answer: Answer, send: Send, batch: Batch) -> None:
        first = answer.builder.first_chunks()
        while chunks := list(islice(first, CHUNK_ITEMS)):
            await _send(send, _data(chunks))
        while True:
            answer.note(batch)
            chunks = answer.builder.chunks(batch)
            if data := _data(chunks) if batch else PING:
                await _send(send, data)
            if request.finished:
                return
            batch = await request.next_batch(self._server.settings.ping_seconds)


async def until_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`. Cancels it and raises `ClientDisconnected` if the client disconnects."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, value: Json) -> None:
    """Encode and send in chunks; other tasks of the event loop run between them."""
    body = bytearray()
    for number, chunk in enumerate(json_chunks(value)):
        body += chunk
        if len(chunk) > 1000 or number % CHUNK_ITEMS == 0:
            await asyncio.sleep(0)
    await send_encoded(send, body)


async def send_encoded(send: Send, body: bytes | bytearray) -> None:
    """Send JSON in pieces. The next one is copied when the client has read most of those before it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(body), SEND_BYTES):
        await _send(send, bytes(body[at : at + SEND_BYTES]), more=at + SEND_BYTES < len(body))


def _data(values: Sequence[Json]) -> bytes:
    """Server-sent events."""
    return b"".join(b"data: " + to_json(value) + b"\n\n" for value in values)


async def _end_stream(send: Send, data: bytes) -> None:
    await _send(send, data, more=False)


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
