"""ollama_generate: the bodies of Ollama's routes that generate text, as requests."""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.errors import BadRequest
from kvcellar.sample.constraint import Constraint
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.chat_request import ChatRequest, TextRequest
from kvcellar.serve.field_names import Place
from kvcellar.serve.ollama_fields import Effort, GenerateBody, LoadBody, OllamaChatBody, OllamaMessage
from kvcellar.serve.ollama_options import NAMES, sampling_of
from kvcellar.serve.ollama_writer import OllamaWriter, Shape, chat_shape, generate_shape
from kvcellar.serve.parsing import Fields, validated
from kvcellar.serve.replies import Replies
from kvcellar.serve.writer import Caller, Generation

EFFORTS: tuple[str, ...] = get_args(Effort)


def parse_chat(engine: ServedEngine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/api/chat`. Raises `ApiError` and `BadRequest`."""
    body = validated(OllamaChatBody, sent)
    request = ChatRequest(
        messages=[_message(message) for message in body.messages or ()],
        tools=body.tools or (),
        truncate=body.truncate is not False,
        continue_final_message=_continues(body.messages or ()),
        effort=_effort(body),
        names={**NAMES, "prompt": "messages"},
        **_common(body),
    )
    return Generation(request, partial(_writer, engine, body.named, caller, chat_shape))


def parse_generate(engine: ServedEngine, sent: Fields, caller: Caller) -> Generation:
    """A body of `/api/generate`: a message of the user, or with `raw` a text. So is the prompt of a model without a
    chat template. Raises `ApiError` and `BadRequest`."""
    body = validated(GenerateBody, sent)
    prompt, common = body.prompt or "", _common(body)
    if body.raw or engine.model.chat_template is None:
        if body.system and not body.raw:
            raise BadRequest("system needs a chat template, and this model has none; put it into prompt", "system")
        request: TextRequest | ChatRequest = TextRequest(
            prompts=[prompt], special=not body.raw and None, names=NAMES, **common
        )
    else:
        messages, places = [{"role": "user", "content": prompt}], [Place("prompt")]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
            places.insert(0, Place("system"))
        request = ChatRequest(messages=messages, effort=_effort(body), names=NAMES, places=places, **common)
    return Generation(request, partial(_writer, engine, body.named, caller, generate_shape))


def _writer(engine: ServedEngine, named: str, caller: Caller, shape: Shape, replies: Replies) -> OllamaWriter:
    return OllamaWriter(engine, named, caller.seconds, shape, replies)


def _common(body: LoadBody) -> dict[str, Any]:
    sampling = sampling_of(body.options)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
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
            raise ApiError(400, 'format must be "json" or a JSON schema', "format", "invalid_value")


def _effort(body: LoadBody) -> str | None:
    match body.think:
        case None:
            return None
        case bool():
            return "medium" if body.think else "none"
        case word if word in EFFORTS:
            return word
        case _:
            raise ApiError(400, f"think must be true, false, or one of {', '.join(EFFORTS)}", "think", "invalid_value")


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
    if message.content is not None or not (message.tool_calls or message.thinking):
        found["content"] = message.content or ""
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
