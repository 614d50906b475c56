"""items: the input of a request of the Responses API, as messages of a chat.

An item of the input is a message, or a part of one: reasoning and calls are items of their own beside the text that the
model wrote with them, and become one message again. Unknown keys in items are ignored: clients send back what other
servers wrote.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kvcellar.serve.generation.field_names import Place
from kvcellar.serve.generation.messages import no_encoder
from kvcellar.serve.http.api_errors import invalid, unsupported
from kvcellar.serve.http.json_text import printable

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # where parts have text
UNFINISHED = ("incomplete", "in_progress")
KINDS = "message, function_call, function_call_output and reasoning"

Json = dict[str, Any]


def messages_of(given: object) -> tuple[list[Json], list[Place]]:
    """Messages as `Engine.render` takes them, and the items that they are made of. Raises `ApiError`."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [Place("input")]
    if not isinstance(given, list) or not given:
        raise invalid("input", "input must be a string, or a list of items that is not empty")
    items = cast("Sequence[object]", given)
    if len(items) > MAX_ITEMS:
        raise invalid("input", f"input has {len(items)} items; at most {MAX_ITEMS} are allowed")
    merged = Merged()
    for at, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise invalid(f"input[{at}]", f"input[{at}] must be an object")
        _add(merged, cast("Mapping[str, Any]", item), f"input[{at}]")
    if not merged.messages:  # reasoning that another server has encrypted, and nothing else
        raise invalid("input", "input must have an item that is not reasoning without a text")
    return merged.messages, merged.places


def kept_items(given: object) -> bytes:
    """The same as a list of items, in JSON, to be shown later."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return json.dumps(items).encode()


def continues(given: object) -> bool:
    """Whether the last item is an answer that was not completed, which the response continues, as in vLLM."""
    last = given[-1] if isinstance(given, list) else {}
    assistant = last.get("type", "message") == "message" and last.get("role") == "assistant"
    return assistant and last.get("status") in UNFINISHED


def check_results(given: object, before: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ApiError` for a result in `given`, which `messages_of` has read, whose call is neither in front of it nor
    in the messages `before`."""
    called = {call["id"] for message in before for call in message.get("tool_calls", ())}
    items = cast("Sequence[Mapping[str, Any]]", given if isinstance(given, list) else ())
    for at, item in enumerate(items):
        if item.get("type") == "function_call":
            called.add(item["call_id"])
        elif item.get("type") == "function_call_output" and item["call_id"] not in called:
            where, shown = f"input[{at}].call_id", printable(repr(item["call_id"]), 60)
            raise invalid(where, f"{where} is {shown}, which no function_call before it has")


class Merged:
    """Messages, the last of which may still be the assistant's: then it gets more of what the model wrote."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.places: list[Place] = []  # of each message: its first item, and those of its calls
        self._open = False

    def add(self, message: Json, where: str, content: str = "") -> None:
        """`content`: the field that its content comes from."""
        self.messages.append(message)
        parts = message["content"] if isinstance(message["content"], list) else []
        self.places.append(Place(where, images={at: f"{content}[{at}].image_url" for at in range(len(parts))}))
        self._open = False

    def written(self, where: str, *, before: Sequence[str]) -> Json:
        """The assistant's message for more of it; a new one if the last has one of the fields `before`."""
        if not self._open or any(self.messages[-1].get(name) for name in before):
            self.add({"role": "assistant", "content": ""}, where)
            self._open = True
        return self.messages[-1]

    def call(self, call: Json, where: str) -> None:
        self.written(where, before=()).setdefault("tool_calls", []).append(call)
        place = self.places[-1]
        self.places[-1] = replace(place, calls=(*place.calls, f"{where}.arguments"))


def _add(merged: Merged, item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _message(merged, item, where)
        case "reasoning":
            if text := _reasoning(item, where):
                message = merged.written(where, before=("content", "tool_calls", "reasoning_content"))
                message["reasoning_content"] = text
        case "function_call":
            function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
            call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
            merged.call(call, where)
        case "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            result = {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output}
            merged.add(result, where, f"{where}.output")
        case kind:
            shown = printable(repr(kind), 40)
            raise invalid(f"{where}.type", f"{where}.type is {shown}, which is not supported; {KINDS} are")


def _message(merged: Merged, item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        merged.written(where, before=("content", "tool_calls"))["content"] = content
    else:
        merged.add({"role": "system" if role == "developer" else role, "content": content}, where, f"{where}.content")


def _content(value: object, where: str) -> str | list[Json]:
    """A text, or parts as they are in chats."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(where, f"{where} must be a string, or a list of parts")
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(cast("Sequence[object]", value))]
    return parts[0].get("text", parts) if len(parts) == 1 else (parts or "")


def _part(value: object, where: str) -> Json:
    part = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
    kind = part.get("type")
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise unsupported(f"{where}.file_id", f"{where}.file_id is not supported: this server keeps no files")
        return {"type": "image_url", "image_url": {"url": _text(part, "image_url", where)}}
    if not isinstance(kind, str) or kind not in TEXTS:
        kinds = ", ".join((*TEXTS, "input_image"))
        raise invalid(f"{where}.type", f"{where}.type must be one of {kinds}{no_encoder(kind)}")
    return {"type": "text", "text": _text(part, TEXTS[kind], where)}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Its text, else its summary. What another server has encrypted says nothing to this model."""
    for name in ("content", "summary"):
        value: object = item.get(name)
        if isinstance(value, list) and value:
            parts = enumerate(cast("Sequence[object]", value))
            return "\n".join(_text(part, "text", f"{where}.{name}[{at}]") for at, part in parts)
    return ""


def _text(value: object, name: str, where: str) -> str:
    found = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    if not isinstance(found, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a string")
    return found
