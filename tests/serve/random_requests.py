"""Random requests of all APIs, valid and invalid, as bytes, and the moments when their clients leave. Number and seed
decide all of a request."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tests.serve.every_api import APIS, CONVERSATIONS, Api
from tests.serve.wire import request

WORDS = "river road hill tree stone house light water".split()
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
NESTED: Any = json.loads("[" * 40 + "]" * 40)
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, 2**31, 2**63, 10**30, "", "x", "\x00", "\U0001f347", "x" * 10_000),
    *([], {}, [[]], [None], ["a", 1], {"a": {}}, {"type": "x"}, ["a"] * 5000, {str(n): n for n in range(500)}, NESTED),
)
UNKNOWN = ("temprature", "n_discard", "audio", "logit_bias", "chat_template", "suffix", "best_of", "a\nb", "x" * 500)


class Leaves(Enum):
    """When a client closes its connection."""

    BEFORE_HEADERS = auto()  # having sent a part of the request line and the headers, or nothing
    IN_BODY = auto()
    AT_ONCE = auto()  # having sent all: the request is being read, or in the queue
    SOON = auto()  # a moment later: in the queue, in prefill or in decode
    IN_STREAM = auto()  # having received a part of the answer, if that is not all of it
    AT_END = auto()  # with the last byte of the answer


@dataclass(frozen=True)
class Act:
    """What one client does."""

    name: str  # of the API
    sent: bytes
    valid: bool
    leaves: Leaves
    cut: float  # how much of the part in which it leaves was sent, 0 to 1
    reads: int  # parts of the answer that it reads before it leaves
    reset: bool  # by a TCP reset


def act(seed: int, number: int, *, model: str, real: bool) -> Act:
    """`real`: the engine embeds and has tools, and is not a fake."""
    draw = random.Random(f"{seed} {number}")
    names = [name for name in APIS if real or "embed" not in name]
    name = draw.choice(names)
    body = _varied(draw, name, APIS[name], model, real)
    valid = draw.random() < 0.6
    sent = request(APIS[name].path, body, "Connection: close") if valid else _invalid(draw, APIS[name], body)
    leaves = draw.choices(list(Leaves), (1, 1, 2, 3, 3, 4))[0]
    return Act(name, sent, valid, leaves, draw.random(), draw.randrange(1, 6), draw.random() < 0.5)


def text(draw: random.Random) -> str:
    """Mostly short; some begin alike, so that they are found in memory, and some are longer than a step."""
    start = "The quick brown fox. " * draw.choice([0, 0, 1, 8, 24])
    return start + " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))


def _varied(draw: random.Random, name: str, api: Api, model: str, real: bool) -> dict[str, Any]:
    """A valid body."""
    body = api.named(model)
    for field in ("prompt", "input", "messages"):
        if field in body:
            body[field] = _chat(draw) if isinstance(body[field], list) else text(draw)
    if name == "conversations":
        return {"name": f"c{draw.randrange(10**9)}"} | ({"messages": _chat(draw)} if draw.random() < 0.5 else {})
    if not api.streams:
        return body
    body["stream"] = draw.random() < 0.6
    most, sampling = draw.choice([1, 4, 16, 60]), {"temperature": draw.random() * 2, "seed": draw.randrange(1000)}
    if "ollama" in name:
        body["options"] = {"num_predict": most, **sampling}
    else:
        body |= sampling | {"max_output_tokens" if name == "responses" else "max_tokens": most}
    if name in ("completions", "chat") and draw.random() < 0.3:
        body["n"] = draw.randint(1, 4)
    if name == "completions" and draw.random() < 0.2:
        body["prompt"] = [text(draw) for _ in range(draw.randint(1, 4))]
    if real and draw.random() < 0.25:
        body |= _shaped(draw, name)
    return body


def _chat(draw: random.Random) -> list[dict[str, Any]]:
    turns = draw.choice([1, 1, 1, 3, 5])
    return [{"role": ("user", "assistant")[at % 2], "content": text(draw)} for at in range(turns)]


def _shaped(draw: random.Random, name: str) -> Mapping[str, Any]:
    """Fields of an API that ask for a schema or a call."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    nested, flat = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
    anthropic = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    formats: Mapping[str, tuple[Mapping[str, Any], ...]] = {
        "completions": ({"response_format": named}, {"structured_outputs": {"regex": "[a-z]{3}"}}),
        "chat": ({"response_format": named}, {"tools": [nested]}, {"tools": [nested], "tool_choice": "required"}),
        "responses": ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, {"tools": [flat]}),
        "messages": (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"tools": [anthropic], "tool_choice": {"type": "any"}},
        ),
        "ollama chat": ({"format": "json"}, {"format": SCHEMA}, {"tools": [nested]}),
        "ollama generate": ({"format": "json"}, {"format": SCHEMA}),
    }
    return draw.choice(formats[name])


def _invalid(draw: random.Random, api: Api, body: dict[str, Any]) -> bytes:
    """Something is wrong with it, or at least strange."""
    match draw.randrange(7):
        case 0:
            body[draw.choice(list(body))] = draw.choice(JUNK)
        case 1:
            body[draw.choice(UNKNOWN)] = draw.choice(JUNK)
        case 2:
            del body[draw.choice(list(body))]
        case 3:
            data = json.dumps(body).encode()
            data = data[: draw.randrange(len(data))] + draw.choice([b"", b"x", b"\xff", b"}", b"[" * 100])
            head = request(api.path, {}, "Connection: close", f"Content-Length: {len(data)}")[:-2]
            return head + data
        case 4:
            kind = draw.choice(["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"])
            return request(api.path, body, "Connection: close", f"Content-Type: {kind}")
        case 5:
            lines = ["Host: evil.example", "X-Long: " + "x" * 70_000, "Content-Encoding: gzip", "Transfer-Encoding: br"]
            return request(api.path, body, "Connection: close", draw.choice(lines))
        case _:
            path = draw.choice(["/nowhere", f"{api.path}/", "/v1/models/..%2f..", f"{CONVERSATIONS}/none/fork"])
            return request(path, body, "Connection: close", method=draw.choice(["POST", "GET", "PUT", "BREW"]))
    return request(api.path, body, "Connection: close")
