"""Faults 30 to 43: messages, tools, formats, templates, media, names, and what is kept."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.sample.hostile import LARK
from tests.serve.every_api import CONVERSATIONS, USER
from tests.serve.faults.case import CHATS, FIELDS, MODEL, OLLAMA, Case, Fault, put, sent, valid, values

TEXTS = "tests/text"
SAID = {"role": "assistant", "content": "ho"}


def chats(
    messages: Any, status: int | tuple[int, ...] = 400, names: str = "", only: tuple[str, ...] = CHATS
) -> Iterator[Case]:
    """The messages, to each API that has some."""
    for api in only:
        yield sent(api, put(valid(api), FIELDS["messages"][api], messages), status, names or FIELDS["messages"][api])


def wrong_messages() -> Iterator[Case]:
    for messages in ([None], ["hi"], 5, {}, [USER] * 4097):
        yield from chats(messages)
    yield from (sent(api, put(valid(api), FIELDS["messages"][api], [USER] * 100_000), 413) for api in CHATS)
    yield from chats([], only=("chat", "responses", "messages", "count", "tokenize"))
    yield from chats([], 200, only=("ollama chat",))  # loads the model
    yield from chats([{}], names="role", only=("chat", "messages", "count", "ollama chat", "tokenize"))
    yield from chats([{"role": "wizard", "content": "hi"}], names="role")
    yield from chats([{"role": "User", "content": "hi"}], names="role")
    yield from chats([{"role": "user", "content": 5}], names="content")
    yield from chats([{"role": "user"}], names="content", only=("chat", "responses", "messages", "count", "tokenize"))
    yield from chats([{"role": "user", "content": []}], names="content", only=("chat", "messages", "count", "tokenize"))
    yield from chats([{"role": "user", "content": ["hi"]}], names="content")
    yield from chats([{"role": "user", "content": [{"type": "text"}]}], names="content")
    yield from chats([USER, USER, SAID, SAID], 200)  # this template allows it
    lone = {"role": "tool", "content": "hi", "tool_call_id": "1"}
    yield from chats([USER, lone], only=("chat", "tokenize"))
    yield from chats([USER, lone], names="", only=("ollama chat",))
    block = {"type": "tool_result", "tool_use_id": "1", "content": "hi"}
    yield from chats([{"role": "user", "content": [block]}], only=("messages", "count"))
    output = {"type": "function_call_output", "call_id": "1", "output": "hi"}
    yield from chats([output], names="", only=("responses",))


REFUSING = "{{ raise_exception('Roles must alternate') }}"


def tool(api: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the form of the API."""
    if api in ("messages", "count"):
        schema = {"input_schema": function["parameters"]} if "parameters" in function else {}
        return {name: value for name, value in function.items() if name != "parameters"} | schema
    return {"type": "function", **function} if api == "responses" else {"type": "function", "function": {**function}}


RECURSIVE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
ENDLESS: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
DEEP: Any = json.loads('{"type": "object", "properties": {"a": ' * 25 + "{}" + "}}" * 25)
LARGE = {"type": "object", "properties": {"a": {"enum": ["x" * 500_000, "y" * 500_000]}}}
FAR = {"type": "object", "properties": {"a": {"$ref": "http://169.254.169.254/schema.json"}}, "required": ["a"]}
PATTERNS = ("(", "(?=a)b", "(?<!a)b", r"(a)\1")


def patterned(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


def required(api: str) -> dict[str, Any]:
    """That a tool must be called, so that its schema is compiled. Ollama has no such field."""
    if api in ("messages", "count"):
        return {"tool_choice": {"type": "any"}}
    return {} if api == "ollama chat" else {"tool_choice": "required"}


def wrong_tools() -> Iterator[Case]:
    compiled = ("chat", "responses", "messages")
    for api in FIELDS["tools"]:
        for tools in (5, "f", [5], [None], {}):
            yield sent(api, valid(api) | {"tools": tools}, 400, "tools")
        for name in ("", "a b", "x" * 65, "\u00e9", 5, None):
            yield sent(api, valid(api) | {"tools": [tool(api, {"name": name, "parameters": {}})]}, 400, "name")
        for schema in (5, "x", [1]):
            yield sent(api, valid(api) | {"tools": [tool(api, {"name": "f", "parameters": schema})]}, 400, "tools")
        one = tool(api, {"name": "f", "parameters": {}})
        yield sent(api, valid(api) | {"tools": [one, one]}, 400, "tools")
        many = [tool(api, {"name": f"f{n}", "parameters": {}}) for n in range(513)]
        yield sent(api, valid(api) | {"tools": many}, 400, "tools")
        nested: Any = json.loads("[" * 50 + "]" * 50)
        yield sent(api, valid(api) | {"tools": [tool(api, {"name": "f", "parameters": {"a": nested}})]}, 400, "tools")
        yield sent(api, valid(api) | {"tools": [tool(api, {"name": "f", "parameters": LARGE})]}, (400, 413), "")
    for api in compiled:
        for schema in (RECURSIVE, ENDLESS, FAR, *map(patterned, PATTERNS), {"type": "object", "not": {}}):
            status = 200 if schema in (RECURSIVE, ENDLESS) else 400
            tools = [tool(api, {"name": "f", "parameters": schema})]
            yield sent(api, valid(api) | required(api) | {"tools": tools}, status, "tools")
    for api, choice in (
        ("chat", {"type": "function", "function": {"name": "g"}}),
        ("chat", "sometimes"),
        ("responses", {"type": "function", "name": "g"}),
        ("messages", {"type": "tool", "name": "g"}),
        ("messages", {"type": "tool"}),
        ("messages", {"type": "sometimes"}),
    ):
        tools = [tool(api, {"name": "f", "parameters": {}})]
        yield sent(api, valid(api) | {"tools": tools, "tool_choice": choice}, 400, "tool_choice")
    yield from (sent(api, valid(api) | required(api), 400, "tool_choice") for api in compiled)


def formatted(api: str, schema: Any) -> tuple[dict[str, Any], str]:
    """Fields that ask for an answer by the schema, and the name of the field."""
    match api:
        case "completions" | "chat":
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return {"response_format": format}, "response_format"
        case "responses":
            return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}, "text.format"
        case "messages" | "count":
            return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}, "output_config.format"
        case _:
            return {"format": schema}, "format"


BOMBS: tuple[Any, ...] = (
    *(patterned(pattern) for pattern in PATTERNS),
    FAR,
    {"type": "wizard"},
    {"type": "object", "not": {}},
    {"type": "array", "uniqueItems": True},
    {"enum": []},
    {"properties": 5},
    {"anyOf": [{"enum": [f"{n}-{m}" * 15 for m in range(40)]} for n in range(100)]},
)
SERVED: tuple[Any, ...] = (  # they compile in a bounded time, and an answer may end at max_tokens
    {"type": "array", "minItems": 10**9, "maxItems": 10**9},
    {"type": "string", "minLength": 10**9},
    ENDLESS,
    *(RECURSIVE, patterned("(a+)+$"), patterned("(a|aa)+"), DEEP),
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["x" * 50] * 10_000}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"structured_outputs": {"structural_tag": "x"}},
    {"grammar": "x" * 500_000},
    {"grammar": LARK["rules"](7500)},  # ends the process that compiles it
    {"json_schema": {"type": "wizard"}},
)


def formats() -> Iterator[Case]:
    for api in ("completions", "chat", "responses", "messages", *OLLAMA):
        for schema in BOMBS:
            fields, name = formatted(api, schema)
            yield sent(api, valid(api) | fields, 400, name)
        for schema in SERVED:
            yield sent(api, valid(api) | formatted(api, schema)[0], 200)
        fields, name = formatted(api, 5)
        yield sent(api, valid(api) | fields, 400, name.partition(".")[0])
    yield from (sent("count", valid("count") | formatted("count", schema)[0], (200, 400)) for schema in BOMBS)
    for api in ("completions", "chat", "responses"):
        for fields in GRAMMARS:
            yield sent(api, valid(api) | fields, 400, next(iter(fields)))
        for format in ({}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": 5}):
            yield sent(api, valid(api) | {"response_format": format}, 400, "response_format")
    yield from (sent(api, valid(api) | {"format": given}, 400, "format") for api in OLLAMA for given in ("xml", 5, [1]))


def client_templates() -> Iterator[Case]:
    source = "{% for i in range(10**9) %}x{% endfor %}"
    for api in ("completions", "chat", "responses", "tokenize"):
        yield sent(api, valid(api) | {"chat_template": source}, 400, "chat_template")
    for api in ("chat", "responses", "tokenize"):
        for name in ("chat_template", "messages", "tools", "tokenize", "tokenizer", "add_generation_prompt"):
            yield sent(api, valid(api) | {"chat_template_kwargs": {name: source}}, (200, 400))
        for name in ("messages", "tools"):
            yield sent(api, valid(api) | {"chat_template_kwargs": {name: []}}, 400, "chat_template_kwargs")
        yield sent(api, valid(api) | {"chat_template_kwargs": 5}, 400, "chat_template_kwargs")
        many = {f"a{n}": 1 for n in range(10_000)}
        yield sent(api, valid(api) | {"chat_template_kwargs": many}, (200, 400))
    yield sent("ollama generate", valid("ollama generate") | {"template": source}, 400, "template")


BAD_TEMPLATES = (
    "{{ messages[0].content * 10 ** 9 }}",
    "{% for a in range(10 ** 9) %}{% for b in range(10 ** 9) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 1 / 0 }}",
    "{{ messages.nothing.more }}",
    REFUSING,
)


def endless_templates() -> Iterator[Case]:
    for api in ("chat", "responses", "messages", "count", "ollama chat", "ollama generate", "tokenize"):
        yield from (sent(api, valid(api), 400, template=source) for source in BAD_TEMPLATES)


URLS = ("http://169.254.169.254/", "file:///etc/passwd", "http:\\\\evil", "data:image/png;base64,aGk=")


def media() -> Iterator[Case]:
    for url in URLS:
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_data": url}},
        ):
            yield from chats([{"role": "user", "content": [part]}], names="content", only=("chat", "tokenize"))
        for part in ({"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}):
            yield from chats([{"role": "user", "content": [part]}], names="content", only=("responses",))
        for kind in ("image", "document"):
            part = {"type": kind, "source": {"type": "url", "url": url}}
            yield from chats([{"role": "user", "content": [part]}], names="content", only=("messages", "count"))
        yield from chats([{"role": "user", "content": "a", "images": [url]}], names="images", only=("ollama chat",))
        yield sent("ollama generate", valid("ollama generate") | {"images": [url]}, 400, "images")
    yield from (sent(api, valid(api) | {"audio": {"voice": "x"}}, 400, "audio") for api in ("chat", "responses"))


STRANGE = (
    "../../etc/passwd",
    "C:\\x",
    "a/b/../../c",
    "x" * 10_000,
    "\U0001f347",
    "a\x00b",
    ".",
    "-rf",
    "m.",
    "M",
    " m",
    "m\n",
    "/m",
    "m/",
)


def kept_alive() -> Iterator[Case]:
    yield from values("keep_alive", "abc", "1e99h", "", "5 m", [], {}, True, 10**30)
    yield from values("keep_alive", -1, "-5m", "5m", "1h30m", 30, status=200)
    for api in OLLAMA:  # the model of this server stays
        yield sent(api, {"model": MODEL, "keep_alive": 0}, 409, "model")


def salts() -> Iterator[Case]:
    yield from values("cache_salt", 5, ["a"], {})
    yield from values("cache_salt", "", "\x00\n\x1b[31m", "x" * 100_000, status=(200, 400))
    yield from values("user", 5, ["a"], {})
    yield from values("user", "", "\x00\n\x1b[31m", "x" * 100_000, status=(200, 400))


def shifts() -> Iterator[Case]:
    yield from values("num_keep", -2, 2**31, 2**63, 1.5, "1", only=("completions", "chat", "responses"))
    shifting = [(api, put(valid(api), "shift", True)) for api in FIELDS["shift"]]
    for api, body in shifting:
        own = FIELDS["num_keep"][api]
        yield from (sent(api, put(body, own, value), 400, "num_keep") for value in (-2, 2**31, 2**63, 1.5, "1"))
        yield from (sent(api, put(body, own, value), 200) for value in (-1, 0, 10**6))
    yield from values("shift", 1, "true", [])
    yield sent("chat", {"model": MODEL, "messages": [USER], "shift": True}, 400, "max_tokens")
    yield from values("repeat_last_n", -2, 2**31, 1.5, "1")


def streams() -> Iterator[Case]:
    yield from values("stream_options", {"include_usage": True}, {}, 5)
    yield from values("stream", 1, "true", "yes", [], {})
    for api in ("completions", "chat", "responses"):
        body = valid(api) | {"stream": True}
        for options in (5, [], {"include_usage": "yes"}, {"more": 1}, {"include_obfuscation": True}):
            yield sent(api, body | {"stream_options": options}, 400, "stream_options")
        yield sent(api, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, 200)


def unknown_conversations() -> Iterator[Case]:
    for name in ("nothing", "n" * 128):
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/fork", {"to": "made"}),
            ("POST", "/rewind", {"turns": 1}),
        ):
            yield Case(f"{CONVERSATIONS}/{name}{path}", body, 404, name[:80], method)
    for api in ("completions", "chat", "messages"):
        yield sent(api, valid(api) | {"conversation": "nothing"}, 404, "conversation")
    for turns in (-1, 10**6, 1.5, "1"):
        yield Case(f"{CONVERSATIONS}/kept/rewind", {"turns": turns}, (400, 409), "turns")
    yield Case(f"{CONVERSATIONS}/kept/fork", {"to": "kept"}, 409, "kept")
    yield Case(CONVERSATIONS, {"name": "kept"}, 409, "kept")
    yield sent("responses", valid("responses") | {"previous_response_id": "resp_unknown"}, 404, "previous_response_id")
    yield Case("/v1/responses/unknown", None, 404, "response", "GET")
    for route in ("copy", "delete"):
        body = {"source": "unknown", "destination": "b"} if route == "copy" else {"model": "unknown"}
        yield Case(f"/api/{route}", body, 404, "unknown", "DELETE" if route == "delete" else "POST")
    for body in ({}, {"namespace": 5}, {"nothing": 1}):
        yield Case("/admin/cache/remove", body, 400)


NAMES = (
    "",
    ".",
    "..",
    "/abs",
    "a/b",
    "a\\b",
    "x" * 300,
    "caf\u00e9",
    "cafe\u0301",
    ".hidden",
    "a\nb",
    "a\x00b",
    "-rf",
    "a b",
    "\U0001f347",
)


def names() -> Iterator[Case]:
    for name in (*NAMES, 5, None, ["a"]):
        yield Case(CONVERSATIONS, {"name": name}, 400, "name" if not isinstance(name, str) else "")
        yield Case(f"{CONVERSATIONS}/kept/fork", {"to": name}, 400)
    for name in ("..", "/abs", "x" * 300, "caf\u00e9", ".hidden", "a\nb", "-rf", "a b"):
        yield Case("/api/create", {"model": name, "from": "m", "stream": False}, 400)
        yield Case("/api/copy", {"source": "m", "destination": name}, 400)
    for digest in ("sha256:00", "sha256:" + "g" * 64, "md5:" + "0" * 64):
        yield Case(f"/api/blobs/{digest}", b"x", (400, 404))
    for name in ("CON", "nul", "com1", "Kept"):  # reserved by others, or a name of its own: allowed, and apart
        yield Case(CONVERSATIONS, {"name": name}, 201)
        yield Case(f"{CONVERSATIONS}/{name}", None, 200, method="DELETE")


def batches() -> Iterator[Case]:
    for inputs in (
        ["a"] * 2049,
        ["a"] * 20_000,
        [[1]] * 2049,
        [],
        [""],
        [[]],
        [1, "a"],
        [[1], "a"],
        ["a", None],
        [["a"]],
    ):
        yield sent("embeddings", {"model": MODEL, "input": inputs}, 400, "input")
    for inputs in (["a"] * 2049, [[]], [1, "a"], [[1], "a"], ["a", None], [["a"]]):
        yield sent("ollama embed", {"model": MODEL, "input": inputs}, 400, "input")
    yield sent("embeddings", b'{"model": "m", "input": [' + b'"a", ' * 100_000 + b'"a"]}', 400, "input")
    yield sent("ollama embed", b'{"model": "m", "input": [' + b'"a", ' * 100_000 + b'"a"]}', 400, "input")
    for value in (0, -1, 2**31, 1.5, "8"):
        yield sent("embeddings", valid("embeddings") | {"dimensions": value}, 400, "dimensions")
        yield sent("ollama embed", valid("ollama embed") | {"dimensions": value}, 400, "dimensions")


CONTENTS = (
    Fault(30, "No messages, an unknown role, no content, 100 000 messages, a result without its call, an order that "
          "the template refuses", "400 with the place. Ollama loads the model where there are no messages",
          (*wrong_messages(),
           *(sent(api, valid(api), 400, "alternate", template=REFUSING) for api in CHATS)),
          (f"{TEXTS}/test_template.py::test_wrong_messages_are_refused_with_the_place",)),
    Fault(31, "Tools with a recursive `$ref`, of a megabyte, with a bad `pattern`, with wrong names, too many of them",
          "400, before anything runs; a recursive schema is followed",
          tuple(wrong_tools())),
    Fault(32, "A format with a catastrophic pattern, huge counts, recursion; a grammar that grows without end",
          "400 before anything runs, or when its limit is reached; patterns have no backtracking",
          tuple(formats()),
          ("tests/serve/test_structured_fields.py::test_a_grammar_that_reaches_a_limit_is_an_error_of_the_request",)),
    Fault(33, "A chat template of the client, or variables in the names of what the server gives a template",
          "400; other variables are data", tuple(client_templates()),
          (f"{TEXTS}/test_calls.py::test_a_variable_that_is_not_the_clients_is_refused",)),
    Fault(34, "A chat template, of the model, that loops without end, or writes a gigabyte",
          "400, after a bounded time and with bounded memory", tuple(endless_templates()),
          (f"{TEXTS}/test_template.py::test_a_template_that_does_not_end_is_ended",
           f"{TEXTS}/test_template.py::test_a_template_that_would_fill_memory_is_stopped_or_bounded")),
    Fault(35, "Addresses of images, audio, video and files", "400; nothing is fetched", tuple(media())),
    Fault(36, "An image that is a bomb", "400", why_not="the model here takes no images: tests/images"),
    Fault(37, "A model named `../../etc/passwd`, `C:\\x`, by 10 KB, an emoji, NUL, `.`, `-rf`, in other case",
          "404", tuple(values("model", *STRANGE, status=404)),
          ("tests/library/test_names.py::test_no_name_leaves_the_library",)),
    Fault(38, "`keep_alive` of -1, \"0\", \"-5m\", \"1e99h\", \"abc\"; a salt or user of 100 KB, empty, of control "
          "characters",
          "below 0 is for ever; 400 for what is no time; salts and users are only compared",
          (*kept_alive(), *salts())),
    Fault(39, "`num_keep` and `shift` that are negative or beyond the prompt; `n_discard`",
          "400; beyond the prompt is all of it. `n_discard` is unknown: see 15",
          tuple(shifts())),
    Fault(40, "`stream_options` without `stream`, or of another type", "400", tuple(streams())),
    Fault(41, "To fork, rewind, continue or delete what does not exist, or what is another key's; to fork to itself",
          "404, the same for both; 409 for a name that is taken",
          tuple(unknown_conversations()),
          ("tests/serve/test_faults.py::test_what_is_another_keys_does_not_exist",)),
    Fault(42, "Names of conversations, models and files: `..`, `/abs`, 300 characters, line feeds, twins in Unicode, "
          "reserved words", "400: names have ASCII letters, digits, dots, hyphens and underscores; reserved words are "
          "names", tuple(names())),
    Fault(43, "100 000 inputs of embeddings, empty texts, texts among token ids", "400", tuple(batches())),
)  # fmt: skip
