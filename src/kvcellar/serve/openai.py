"""openai: the routes that OpenAI's clients call.

What they trip over, and what holds here: the role is only in the first chunk of a choice; its `finish_reason` comes
before the chunk with the usage, whose `choices` are empty; `prompt_tokens_details.cached_tokens` is always there, 0
when nothing was; a stream that went well, and only that, ends with `data: [DONE]`. An error is answered with its own
status as long as nothing has been sent; later it is one more `data:` line with `{"error": ...}`, and the stream ends.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvcellar.serve.answers import ChatShape, CompletionShape, Json, Scribe, Shape
from kvcellar.serve.body import Arrival, Bodies, receive_json
from kvcellar.serve.drain import Drain
from kvcellar.serve.failures import PIECE, ClientGone, api_error, json_pieces, shutting_down, to_json
from kvcellar.serve.http_request import HttpRequest
from kvcellar.serve.lanes import Lanes
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.record import Record
from kvcellar.serve.requests import Job, Read, model_not_found, read_chat, read_completion
from kvcellar.serve.settings import ServeSettings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]
PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
SENT = 2**18  # bytes of an answer that are sent at once


def openai_routes(engine: ServedEngine, settings: ServeSettings, lanes: Lanes, drain: Drain) -> list[Route]:
    models, bodies = Models(engine), Bodies(settings.bodies_bytes)
    completions = Answering(engine, settings, lanes, bodies, drain, read_completion, CompletionShape())
    chat = Answering(engine, settings, lanes, bodies, drain, read_chat, ChatShape())
    return [
        Route("/v1/models", models.all, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]


class Models:
    """The one model that is served. Its name may contain slashes."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def all(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def one(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._engine.model.name:
            raise model_not_found(name)
        return _json(self._card())

    def _card(self) -> Json:
        model = self._engine.model
        card: Json = {"id": model.name, "object": "model", "created": self._created, "owned_by": "kvcellar"}
        return card | {"max_model_len": model.context}


class Answering:
    """A route that reads a body, runs it, and answers in one piece or as a stream. An ASGI application."""

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServeSettings,
        lanes: Lanes,
        bodies: Bodies,
        drain: Drain,
        read: Read,
        shape: Shape,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._lanes = lanes
        self._bodies = bodies
        self._drain = drain
        self._read = read
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = Arrival(self._bodies)
        try:
            await self._drain.before(receive_json(scope, receive, self._settings, arrival))
            await attended(receive, self._answer(arrival, Record.of(scope), send))
        finally:
            arrival.left()

    async def _answer(self, arrival: Arrival, record: Record, send: Send) -> None:
        with (
            HttpRequest(self._engine, self._settings.max_backlog_events) as exchange,
            self._drain.refusing(exchange.refuse_queued),
        ):

            def read_and_launch() -> Job:
                job, prompts = self._read(self._engine, arrival.data)
                record.asked(prompts)
                exchange.launch(prompts, job.params)
                return job

            job = await self._drain.before(self._lanes.run(arrival, read_and_launch))
            scribe = Scribe(self._engine, job, self._shape)
            if job.stream:

                async def send_on(message: Message) -> None:
                    with exchange.held_up():
                        await send(message)

                await self._stream(exchange, scribe, record, send_on)
                return
            while not exchange.over:
                batch = await exchange.next_batch()
                record.tally(batch)
                scribe.take(batch)
        await _send_whole(send, scribe.answer())

    async def _stream(self, exchange: HttpRequest, scribe: Scribe, record: Record, send: Send) -> None:
        """The status is 200 once something was said, or once it has taken so long that the client needs a sign."""
        patience = self._settings.ping_seconds
        batch = await exchange.next_batch(patience)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            opening = scribe.opening()
            while chunks := list(islice(opening, PIECE)):
                await _send_lines(send, chunks)
            while True:
                record.tally(batch)
                chunks = scribe.chunks(batch)
                await (_send_lines(send, chunks) if batch else _send(send, PING))
                if exchange.over:
                    break
                batch = await exchange.next_batch(patience)
        except Exception as error:
            await _send_lines(send, [api_error(error).shape()])
            await _send(send, b"", more=False)
            raise
        except asyncio.CancelledError:
            # The client has left, then this goes nowhere; or the server stops, then the client should know.
            await _send_lines(send, [shutting_down().shape()])
            await _send(send, b"", more=False)
            raise
        else:
            await _send(send, DONE, more=False)


async def attended(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work` for as long as somebody waits for it. Raises what it raises, and `ClientGone`."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, value: Json) -> None:
    """Written and sent in pieces; between long ones the event loop turns to others."""
    body = bytearray()
    for number, piece in enumerate(json_pieces(value)):
        body += piece
        if len(piece) > 1000 or number % PIECE == 0:
            await asyncio.sleep(0)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(body), SENT):
        await _send(send, bytes(body[at : at + SENT]), more=at + SENT < len(body))


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _send_lines(send: Send, values: Sequence[Json]) -> None:
    if values:
        await _send(send, b"".join(b"data: " + to_json(value) + b"\n\n" for value in values))


async def _send(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
