"""routes: routes of Ollama's API that look at models, load and unload them, and generate text.

Errors below `/api/` are `{"error": "text"}`.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, get_args

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope, Send

from kvcellar.constraint import Constraint
from kvcellar.durations import seconds_of
from kvcellar.errors import BadRequest
from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import renamed
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.chat_request import ChatRequest, Effort, TextRequest
from kvcellar.serve.generation.field_names import Place
from kvcellar.serve.generation.handler import GenerationHandler
from kvcellar.serve.generation.namespaces import Caller
from kvcellar.serve.generation.replies import Replies
from kvcellar.serve.generation.writer import Generation, Parse
from kvcellar.serve.http.api_errors import ApiError, invalid
from kvcellar.serve.http.body import RequestBody
from kvcellar.serve.http.parsing import Fields, Limits, parse_object, validated
from kvcellar.serve.http.sending import json_response, send_json
from kvcellar.serve.models.loaded_model import FOREVER, LoadedModel
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.models.model_use import BodyRoute, read_body, sent_keep_alive
from kvcellar.serve.ollama.details import Details, ListedModel, NamedModel, ShownModel
from kvcellar.serve.ollama.fields import (
    GenerateBody,
    LoadBody,
    OllamaChatBody,
    OllamaMessage,
    ShowBody,
    sampling_options,
)
from kvcellar.serve.ollama.writer import ChatFormat, Format, GenerateFormat, OllamaWriter
from kvcellar.serve.shared import Shared
from kvcellar.version import __version__

EFFORTS: tuple[str, ...] = get_args(Effort)
NAMES = renamed("ollama")


def parse_chat(engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/api/chat`. Raises `ApiError` and `BadRequest`."""
    body = validated(OllamaChatBody, sent)
    request = ChatRequest(
        messages=[_message(message) for message in body.messages or ()],
        places=[_place(message, f"messages[{at}]") for at, message in enumerate(body.messages or ())],
        tools=body.tools or (),
        truncate=body.truncate is not False,
        continue_final_message=_continues(body.messages or ()),
        effort=_effort(body),
        names={**NAMES, "prompt": "messages"},
        **_common(body),
    )
    return Generation(request, partial(_writer, engine, body.named, caller, ChatFormat))


def parse_generate(engine: Engine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/api/generate`: a message of the user, or with `raw` a text. So is the prompt of a model without a
    chat template. Raises `ApiError` and `BadRequest`."""
    body = validated(GenerateBody, sent)
    prompt, common = body.prompt or "", _common(body)
    if body.raw or engine.model.chat_template is None:
        if body.images:
            raise BadRequest("images need a chat template; send them without raw, to a model that has one", "images")
        if body.system and not body.raw:
            raise BadRequest("system needs a chat template, and this model has none; put it into prompt", "system")
        request: TextRequest | ChatRequest = TextRequest(
            prompts=[prompt], special=not body.raw and None, names=NAMES, **common
        )
    else:
        messages: list[dict[str, Any]] = [{"role": "user", "content": _content(prompt, body.images)}]
        places = [Place("prompt", images=_images("images", body.images))]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
            places.insert(0, Place("system"))
        request = ChatRequest(messages=messages, effort=_effort(body), names=NAMES, places=places, **common)
    return Generation(request, partial(_writer, engine, body.named, caller, GenerateFormat))


def _writer(engine: Engine, named: str, caller: Caller, form: Format, replies: Replies) -> OllamaWriter:
    return OllamaWriter(engine, named, caller.seconds, form, replies)


def _common(body: LoadBody) -> dict[str, Any]:
    sampling = sampling_options(body.options)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    if body.shift and "max_tokens" in sampling:
        sampling["shift"] = True
    else:
        sampling.pop("num_keep", None)
    return {"sampling": sampling, "stream": body.stream is not False, "constraint": _constraint(body)}


def _constraint(body: LoadBody) -> Constraint | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return Constraint("json_object", param="format")
        case dict():
            return Constraint.json_schema(body.format, param="format")
        case _:
            raise invalid("format", 'format must be "json" or a JSON schema')


def _effort(body: LoadBody) -> str | None:
    match body.think:
        case None:
            return None
        case bool():
            return "medium" if body.think else "none"
        case word if word in EFFORTS:
            return word
        case _:
            raise invalid("think", f"think must be true, false, or one of {', '.join(EFFORTS)}")


def _continues(messages: Sequence[OllamaMessage]) -> bool:
    """As Ollama: text of the assistant at the end is the beginning of the answer."""
    return (
        bool(messages)
        and messages[-1].role == "assistant"
        and bool(messages[-1].content)
        and not messages[-1].tool_calls
    )


def _message(message: OllamaMessage) -> dict[str, Any]:
    """In the form of OpenAI's chat API, which templates read."""
    found: dict[str, Any] = {"role": message.role}
    if message.content is not None or message.images or not (message.tool_calls or message.thinking):
        found["content"] = _content(message.content or "", message.images)
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments or {}},
            }
            for call in message.tool_calls
        ]
    if message.tool_name is not None:
        found["name"] = message.tool_name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """As Ollama: images are in front of the text."""
    if not images:
        return text
    parts = [{"type": "image", "image": f"data:image/*;base64,{image}"} for image in images]
    return [*parts, {"type": "text", "text": text}]


def _images(where: str, images: Sequence[str] | None) -> dict[int, str]:
    return {at: f"{where}[{at}]" for at in range(len(images or ()))}


def _place(message: OllamaMessage, where: str) -> Place:
    calls = [f"{where}.tool_calls[{at}].function.arguments" for at in range(len(message.tool_calls or ()))]
    return Place(where, calls, _images(f"{where}.images", message.images))


NEVER = 292 * 365 * 86400.0  # seconds; Ollama writes a time so far away for what stays loaded


class Version(Answer):
    version: str


class ListedModels(Answer):
    models: list[ListedModel]


class RunningModel(NamedModel, kw_only=True):
    size: int  # bytes
    size_vram: int
    shared_size: int  # of `size`, the bytes that other loaded models use too
    expires_at: str
    context_length: int


class LoadedModels(Answer):
    models: list[RunningModel]


class OllamaHandler:
    def __init__(self, server: Shared) -> None:
        self._server, self._host = server, server.host
        self._details = Details(server.library)

    async def root(self, request: Request) -> Response:
        return PlainTextResponse("kvcellar is running", headers={"vary": "accept"})

    async def version(self, request: Request) -> Response:
        return json_response(Version(__version__))

    async def tags(self, request: Request) -> Response:
        def work() -> ListedModels:
            return ListedModels([self._details.listed(one) for one in self._host.all()])

        return json_response(await self._server.threads.run("models", work))

    async def show(self, request: Request) -> Response:
        body = await read_body(self._server, request, ShowBody)

        def work() -> ShownModel:
            spec = self._host.find(body.named)
            with self._host.take(spec) or nullcontext() as lease:
                return self._details.shown(spec, lease and lease.engine, verbose=bool(body.verbose))

        return json_response(await self._server.threads.run("models", work))

    async def running(self, request: Request) -> Response:
        def work() -> LoadedModels:
            return LoadedModels([self._running(one) for one in self._host.models()])

        return json_response(await self._server.threads.run("models", work))

    def _running(self, one: LoadedModel) -> RunningModel:
        on, limits = one.on, self._host.limits
        engine, size = on.engine, on.size + one.size
        seconds = NEVER if one.fixed or one.keep_alive == FOREVER else self._host.seconds_left(one)
        return RunningModel(
            **asdict(self._details.named(one.spec)),
            size=size,
            size_vram=size if limits.device == "cuda" else 0,
            shared_size=on.size if len(on.models) > 1 else 0,
            expires_at=datetime.fromtimestamp(time.time() + seconds, UTC).isoformat(),
            context_length=engine.model.context if engine is not None else 0,
        )

    async def load(self, body: LoadBody) -> Literal["load", "unload"]:
        """Load a model, or with `keep_alive` 0 unload it. Returns what was done."""
        keep_alive = None if body.keep_alive is None else seconds_of(body.keep_alive)
        spec: ModelSpec = await self._server.threads.run("library", lambda: self._host.find(body.named))
        if keep_alive == 0:
            if self._host.stays(spec):
                message = f"the model {spec.name} was named when the server was started, and stays loaded"
                raise ApiError(409, message, "model", "model_stays")
            self._host.unload(spec.name)
        else:

            async def load() -> None:
                (await self._host.lease(spec, keep_alive)).release()

            await self._server.drain.run_before(load())
        return "unload" if keep_alive == 0 else "load"


@dataclass(frozen=True, slots=True)
class Kind:
    """A route that generates. `empty`: the field whose absence means that a model is to be loaded or unloaded."""

    body: type[LoadBody]
    parse: Parse
    empty: str
    form: Format


GENERATE = Kind(GenerateBody, parse_generate, "prompt", GenerateFormat)
CHAT = Kind(OllamaChatBody, parse_chat, "messages", ChatFormat)


class OllamaGeneration(BodyRoute):
    def __init__(self, server: Shared, handler: OllamaHandler, kind: Kind) -> None:
        super().__init__(server)
        self._handler, self._kind = handler, kind
        self._generation = GenerationHandler(server, kind.parse, sent_keep_alive)

    async def respond(self, body: RequestBody, scope: Scope, send: Send) -> None:
        server, kind = self._server, self._kind

        def read() -> LoadBody | None:
            """None: it is to be generated from."""
            found = validated(kind.body, parse_object(body.data, Limits(server.host.longest)))
            if found.keep_alive is not None:
                seconds_of(found.keep_alive)
            if not getattr(found, kind.empty):
                return found
            if not found.model:
                raise ApiError(400, "model is required", "model", "missing_required_parameter")
            return None

        if (found := await server.threads.read(body, read)) is None:
            await self._generation.respond(body, scope, send)
            return
        reason = await self._handler.load(found)
        now = datetime.now(UTC).isoformat()
        answer = kind.form.end(model=found.named, created_at=now, done_reason=reason, **kind.form.fields())
        await send_json(send, answer)
