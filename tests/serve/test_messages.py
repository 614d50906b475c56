"""Every error message that an HTTP client can get. The style of new messages:

* it names the invalid field of the API, and what is allowed and what to do;
* it uses terms of the API and of JSON: no option of the command line, no setting of the engine, nothing of Python;
* plain English, one or two sentences, without a full stop at the end.

A message that is raised anywhere in `SOURCES` and does not occur here fails `test_every_message_in_the_code_is_here`.
"""

import ast
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.engine.card import TextCard
from kvcellar.engine.core.intake import PromptMemory
from kvcellar.engine.load.settings import Settings
from kvcellar.errors import (
    CacheFull,
    ConversationNotSaved,
    ConversationUnreadable,
    EngineClosed,
    EngineFailed,
    NotSupported,
)
from kvcellar.frontend.request_builder import RequestBuilder
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import BodyBudget
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import SHORTS, TextTokenizer, TokenizingLimit
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, chat, completion, connected, error_of, read_response, request
from tests.text.made import RENDERER, byte_level

MOST = 16 * 2**20  # bytes of a body
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "14"}
DEEP = '{"a":' * 40 + "1" + "}" * 40
DEEPER = '{"a":' * 100_000 + "1" + "}" * 100_000
MANY = {  # more than a body may hold
    "the body has more than 100000 values": {"user": [["a"] * 16_000] * 7},
    "the body has more than 16384 lists and objects": {"user": [[[]]] * 9_000},
}
MANY_KEYS = "an object has more than 16384 keys"
PRIVATE = "".join(map(chr, range(0xF0000, 0xFFFFE)))
CROWDED = "the bodies of other requests fill the memory for them; try again later"


def picture(url: str) -> dict[str, Any]:
    return USER | {"content": [{"type": "image_url", "image_url": {"url": url}}]}


def talk(*messages: object, **fields: object) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


# The fields of a request. Each is sent to both routes, or to the one that is named.
FIELDS: list[tuple[dict[str, object], str]] = [
    ({"temprature": 1}, "unknown parameter: temprature; leave it out"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"max_tokens": "5"}, "max_tokens must be a whole number from 1 to 2147483647, not '5'"),
    ({"temperature": "1"}, "temperature must be a finite number from 0 to 100, not '1'"),
    ({"model": 5}, "model must be a string"),
    ({"stop": 5}, "stop must be a list of 0 to 64 strings, not 5"),
    ({"stop": [5]}, "stop must be a string of 1 to 4096 characters, not 5"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, not [1]"),
    ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers; 'a' is not a token id"),
    ({"logit_bias": {"99999": 1}}, "logit_bias names token 99999; this model's tokens are 0 to 2047"),
    ({"stop_token_ids": [99999]}, "stop_token_ids names token 99999; this model's tokens are 0 to 2047"),
    ({"logit_bias": {"1": 101}}, "logit_bias must be a finite number from -100 to 100, not 101"),
    ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483647, not 0"),
    (
        {"prompt_cache_retention": "24h", "cache_ttl": 60},
        "cache_ttl and prompt_cache_retention differ; send one of them",
    ),
    ({"cache_pin": True}, "this server does not allow cache_pin; leave it out"),
    ({"cache_priority": 1}, "this server does not allow a cache_priority above 0; leave it out"),
    ({"shift": 1}, "shift must be true or false, not 1"),
    ({"top_p": 0}, "top_p must be a finite number above 0 to 1, not 0"),
    ({"n": 3, "best_of": 4}, "best_of is 4, which is not supported; leave it out, or send n, which is 3"),
    ({"n": 129}, "n must be a whole number from 1 to 128, not 129"),
    ({"stop": ""}, "stop must be a string of 1 to 4096 characters, not ''"),
    ({"stop": ["a"] * 65}, "stop must be a list of 0 to 64 strings, not of 65"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is more than max_tokens 4"),
    ({"stream_options": {}}, "stream_options needs stream to be true"),
    ({"stream_options": 5}, "stream_options must be an object"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation must be false",
    ),
    ({"suffix": "x"}, 'suffix is not supported; leave it out, or send null or ""'),
    (
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs needs stream to be false; echo has them in a stream",
    ),
    ({"guided_json": {}}, "guided_json is not supported; leave it out, or send null"),
    ({"response_format": {}}, "response_format.type must be one of text, json_object, json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format.json_schema.name must be a string",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": 5, "schema": {}}}},
        "response_format.json_schema.strict must be true or false",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is required"),
    (
        {"response_format": {"type": "json_object", "schema": {"x-guidance": {}}}},
        "response_format: a schema cannot have x-guidance; remove it",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {"not": {}}}},
        'response_format: this json_schema cannot be honoured: Unimplemented keys: ["not"]',
    ),
    ({"grammar": "a", "json_schema": {}}, "grammar and json_schema both say what the answer has to match; send one"),
    (
        {"structured_outputs": {"structural_tag": "a"}},
        "structured_outputs.structural_tag is not supported; leave it out",
    ),
    (
        {"structured_outputs": {"regex": "a", "grammar": "a"}},
        "structured_outputs has regex and grammar; send one of them",
    ),
    (
        {"structured_outputs": {"json": 5}},
        "structured_outputs.json must be a schema, as an object or as JSON text",
    ),
    (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format has an unknown key 'schema'; it may have type",
    ),
    (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos cannot be combined with a constraint, which says where an answer ends",
    ),
    ({"bad_words_ids": [[1]] * 4097}, "bad_words_ids must be a list of 0 to 4096 lists of token ids, not of 4097"),
    ({"bad_words_ids": [[]]}, "bad_words_ids must be a list of 1 to 64 token ids, not of 0"),
    ({"bad_words_ids": [[-1]]}, "bad_words_ids must be a whole number from 0 to 2147483647, not -1"),
    (
        {"sequence_bias": [[[1]]]},
        "sequence_bias must be a pair: a list of token ids and a number",
    ),
    ({"sequence_bias": [[[1], True]]}, "sequence_bias must be a finite number from -10000 to 10000, not true"),
    (
        {"exponential_decay_length_penalty": [5]},
        "exponential_decay_length_penalty must be a pair: a number of tokens and a factor",
    ),
    ({"stop_token_ids": [1] * 4097}, "stop_token_ids must be a list of 0 to 4096 token ids, not of 4097"),
    ({"logit_bias": {str(n): 1 for n in range(16_384)} | {"16384": 1}}, MANY_KEYS),
    ({"stop": ["a"] * 20_000}, "stop has a list of more than 16384 items"),
    ({"model": "gpt-4"}, "model 'gpt-4' not found; /v1/models lists what is served here"),
]

PROMPT = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; none of them empty"
PROMPTS: list[tuple[dict[str, object], str]] = [
    ({}, "prompt is required"),
    ({"prompt": 5}, PROMPT),
    ({"prompt": [[]]}, PROMPT),
    ({"prompt": ["a"] * 257}, "prompt has 257 items; at most 256 are allowed in one request"),
    ({"prompt": [5, 2048]}, "prompt: 2048 is not a token id of this model, whose ids are 0 to 2047"),
    (
        {"prompt": [5] * 20_000},
        "the prompt has at least 20000 tokens; the model's context allows 256. Shorten the prompt",
    ),
    (
        {"prompt": ["a"] * 256, "n": 100},
        "256 prompts with n 100 are too many; at most 4096 completions of one request are allowed",
    ),
    ({"prompt": [5] * 300}, "the prompt has 300 tokens; the model's context allows 256. Shorten the prompt"),
]

PICTURE = "messages[0].content[0].image_url"
BLIND = "embedded takes no images: its network reads text only"
CONTENT = "content is required: a string, or a list of parts that is not empty"
BESIDE = "It may be null or absent with tool_calls, function_call, reasoning_content or refusal"
MESSAGES: list[tuple[dict[str, object], str]] = [
    ({}, "messages is required"),
    (talk(), "messages must not be empty"),
    (talk(*[USER] * 4097), "messages must have at most 4096 items"),
    (talk("hi"), "messages[0] must be an object"),
    (
        talk({"role": "wizard", "content": "hi"}),
        'messages[0].role must be "system", "developer", "user", "assistant", "tool" or "function"',
    ),
    (talk({"role": "user"}), f"messages[0].{CONTENT}"),
    (talk({"role": "assistant"}), f"messages[0].{CONTENT}. {BESIDE}"),
    (talk(USER | {"content": [{"type": "image_url"}]}), "messages[0].content[0].image_url is required"),
    (
        talk(USER | {"content": [{"type": "input_audio", "input_audio": {}}]}),
        "messages[0].content[0].type must be of text or an image: there is no encoder here for audio; send its "
        "words as text",
    ),
    (talk(picture("data:;base64,QQ==")), f"{PICTURE}: {BLIND}"),
    (talk(USER | {"audio": {}}), "messages[0].audio must be null"),
    (
        talk({"role": "assistant", "content": "a", "refusal": "b"}),
        "messages[0] has both content and refusal; send one of them",
    ),
    (
        talk(CALLING | {"function_call": {"name": "f"}}),
        "messages[0] has both tool_calls and function_call; send one of them",
    ),
    (
        talk(USER | {"tool_calls": [CALL]}),
        "messages[0].tool_calls: only messages of the role assistant have tool calls",
    ),
    (
        talk(CALLING | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": [1]}}]}),
        "messages[0].tool_calls[0].function.arguments must be a string that holds a JSON object, or an object",
    ),
    (talk(USER, RESULT), "messages[1] is the result of a tool call, but no message before it has tool_calls"),
    (
        talk(CALLING, RESULT | {"tool_call_id": "c2"}),
        "messages[1].tool_call_id is not the id of a call in the tool_calls of a message before it",
    ),
    (
        talk(CALLING | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": json.loads(DEEP)}}]}),
        f"messages[0].tool_calls[0].function.arguments{'.a' * 29} is nested more than 32 deep",
    ),
    (
        talk(CALLING | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": DEEPER}}]}),
        "messages[0].tool_calls[0].function.arguments is nested too deep",
    ),
    (talk(*[USER | {"content": "x" * 2**21}] * 5), "messages: more than 1048576 characters together"),
    (
        talk(USER | {"content": "<|bos|>" * 100_001}),
        "messages has more than 100000 pieces of text that read like control tokens",
    ),
    (
        talk(USER | {"content": PRIVATE}),
        "messages has every character of a plane for private use; leave some of them out",
    ),
    (talk(USER, logprobs=1), "logprobs must be true or false"),
    (talk(USER, top_logprobs=1), "top_logprobs needs logprobs to be true"),
    (talk(USER, top_logprobs=21, logprobs=True), "top_logprobs must be at most 20"),
    (talk(USER, top_logprobs=-1, logprobs=True), "top_logprobs must be at least 0"),
    (
        talk(USER, max_completion_tokens=4, max_tokens=5),
        "max_completion_tokens and max_tokens differ; send one of them",
    ),
    (talk(USER, shift=True), "shift needs max_tokens: with it, the context does not end a completion"),
    (
        talk(USER, reasoning={"effort": "low"}, reasoning_effort="high"),
        "reasoning_effort and reasoning.effort differ; send one of them",
    ),
    (
        talk(USER, chat_template_kwargs={"tools": []}),
        "chat_template_kwargs.tools cannot be set: the template gets it from the server",
    ),
    (talk(USER, continue_final_message=True), "messages[0] cannot be continued: its role is not assistant"),
    (
        talk(USER, CALLING, continue_final_message=True),
        "messages[1] cannot be continued: it has calls of tools; send their results behind it",
    ),
    (
        talk(USER | {"prefix": True}, USER),
        "messages[0].prefix must not be true: only the last message can be continued",
    ),
    (
        talk(USER, {"role": "assistant", "content": "a", "prefix": True}, add_generation_prompt=True),
        "add_generation_prompt must not be true where the last message is continued",
    ),
]

NAMED_TOOL = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "tools": [NAMED_TOOL]}
TOOL_CHOICES: list[tuple[object, str]] = [
    ("any", 'tool_choice must be "none", "auto", "required", the name of a function, or allowed_tools'),
    ({"type": "function"}, "tool_choice must have the name of a function"),
    (ALLOWED | {"tools": [NAMED_TOOL] * 513}, "tool_choice.tools may have 512 functions"),
    (ALLOWED | {"allowed_tools": 1}, "tool_choice.allowed_tools must be an object with mode and tools"),
    (ALLOWED | {"tools": []}, "tool_choice.tools must be a list of functions that is not empty"),
    (ALLOWED | {"mode": "none"}, 'tool_choice.mode must be "auto" or "required"'),
    (ALLOWED | {"tools": [{"type": "mcp"}]}, "tool_choice.tools[0].type must be \"function\", not 'mcp'"),
]

RESPONSES = "/v1/responses"
GONE = "there is no such response: it was not stored, or was deleted or dropped since"
NO_CONVERSATION = "send previous_response_id, or use /v1/chat/completions"
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
INPUTS: list[tuple[dict[str, object], str]] = [
    ({"input": 5}, "input must be a string, or a list of items that is not empty"),
    ({"input": [USER] * 4097}, "input has 4097 items; at most 4096 are allowed"),
    ({"input": ["hi"]}, "input[0] must be an object"),
    ({"input": [{"type": "reasoning"}]}, "input must have an item that is not reasoning without a text"),
    (
        {"input": [{"type": "x"}]},
        "input[0].type is 'x', which is not supported; message, function_call, function_call_output and reasoning are",
    ),
    ({"input": [{"role": "tool"}]}, "input[0].role must be one of user, assistant, system, developer"),
    ({"input": [USER | {"content": 5}]}, "input[0].content must be a string, or a list of parts"),
    (
        {"input": [USER | {"content": [{"type": "input_video"}]}]},
        "input[0].content[0].type must be one of input_text, output_text, text, refusal, input_image: there is no "
        "encoder here for video; send single frames as images",
    ),
    (
        {"input": [USER | {"content": [{"type": "input_image", "file_id": "x"}]}]},
        "input[0].content[0].file_id is not supported: this server keeps no files",
    ),
    ({"input": [OUTPUT | {"call_id": 5, "output": "x"}]}, "input[0].call_id must be a string"),
    ({"input": [USER, OUTPUT | {"output": "x"}]}, "input[1].call_id is 'c1', which no function_call before it has"),
    ({"input": "hi", "n": 2}, "n is 2; a response has one answer"),
    ({"input": "hi", "conversation": "x"}, f"conversation is not supported here; {NO_CONVERSATION}"),
    ({"input": "hi", "previous_response_id": "x"}, f"previous_response_id: {GONE}"),
    (
        {"input": "hi", "max_tokens": 4, "max_output_tokens": 5},
        "max_output_tokens and max_tokens differ; send one of them",
    ),
    ({"input": "hi", "include": ["x"]}, "include[0] is 'x', which is not supported"),
    ({"input": "hi", "top_logprobs": 3}, "top_logprobs needs include to have message.output_text.logprobs"),
    (
        {"input": "hi", "tools": [{"type": "mcp"}]},
        "tools[0].type is 'mcp', which is not supported; send functions",
    ),
    ({"input": "hi", "text": {"format": {}}}, "text.format.type must be one of text, json_object, json_schema"),
    (
        {"input": "hi", "text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
        "text.format and response_format both say what the answer has to match; send one",
    ),
]

BODIES: list[tuple[bytes, str]] = [
    (b"{", "Input data was truncated"),
    (b'{"a": x}', "invalid character (byte 6)"),
    (b"[]", "this is JSON, but no object"),
    (b"\xff", "invalid character (byte 0)"),
    (b'{"a": "\xff"}', "a string is not UTF-8"),
    (b"\xef\xbb\xbf{}", "it begins with a byte order mark"),
    (b'{"a": "\\ud800 b c"}', "unexpected end of escaped utf-16 surrogate pair (byte 13)"),
    (b"[" * 10_000, "it is nested too deeply"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "a number is out of range"),
    (b'{"a": 1, "a": 2}', "an object has a key twice"),
    (b'{"a": NaN}', "invalid character (byte 6)"),
]

CASES = [(route, fields | extra, message) for extra, message in FIELDS for route, fields in (
    (COMPLETIONS, completion() | {"model": "embedded"}), (CHAT, chat() | {"model": "embedded"}))
    if route == COMPLETIONS or "best_of" not in extra]  # fmt: skip
CASES += [(COMPLETIONS, body, message) for body, message in PROMPTS]
CASES += [(CHAT, body, message) for body, message in MESSAGES]
CASES += [(CHAT, talk(USER, tool_choice=choice), message) for choice, message in TOOL_CHOICES]
CASES += [(RESPONSES, body, message) for body, message in INPUTS]
INPUT = "input must be a string, a list of strings, a list of token ids, or a list of such lists; none of them empty"
CASES += [
    (CHAT, {"messages": [], "echo": True}, "echo is not supported; leave it out, or send null or false"),
    (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "conversation": "c"},
        "echo must not be true with conversation, which has its own prompt",
    ),
    ("/tokenize", {}, "exactly one of prompt, messages and content is needed"),
    ("/tokenize", {"prompt": "a", "tools": [NAMED_TOOL]}, "tools has no effect on prompt; leave it out"),
    ("/v1/embeddings", {"input": []}, INPUT),
    (
        "/v1/embeddings",
        {"input": ["a"] * 2049},
        "input has 2049 items; at most 2048 are allowed in one request",
    ),
    (
        "/v1/embeddings",
        {"input": "a"},
        "model does not do embeddings: its directory has no modules.json and no 1_Pooling/config.json, which say how "
        "hidden states are pooled",
    ),
]


def message_of(response: httpx.Response) -> str:
    """The message of an error, after a check of its style."""
    error = error_of(response)
    check_style(error["message"], error["param"])
    return error["message"]


STRANGE = re.compile(  # terms of the command line, of Python or of settings; persons
    r"--\w|`|kvcellar|\w\(\)|\w+=|\b(None|True|NoneType|dict|tuple|str|int|float|bool|pydantic|Python|Engine|"
    r"[nN]obody|[sS]omebody|[wW]hoever|we|us|our|told|please|sorry|oops)\b|\w+Error\b"
)
SETTINGS = {field.name for kind in (Settings, ServeSettings) for field in dataclasses.fields(kind)} - {"context"}


def check_style(message: str, param: str | None) -> None:
    assert message.isprintable()
    assert message == message.strip()
    assert not message.endswith((".", "!", ":"))
    assert len(message) < 300
    assert not STRANGE.search(message), STRANGE.search(message)
    assert not SETTINGS & set(re.findall(r"\w+", message)) - {"host", "port"}
    field = re.split(r"\W", param or "")[0]
    assert re.search(rf"\b{field}\b", message), f"{message!r} does not name {field}"


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    with Engine(context=256, cache_bytes=16_000_000, max_sequences=4, threads=1, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(real: Engine) -> Iterator[httpx.Client]:
    settings = ServeSettings(port=0, max_body_bytes=MOST)
    with Server(real, settings) as server, DeclaredClient(base_url=server.url, timeout=240) as client:
        yield client


@pytest.mark.parametrize(("route", "body", "message"), CASES, ids=count())
def test_invalid_fields(client: httpx.Client, route: str, body: dict[str, Any], message: str) -> None:
    response = client.post(route, json=body)
    assert message_of(response) == message
    assert 400 <= response.status_code < 500


@pytest.mark.parametrize(("body", "message"), BODIES, ids=count())
def test_bodies(client: httpx.Client, body: bytes, message: str) -> None:
    response = client.post(COMPLETIONS, content=body, headers=JSON)
    assert message_of(response) == f"the body must be a JSON object: {message}"


@pytest.mark.parametrize(("message", "body"), MANY.items())
def test_bodies_with_too_many_values(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    assert message_of(client.post(COMPLETIONS, json=body)) == message


HEADERS: list[tuple[dict[str, str], bytes, str]] = [
    ({}, b"{}", "the body must be JSON in UTF-8; send it with Content-Type: application/json"),
    (JSON | {"content-encoding": "gzip"}, b"", "Content-Encoding gzip is not supported; send the body uncompressed"),
    (JSON, b" " * (MOST + 1), "the body is longer than 16777216 bytes, which is the limit of this server"),
    ({"host": "other"}, b"", "the header Host does not name this server"),
    (
        {f"x-{n}": "" for n in range(100)},
        b"",
        "the headers are too many or too long; at most 100 headers of 65536 bytes together are allowed",
    ),
]


@pytest.mark.parametrize(("headers", "body", "message"), HEADERS, ids=count())
def test_headers(client: httpx.Client, headers: dict[str, str], body: bytes, message: str) -> None:
    assert message_of(client.post(COMPLETIONS, content=body, headers=headers)) == message


ROUTES = {
    "/nowhere": "there is no such route",
    CHAT: "this route does not have that method; the header Allow lists those that it has",
    "/v1/models/gpt-4": "model 'gpt-4' not found; /v1/models lists what is served here",
    f"{RESPONSES}/x": GONE,
    f"{RESPONSES}/x?stream=true": "stream is not supported here; leave it out",
}


@pytest.mark.parametrize(("path", "message"), ROUTES.items(), ids=count())
def test_routes(client: httpx.Client, path: str, message: str) -> None:
    assert message_of(client.get(path)) == message


CONVERSATIONS = "/kvcellar/conversations"
TURN = {"model": "embedded", "max_tokens": 1, "conversation": "chat"}
NAMED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "POST",
        CONVERSATIONS,
        {"name": "a/b"},
        "a conversation must have a name of 1 to 128 letters, digits, dots, hyphens and underscores that begins with a "
        "letter or digit, not 'a/b'",
    ),
    ("POST", CONVERSATIONS, {"name": "chat"}, "there is a conversation chat already; nothing was saved"),
    (
        "POST",
        CONVERSATIONS,
        {"name": "b", "messages": [], "prompt": "x"},
        "prompt cannot be sent with messages; send one of them",
    ),
    (
        "POST",
        CONVERSATIONS,
        {"name": "b", "prompt": ["x"]},
        "prompt of a conversation must be one string or one list of token ids",
    ),
    ("POST", CONVERSATIONS, {"name": "b", "prompt": [10**6]}, "the model has no token 1000000 of prompt"),
    ("POST", CONVERSATIONS, {}, "name is required"),
    (
        "GET",
        f"{CONVERSATIONS}/nothing",
        {},
        "there is no conversation nothing; save one under that name first",
    ),
    ("POST", f"{CONVERSATIONS}/chat/fork", {}, "to is required"),
    ("POST", f"{CONVERSATIONS}/chat/rewind", {"turns": 3}, "3 turns cannot be discarded; there are 0"),
    (
        "POST",
        CHAT,
        chat() | TURN | {"n": 2},
        "n is 2; a turn of a conversation has one completion. Fork the conversation",
    ),
    (
        "POST",
        CHAT,
        talk(USER, {"role": "assistant", "content": "a", "prefix": True}) | TURN,
        "a turn of a conversation cannot continue a message: send a message of the user",
    ),
    (
        "POST",
        CHAT,
        chat() | TURN | {"conversation": "text"},
        "the conversation text is a text; continue it with /v1/completions",
    ),
    (
        "POST",
        COMPLETIONS,
        completion() | TURN,
        "the conversation chat is a chat; continue it with /v1/chat/completions",
    ),
    (
        "POST",
        CHAT,
        chat() | TURN | {"add_generation_prompt": False},
        "add_generation_prompt must not be false with conversation",
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "message"), NAMED, ids=count())
def test_conversations(client: httpx.Client, method: str, path: str, body: dict[str, Any], message: str) -> None:
    for name, given in (("chat", {}), ("text", {"prompt": [5]})):
        client.post(CONVERSATIONS, json={"name": name, **given})
    response = client.request(method, path, json=body)
    assert message_of(response) == message
    assert 400 <= response.status_code < 500


BUSY = "1000000 requests are waiting already; try again later"
LARGE_PROMPT = "a prompt of 200 tokens with n 1 takes SIZE bytes; 1000 are for prompts. Shorten the prompt, or lower n"
PROMPTS_FULL = "other prompts take 1000 of 1000 bytes for prompts; try again later"
PADDING = (
    "prompt has token 5 at 0, which is padding: this model does not count it as a position, so it cannot be part of a "
    "text. Leave it out"
)


def test_limits_of_memory_and_queue(client: httpx.Client, real: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": [5] * 200}
    card, group = real._client.card, real._built.memory.storage.groups[0].name
    small, padded = dataclasses.replace(card, cells={group: 100}), dataclasses.replace(card, padding=5)
    held = f"the prompt has 200 tokens; the memory for {group} layers allows 100. Shorten the prompt"
    for changed, message in ((small, held), (padded, PADDING)):
        with monkeypatch.context() as patch:
            patch.setattr(real._client, "card", changed)
            assert message_of(client.post(COMPLETIONS, json=body)) == message
    memory = PromptMemory(1000)
    with monkeypatch.context() as patch:
        intake = dataclasses.replace(real._built.intake, prompts=memory)
        patch.setattr(real._client, "built", dataclasses.replace(real._built, intake=intake))
        assert re.fullmatch(LARGE_PROMPT.replace("SIZE", r"\d+"), message_of(client.post(COMPLETIONS, json=body)))
        memory.taken = 1000
        assert message_of(client.post(COMPLETIONS, json={"prompt": [5]})) == PROMPTS_FULL
    monkeypatch.setattr(type(real._loop), "backlog", 10**6)
    assert message_of(client.post(COMPLETIONS, json=body)) == BUSY


LONG_TEXT = "prompt has 11 bytes of text; at most 10 are tokenized at once. Send less, or token ids"
SLOW_TEXT = "prompt has a text of 11 bytes that the model's tokenizer does not tokenize within 0 seconds. Send less, "
SLOW_TEXT += "or token ids"
SLOW_TEXTS = "the tokenizer of the model is busy with texts that take very long; try again later"
NO_TEXT = "this model has no tokenizer; send a prompt of token ids instead of text"
NO_STOP = "stop strings need a tokenizer, and this model has none; use stop_token_ids"


def test_models_without_text(client: httpx.Client, real: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the file /a/secret/place is not there"
    mute = TextCodec(TextCard(assets=None, why_not=why, context=256, text_bytes=2**20))
    monkeypatch.setattr(real, "_codec", mute)
    monkeypatch.setattr(real, "_requests", RequestBuilder(real._client, mute))
    monkeypatch.setattr(real, "model", dataclasses.replace(real.model, has_text=False))
    assert message_of(client.post(COMPLETIONS, json={"prompt": "hi"})) == NO_TEXT
    assert message_of(client.post(CHAT, json=talk(USER))) == f"messages: {NO_TEXT}"
    assert message_of(client.post(COMPLETIONS, json={"prompt": [5], "stop": "x"})) == NO_STOP


def test_a_text_that_is_too_long_to_tokenize(
    client: httpx.Client, real: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real._codec._tokenizer, "limit", TokenizingLimit(10))
    assert message_of(client.post(COMPLETIONS, json={"prompt": "x" * 11})) == LONG_TEXT


def test_texts_that_take_too_long_to_tokenize(
    client: httpx.Client, real: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    limit = TokenizingLimit(100)
    monkeypatch.setattr(real._codec._tokenizer, "limit", limit)
    monkeypatch.setattr(limit, "result", lambda size, param, _work: TokenizingLimit.result(
        limit, size, param, lambda: end.wait(300), 0.0
    ))  # fmt: skip
    try:
        for _ in range(SHORTS):
            assert message_of(client.post(COMPLETIONS, json={"prompt": "x" * 11})) == SLOW_TEXT
        assert message_of(client.post(COMPLETIONS, json={"prompt": "x" * 11})) == SLOW_TEXTS
    finally:
        end.set()


TEMPLATES = {  # the last part comes from the template or from Jinja
    "": "this model has no chat template; send a prompt instead of messages",
    "{{ raise_exception('Roles must alternate') }}": "the chat template refused these messages: Roles must alternate",
    "{{ messages[0].content * 10 ** 9 }}": "the chat template was stopped: it needed too much memory or stack. Send "
    "shorter messages",
    "{{ 1 / 0 }}": "the chat template failed on these messages: division by zero",
}


@pytest.mark.parametrize(("source", "message"), TEMPLATES.items(), ids=count())
def test_templates(
    client: httpx.Client, real: Engine, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    template = ChatTemplate(source, TextTokenizer(byte_level()), RENDERER) if source else None
    monkeypatch.setattr(real._codec, "_template", template)
    assert message_of(client.post(CHAT, json=talk(USER))) == message


FAILURES = [
    (CacheFull("a", 5, 4), "the memory for keys and values is full; try again later"),
    (EngineClosed("closed"), "the server is shutting down; try again later"),
    (EngineFailed("a secret"), "the server met an unexpected error; its log has the details"),
    (NotSupported("this cannot be done"), "this cannot be done"),
    (
        ConversationUnreadable("the conversation a cannot be read: its head was changed"),
        "the conversation a cannot be read: its head was changed; delete it, or try again",
    ),
    (
        ConversationNotSaved("the conversation a cannot be saved: Input/output error"),
        "the conversation a cannot be saved: Input/output error; try again later",
    ),
]


@pytest.mark.parametrize(("error", "message"), FAILURES, ids=[type(error).__name__ for error, _ in FAILURES])
def test_failures(http: httpx.Client, engine: FakeEngine, error: Exception, message: str) -> None:
    with engine.scripted(reject=error):
        assert message_of(http.post(COMPLETIONS, json=completion())) == message


STOPPED = "the engine has stopped; the server must be started again"
KEY = "a valid API key is needed: Authorization: Bearer KEY"
ADMIN_KEY = "a valid admin key is needed: Authorization: Bearer KEY"


def test_health_and_keys(http: httpx.Client, shared_engine: FakeEngine, engine: FakeEngine) -> None:
    engine.healthy = False
    assert http.get("/health").json()["error"]["message"] == message_of(http.get("/live")) == STOPPED
    keys = {"key_digests": (key_digest("good"),), "admin_digests": (key_digest("better"),)}
    with Server(shared_engine, ServeSettings(port=0, **keys)) as server:
        assert message_of(httpx.get(f"{server.url}/v1/models")) == KEY
        assert message_of(httpx.get(f"{server.url}/admin/requests")) == ADMIN_KEY


def test_bodies_over_the_budget() -> None:
    with pytest.raises(ApiError) as refused:
        BodyBudget(10).reserve(11)
    assert (refused.value.status, refused.value.message) == (503, CROWDED)


SENT = {  # bytes on a connection
    b"hello\r\n\r\n": "this is not a valid HTTP request",
    b"GET /health HTTP/1.1\r\n": "a whole request did not arrive within 1.5 seconds",
    request(COMPLETIONS, completion())[:-5]: "the body did not arrive within 1.5 seconds",
}
FULL = "1 connections are open already; try again later"


def test_connections(shared_engine: FakeEngine, engine: FakeEngine) -> None:
    settings = ServeSettings(port=0, max_connections=1, header_seconds=1.5, body_seconds=1.5)
    with Server(shared_engine, settings) as server:
        for sent, message in SENT.items():
            with connected(server) as wire:
                wire.sendall(sent)
                assert json.loads(read_response(wire)[1])["error"]["message"] == message
        with connected(server) as first, connected(server) as second:
            assert json.loads(read_response(first)[1])["error"]["message"] == FULL
            second.sendall(request("/health"))
            assert read_response(second)[0] == 200


# The code has no message that is not here.

ROOT = Path(__file__).parents[2] / "src" / "kvcellar"
SERVE = {*(ROOT / "serve").rglob("*.py")} - {*(ROOT / "serve" / "anthropic").glob("*.py")}
NO_SOURCES = ("serve/settings.py", "serve/http/server.py", "serve/http/keys.py")
ENGINE = ("arguments", "core/intake", "load/allocate", "load/build")
FRONTEND = ("chat_images", "engine", "process_client", "remote_client", "request_builder", "text_codec")
SOURCES = [
    *sorted(SERVE - {ROOT / name for name in NO_SOURCES}),
    *((ROOT / "text" / f"{name}.py") for name in ("calls", "conversation", "template", "tokens")),
    *((ROOT / "engine" / f"{name}.py") for name in ENGINE),
    *((ROOT / "frontend" / f"{name}.py") for name in FRONTEND),
    ROOT / "sampling_params.py",
    ROOT / "values.py",
]
RAISED = {"BadRequest": 0, "TemplateFailed": 0, "Overloaded": 0, "ApiError": 1}  # where the message is
RAISED |= {"invalid": 1, "unsupported": 1}  # of serve/http/api_errors.py
HANDED_ON = {"message", "why"}  # parameter names for messages that a function forwards

ELSEWHERE = {  # messages that an HTTP client cannot get, and the reason
    "the response {}: the store of the server has failed; try again later": "test_archived_responses.py",
    "tier must be {}": "for an operator: test_admin_cache.py",
    "the body must be an archive; send it with Content-Type: {}": "likewise",
    "the stream was not read in time: {} events were waiting": "for a client that does not read: test_connection.py",
    "the model {} cannot be loaded now; the log of the server has the reason": "several models: test_host.py",
    "the model {} is damaged or cannot be loaded here; the log of the server has the reason": "test_ollama.py",
    "the model {} is not loaded; send it a request first": "likewise",
    "the model {} needs {} bytes, and this server has {} bytes for at most {} models{}": "likewise",
    "other models have used the memory for this one for {}; try again later": "likewise",
    "{} requests are waiting for models; try again later": "likewise",
    "a model and an adapter both have the name {}; rename one": "start: test_several_models.py",
    "this server has no admin key, so its models cannot be changed by requests": "for an operator: test_ollama.py",
    "metrics are sums over all API keys, so none of several may read them: send a metrics key": "test_metrics.py",
    "the chat template does not write the text of the message that is continued": "tests/text/test_template.py",
    "the name of an adapter has 1 to {} characters, not {}": "a program: tests/engine/test_adapters.py",
    "an adapter is a directory, or a list of some that are added up, not {}": "likewise",
    **dict.fromkeys(
        (
            "choice max_tokens is {} cannot have produced these {} tokens: {}",
            "choice with the prompt there are {} tokens, in a context of {} cannot have produced these {} tokens: {}",
            "choice its tokens do not match {}: {} cannot have produced these {} tokens: {}",
            "choice the choices of this request are 0 to {}, each named once at most cannot have produced these {} "
            "tokens: {}",
            "choice it has ended with {} tokens cannot have produced these {} tokens: {}",
            "choice token {} is in no text of this request cannot have produced these {} tokens: {}",
        ),
        "what a front end sends to an engine that goes on: tests/engine/test_going_on.py",
    ),
    "an engine in a process of its own loads a directory or a name, not a network": "a program: "
    "tests/engine/test_engine_process.py",
    "an engine in a process of its own makes its drafter by name, not by a function": "likewise",
    "order must be asc or desc, not {}": "the items of a kept response: test_responses_api.py",
    "limit must be a number from 1 to {}, not {}": "likewise",
    "after is {}, which is no id of these items": "likewise",
    "model is required": "test_ollama.py",
    "system needs a chat template, and this model has none; put it into prompt": "test_ollama_generate.py",
    'format must be "json" or a JSON schema': "likewise",
    "think must be true, false, or one of {}": "likewise",
    "either from is required, the name of a model, or files that were uploaded": "likewise",
    "this server was given its keys when it was made; make another one to change them": "in the log: test_key_ring.py",
    "the server {} {} key; start it again for that": "likewise",
    "web pages cannot upload files to this server": "test_uploads.py",
    "the role of a message must be system, user or assistant": "likewise",
    "the model {} is not in the library of this server": "likewise",
    "this server has no library of models": "likewise: it needs a machine without a home directory",
    "this server cannot create models": "likewise: it needs a server in Python without tools",
    "this server does not download models": "likewise",
    "models cannot be pushed from this server": "likewise",
    "two models have the name {}; give one of them another": "start",
    "there is no sampling parameter {}; there are {}": "Python: over HTTP it is an unknown parameter",
    "there is no option {} of a request; there are {}": "Python",
    "text is a string, not {}": "Python",
    "a namespace is a text of up to {} characters, not {}": "Python: over HTTP it is a digest",
    "a namespace cannot begin with {}: such names are for what adapters and towers compute": "Python: over HTTP "
    "it is a digest",
    "params is SamplingParams(...), not {}": "Python",
    "{} is Constraint(...), not {}": "Python",
    "retention is RetentionOptions(...), not {}": "Python",
    "deliver is called with every event, and {} cannot be": "Python",
    "a prompt of {} tokens cannot be pinned beside {} tokens that are; shorten it, pin fewer, or raise pin_share or "
    "cache_bytes": "Python",
    "the prompt has a length of {}, and {} tokens": "Python",
    "special is True, False or None, not {}": "Python",
    "variables of a template are given by name, not as {}": "Python",
    "effort is a word, not {}": "Python",
    "the prompt is empty; at least one character is needed": "Python: over HTTP the prompt was looked at before",
    "the prompt is empty; at least one token is needed": "Python: likewise",
    "{} are positions 0 to {}, in order, not {}": "Python",
    "this model has no attention layers, so there are no keys and values to store": "start",
    "host_bytes is {} of the {} bytes of {}": "start",
    "draft_bytes is {} of the {} bytes of {}": "start",
    "draft_bytes is set, but what drafts has no memory of its own; leave it out": "start",
    "dtype is {}, but the network that was given is in {}": "start",
    "device is {}, but the network that was given is on {}": "start",
    "context is {}; this model is {}": "start",
    "{} has {} entries; {} are allowed": "Python: over HTTP an object has no more keys",
    "threads is {}, but torch belongs to {}, and runs in one thread here. Leave threads out, or start the process with "
    "spawn instead of fork": "start",
    "messages must be a list, not {}": "Python: over HTTP the type was looked at before, as in all these",
    "messages has {} items; 1 to {} are allowed": "Python",
    "{} must be an object with role and content, not {}": "Python",
    "{}.role must be one of {}": "Python",
    "{}.content must be a string or a list of text and image parts": "Python",
    "{}.content is required, and must not be an empty list": "Python",
    "{}.type must be text or image; audio, video and files are not supported": "Python",
    "{}.{} must be a string": "Python",
    "{}.tool_calls must be a list": "Python",
    "{}.function must be an object with name and arguments": "Python",
    "{} must be JSON, not {}": "Python",
    "the keys of {} must be strings, not {}": "Python",
    "{} is not Unicode text: half of a surrogate pair at character {}": "Python: over HTTP the body is refused",
    "{} is not a token id; they are 0 to {}": "Python: no route decodes ids of a client",
    "an image has {} tokens, which see each other, and a step at most {}. Send a smaller one, or raise step_tokens": (
        "a model that takes images"
    ),
    "this model takes one image, in front of a text": "a model that takes images: tests/images/test_prompt_images.py",
    "the prompt has {} tokens, which see each other, so that a step has to have all of them, in windows: {} at most. "
    "Send a shorter one": "likewise: tests/images/test_whole_prompts.py",
    "tokens of a prompt see those behind them: they have no log-probabilities": "likewise",
    "a system message needs a chat, and a model with a chat template": "Python: tests/engine/test_sessions.py",
    "image_bytes is {} of the {} bytes of {}": "start",
    "images need a chat template; send them without raw, to a model that has one": "a model that sees: test_images.py",
    "the chat template writes {} images, and the messages have {}": "likewise: tests/text/test_images.py",
    "prompt has rows of images: {}": "likewise: tests/engine/test_chat_images.py",
    "prompt has rows of images that are not known; send the images in messages": "likewise",
    "the images of the prompt take {} bytes as the model gets them; {} are for prompts. Send fewer, or smaller ones": (
        "tests/engine/test_texts.py"
    ),
    "the messages have {} images; {} are allowed. Leave out the first ones": "tests/engine/test_chat_images.py",
    "the images of a prompt have {} bytes as the model gets them; {} are allowed. Send fewer, or smaller ones": (
        "likewise"
    ),
}


HERE = {
    *(message for cases in (CASES, BODIES, HEADERS, FAILURES, NAMED) for *_, message in cases),
    *(f"the body must be a JSON object: {message}" for _, message in BODIES),
    *(message for cases in (ROUTES, TEMPLATES, SENT) for message in cases.values()),
    *MANY,
    *(
        CROWDED,
        BUSY,
        LARGE_PROMPT,
        PROMPTS_FULL,
        PADDING,
        LONG_TEXT,
        SLOW_TEXT,
        SLOW_TEXTS,
        NO_TEXT,
        NO_STOP,
        STOPPED,
        KEY,
        ADMIN_KEY,
        FULL,
    ),
}


@pytest.mark.parametrize(
    "message",
    [
        CROWDED,
        BUSY,
        PADDING,
        LONG_TEXT,
        SLOW_TEXT,
        SLOW_TEXTS,
        NO_TEXT,
        NO_STOP,
        STOPPED,
        KEY,
        ADMIN_KEY,
        FULL,
        *SENT.values(),
    ],
)
def test_other_messages_follow_the_style(message: str) -> None:
    """The style of all others is checked in `message_of`."""
    check_style(message, None)


def test_every_message_in_the_code_is_here() -> None:
    sites = {pattern: where for path in SOURCES for pattern, where in messages_of(path)}
    assert len(sites) > 60
    missing = [
        f"{where}: {shown(pattern)}"
        for pattern, where in sites.items()
        if shown(pattern) not in ELSEWHERE and not any(re.fullmatch(pattern, message) for message in HERE)
    ]
    assert not missing, "provoke each of these in this file:\n" + "\n".join(missing)
    stale = ELSEWHERE.keys() - set(map(shown, sites))
    assert not stale, f"no longer in the code: {stale}"


def shown(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern.replace("(.+)", "{}"))


def messages_of(path: Path) -> Iterator[tuple[str, str]]:
    """Each message that a file raises, as a pattern, with its place. Functions that forward messages are followed."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    owner = {id(inner): function for function in functions for inner in ast.walk(function)}  # the innermost is last
    raised: dict[str, tuple[int, str]] = {name: (at, "(.+)") for name, at in RAISED.items()}
    for function in functions:
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            given = [a.arg for a in function.args.args]
            if name in RAISED and len(call.args) > RAISED[name] and HANDED_ON & {*given}:
                handed = next(arg for arg in given if arg in HANDED_ON)
                if handed in {n.id for n in ast.walk(call.args[RAISED[name]]) if isinstance(n, ast.Name)}:
                    (around,) = patterns(call.args[RAISED[name]], function)
                    raised[function.name] = (given.index(handed), around)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        inside = owner.get(id(call))
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in raised or len(call.args) <= raised[name][0] or (inside and inside.name in raised):
            continue
        at, around = raised[name]
        for pattern in patterns(call.args[at], inside):
            if pattern != "(.+)":  # the message of another error, forwarded
                yield around.replace("(.+)", pattern, 1), f"{path.name}:{call.lineno}"


def patterns(message: ast.expr, function: ast.FunctionDef | None) -> list[str]:
    match message:
        case ast.Constant(value=str(text)):
            return [re.escape(text)]
        case ast.JoinedStr(values=parts):
            return ["".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else "(.+)" for p in parts)]
        case ast.Name(id=name) if function is not None:
            return list(assigned(name, function)) or ["(.+)"]
        case _:
            return ["(.+)"]


def assigned(name: str, function: ast.FunctionDef) -> Iterator[str]:
    """The values assigned to a variable that is raised as a message."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                yield from patterns(value, None)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=True):
                    if isinstance(target, ast.Name) and target.id == name:
                        yield from patterns(value, None)


def test_the_search_finds_all_forms_of_messages(tmp_path: Path) -> None:
    source = tmp_path / "some.py"
    source.write_text(
        'def f(x):\n    raise BadRequest("one", "x")\n'
        'def g(x):\n    message = f"two {x}"\n    raise ApiError(400, message)\n'
        'def _wrong(why):\n    return BadRequest(f"it is wrong: {why}")\n'
        'def h():\n    raise _wrong("three")\n'
        'def i(e):\n    a, hint = "four", "b"\n    raise BadRequest(a, hint=hint)\n'
        "def j(e):\n    raise ApiError(400, e.message)\n"
    )
    assert [shown(pattern) for pattern, _ in messages_of(source)] == ["one", "two {}", "it is wrong: three", "four"]


CHECKS: dict[str, Callable[[], None]] = {
    "an option": lambda: check_style("use --port", None),
    "a setting": lambda: check_style("raise cache_bytes", None),
    "Python": lambda: check_style("n must not be None", "n"),
    "a call": lambda: check_style("use Engine.render()", None),
    "no field": lambda: check_style("this is wrong", "n"),
    "a full stop": lambda: check_style("leave it out.", None),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_style_is_checked(check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        check()
