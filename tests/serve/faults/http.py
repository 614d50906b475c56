"""Faults 1 to 18: HTTP and the JSON of bodies."""

from collections.abc import Iterator

from tests.serve.every_api import APIS, CONVERSATIONS
from tests.serve.faults.case import OK, Case, Fault, anywhere, everywhere, put, sent, valid

NESTED = 100_000
VALID = b'{"model": "m", "prompt": "x"'
ODD_TEXTS = ("a\x00b", "\U0001f347", "\u2028", "\ufeffa", "e\u0301")
CONNECTION = "tests/serve/test_connection.py"

BROKEN = (
    b'{"prompt": "x"',
    b'{"prompt": "x',
    b'{"prompt": ',
    b"{",
    b"\x00",
    VALID + b"} x",
    VALID + b"}" + VALID + b"}",
    b"{'prompt': 'x'}",
    VALID + b" /* why */}",
    b'{"prompt": "a\nb"}',
    VALID + b', "seed": ' + b"9" * 10_000 + b"}",
    *(VALID + b', "temperature": ' + number + b"}" for number in (b"NaN", b"Infinity", b"-Infinity")),
)
DEEP = (
    b"[" * NESTED,
    b"[" * NESTED + b"]" * NESTED,
    b'{"a":' * NESTED,
    b'{"prompt":' + b"[" * NESTED + b"]" * NESTED + b"}",
    b'{"messages": [{"role": "user", "content": ' + b"[" * NESTED + b"]" * NESTED + b"}]}",
)
TWICE = (
    b'{"model": "x", "model": "m"}',
    b'{"model": "m", "options": {"seed": 1, "seed": 2}}',
    b'{"model": "m", "m\\u006fdel": "x"}',
)
NOT_UTF8 = (
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xc0\xaf"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"model": "m", "user": {"\\ud800": 1}}',
    b'\xef\xbb\xbf{"prompt": "x"}',
    '{"prompt": "x"}'.encode("utf-16"),
)
READABLE = {name for name, api in APIS.items() if api.path in (CONVERSATIONS, "/v1/responses/input_tokens")}
ROUTES = (  # method, path, status
    *(("GET", path, 404) for path in ("/v1", "/v1/", "/v2/models", "//v1//models", "/v1/models/", "/v1/models/other")),
    *(("GET", path, 404) for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%2e%2e/%2e%2e", "/health/")),
    *(("GET", path, 404) for path in ("/v1/%2e%2e/health/x", "/v1/models/a%00b%0aevil", "/v1/models/%ff")),
    *(("GET", path, 404) for path in ("/v1/completions/", "/api/", "/api/chat/", "/v1/messages/", "/nowhere")),
    *(("GET", path, 404) for path in (f"{CONVERSATIONS}/", f"{CONVERSATIONS}/a%2fb")),
    *(("POST", path, 404) for path in ("/v1/audio/speech", "/v1/responses/other/cancel", "/api/nothing")),
    *(("POST", path, 405) for path in ("/v1/responses/other", "/v1/models", "/health", "/api/tags")),
    *(("GET", api.path, 405) for name, api in APIS.items() if name not in READABLE),
    *((method, api.path, 405) for api in APIS.values() for method in ("PUT", "PATCH", "OPTIONS", "BREW")),
    *(("HEAD", path, 200) for path in ("/health", "/v1/models", "/")),
    *(("HEAD", path, 404) for path in ("/nowhere", "/v1/nowhere")),
    *(("HEAD", path, 405) for path in ("/v1/completions", "/api/chat", "/v1/messages")),
)


def round_trips() -> Iterator[Case]:
    """Odd characters are text like any other; `test_unusual_characters_are_returned_unchanged` compares it."""
    for api, name in (("completions", "prompt"), ("tokenize", "content"), ("ollama generate", "prompt")):
        body = {key: value for key, value in valid(api).items() if key != "messages"}
        yield from (sent(api, put(body, name, text), 200) for text in ODD_TEXTS)


def unknown_fields() -> Iterator[Case]:
    """The rule of each API for fields that it does not have."""
    for api in APIS:
        lenient = api in ("messages", "count") or "ollama" in api
        for name in ("temprature", "n_discard", "x" * 10_000):
            yield sent(api, put(valid(api), name, 1), OK if lenient else 400, "" if lenient else name[:20])
    for api in ("completions", "chat", "responses"):
        yield from (sent(api, valid(api) | {name: 1}, 400, "") for name in ("a\nb", "\u202e"))


REFUSED = {  # known to clients of the API, but not to be had here
    "completions": {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "guided_regex": "(a+)+$",
        "reasoning_effort": "high",
        "suffix": "x",
        "best_of": 2,
        "allowed_token_ids": [1],
        "use_beam_search": True,
        "prompt_embeds": "AAAA",
    },
    "chat": {
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "guided_json": {"type": "object"},
        "audio": {"codec": "alloy", "format": "wav"},
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "store": True,
        "service_tier": "priority",
        "echo": True,
        "best_of": 2,
    },
    "responses": {
        "background": True,
        "prompt": {"id": "p"},
        "conversation": "x",
        "context_management": [{"type": "compaction"}],
        "truncation": "sometimes",
    },
    "messages": {"mcp_servers": [{"type": "url", "url": "http://x"}], "container": "c"},
    "count": {"mcp_servers": [{"type": "url", "url": "http://x"}], "container": "c"},
    "ollama generate": {"suffix": "x", "template": "x", "images": ["aGk="], "context": [1, 2]},
    "ollama chat": {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
    "embeddings": {"encoding_format": "int8", "dimensions": 7},
    "tokenize": {"parse_special": False},
}


def refused() -> Iterator[Case]:
    for api, fields in REFUSED.items():
        for name, value in fields.items():
            named = "images" if api == "ollama chat" else name
            yield sent(api, put(valid(api), name, value), 400, named)


def named_requests() -> Iterator[Case]:
    """Ids of clients name nothing here: both requests are served."""
    named = {"X-Request-Id": "same\tname", "Idempotency-Key": "same", "X-Session-Id": "same"}
    for api in APIS:
        if api != "conversations":
            yield from [sent(api, valid(api), 200, headers=named)] * 2
    yield Case("/v1/responses/unknown", None, 404, method="DELETE")
    yield Case("/v1/responses/unknown/cancel", {}, 404)


HTTP = (
    Fault(1, "An empty body, `null`, `[]`, `\"x\"` or `1`", "400",
          tuple(everywhere(b"", b"null", b"[]", b'"x"', b"1"))),
    Fault(2, "JSON that is cut off, or followed by anything, or no JSON", "400",
          tuple(everywhere(*BROKEN)), ("tests/serve/test_invalid_requests.py::test_every_truncated_body_is_refused",)),
    Fault(3, "JSON that is nested 100 000 deep", "400",
          tuple(everywhere(*DEEP)),
          ("tests/serve/test_invalid_requests.py::test_values_nested_near_the_limit_are_accepted_or_refused",)),
    Fault(4, "A key twice in an object, also spelled in two ways", "400",
          tuple(everywhere(*TWICE))),
    Fault(5, "Text that is not UTF-8, half of a surrogate pair, a byte order mark; NUL and other odd characters",
          "400; odd characters are read and written unchanged",
          (*everywhere(*NOT_UTF8), *round_trips()),
          ("tests/serve/test_invalid_requests.py::test_unusual_characters_are_returned_unchanged",)),
    Fault(6, "A body of 2 GiB, one that is longer or shorter than its Content-Length, chunks without an end",
          "413 before it arrives; 408 if it does not arrive; what is too much is read as the next request",
          tuple(everywhere(b" " * (2**20 + 1), status=413)),
          ("tests/serve/test_invalid_requests.py::test_a_chunked_body_over_the_limit",
           *(f"{CONNECTION}::{name}" for name in (
               "test_a_content_length_over_the_limit_is_refused_before_the_body_arrives",
               "test_an_incomplete_body_times_out",
               "test_bytes_beyond_the_content_length_are_parsed_as_the_next_request",
               "test_a_body_shorter_than_its_content_length_includes_the_next_request")))),
    Fault(7, "A compressed body", "415, unread",
          tuple(case for coding in ("gzip", "br", "deflate", "identity, gzip", "x\ty")
                for case in everywhere(b"\x1f\x8b", status=415, Content_Encoding=coding))),
    Fault(8, "A body of another content type, as a form on a web page sends it",
          "415. Ollama's clients may send another one, or none, browsers may not",
          tuple(case for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                                  "application/json; charset=latin-1")
                for case in everywhere(b"{}", status=415, Content_Type=kind, Origin="null"))),
    Fault(9, "10 000 headers, or one of 1 MB", "431, in OpenAI's format where the route was not read",
          (*anywhere(Case("", None, 431, headers={"X-Long": "x" * 2**20}, unrouted=True)),
           *anywhere(Case("", None, 431, headers={f"x-{n}": "" for n in range(101)}))),
          (f"{CONNECTION}::test_invalid_http_gets_an_error_in_the_api_format",)),
    Fault(10, "A request that arrives byte by byte; a client that reads its stream slowly, or not at all",
          "408; a slow reader gets all of it, up to a limit of events that wait; then it is disconnected, and its "
          "request cancelled",
          tests=tuple(f"{CONNECTION}::{name}" for name in (
              "test_a_request_sent_byte_by_byte_times_out", "test_an_incomplete_request_times_out",
              "test_a_client_that_reads_slowly_gets_the_whole_stream",
              "test_a_client_that_does_not_read_is_disconnected_its_request_cancelled_and_logged"))),
    Fault(11, "A Host header that does not name the server, as after DNS rebinding", "403",
          tuple(case for host in ("evil.example", "localhost.evil.example", "")
                for case in anywhere(Case("", None, 403, headers={"Host": host}))),
          ("tests/serve/test_middleware.py::test_other_hosts_are_refused_on_loopback",)),
    Fault(12, "A preflight request of a web page of another origin", "405 without CORS headers",
          tuple(Case(api.path, None, 405, method="OPTIONS",
                     headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"})
                for api in APIS.values()),
          ("tests/serve/test_middleware.py::test_no_cors_headers_are_sent",)),
    Fault(13, "No API key, a wrong, empty or overlong one, one that is not ASCII",
          "401, after the same time for each; 431 if it is longer than headers may be",
          tests=("tests/serve/test_faults.py::test_every_route_needs_a_valid_key",
                 "tests/serve/test_middleware.py::test_all_keys_are_compared_in_constant_time")),
    Fault(14, "A route or method that does not exist, HEAD, OPTIONS, `//v1//models`, `%2e%2e`",
          "404; 405 with Allow; HEAD as GET without its body",
          tuple(Case(path, None, status, method=method) for method, path, status in ROUTES)),
    Fault(15, "A field that the API does not have; one that it has elsewhere, but not here",
          "OpenAI's routes and those of kvcellar: 400 with its name. Anthropic's and Ollama's ignore a field that they "
          "do not know, and refuse with its name one that would change the answer",
          (*unknown_fields(), *refused()),
          ("tests/serve/test_invalid_requests.py::test_values_without_effect_are_accepted",)),
    Fault(16, "A client that leaves: before the headers, in the queue, in prefill, in decode, between two events, "
          "after the last token", "its request is cancelled, and nothing of it is left",
          tests=("tests/serve/test_disconnects.py::test_clients_that_leave_at_any_moment_leave_nothing_behind",
                 *(f"{CONNECTION}::{name}" for name in (
                     "test_disconnect_before_the_request_is_complete", "test_disconnect_before_the_first_token",
                     "test_disconnect_between_two_events", "test_disconnect_after_the_last_token_cancels_nothing")))),
    Fault(17, "Two requests with one id or idempotency key; the end of an unknown request",
          "both are served, under ids of the server; 404",
          tuple(named_requests()),
          ("tests/serve/test_invalid_requests.py::test_requests_with_equal_ids_are_separate",)),
    Fault(18, "HTTP/1.0, several requests at once on a connection, more connections than are allowed, idle ones",
          "served in order; 503 with Retry-After; idle connections are closed",
          tests=("tests/serve/test_room.py::test_an_arrival_is_refused_when_all_others_have_running_requests",
                 *(f"{CONNECTION}::{name}" for name in (
                     "test_http_1_0_gets_a_response_and_the_connection_is_closed",
                     "test_pipelined_requests_get_responses_in_order", "test_an_idle_connection_is_closed")))),
)  # fmt: skip
