"""One request with something wrong in it, what is answered, and how the fields of all APIs are called.

A fault is a row of the table: what is sent, in words, and the requests that send it. `values` makes a request of each
value for each API that has such a field, under the name that it has there.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvcellar.serve.routes import TABLE
from tests.serve.every_api import APIS

MODEL = "m"
OK = (200, 201)


@dataclass(frozen=True)
class Case:
    """`body`: sent as JSON, or bytes as they are. `names`: what the error names, as `param` or in its text."""

    path: str
    body: Any
    status: int | tuple[int, ...] = 400
    names: str = ""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    template: str | None = None  # of the model, for this request
    unrouted: bool = False  # refused before its route is read: the error has OpenAI's format everywhere

    @property
    def data(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()

    @property
    def statuses(self) -> tuple[int, ...]:
        return (self.status,) if isinstance(self.status, int) else self.status


@dataclass(frozen=True)
class Fault:
    """`answered`: in words. `tests`: tests of their own, as `file::function`, for what one request cannot show.
    `to`: the routes, where requests do not say it. `why_not`: why the fault cannot occur here."""

    number: int
    sent: str
    answered: str
    cases: tuple[Case, ...] = ()
    tests: tuple[str, ...] = ()
    to: str = ""
    why_not: str = ""

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(case.path for case in self.cases))


JSON_ROUTES: tuple[tuple[str, str], ...] = tuple(  # all that read a JSON body, with a name in each place for one
    (method, path.replace("{name}", "made").replace("{id}", "made"))
    for (method, path), operation in TABLE.items()
    if operation.body is not None
)
EVERY_ROUTE: tuple[tuple[str, str], ...] = tuple(
    (method, path.replace("{name}", "made").replace("{id}", "made").replace("{digest}", "made"))
    for method, path in TABLE
)

CHATS = ("chat", "responses", "messages", "count", "ollama chat", "tokenize")  # they have messages
WRITING = ("completions", "chat", "responses", "messages", "ollama chat", "ollama generate")  # they write text

# How a field is called, by the name of the API; a dot leads into an object.
OLLAMA = ("ollama chat", "ollama generate")
FIELDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        name: {api: own for apis, own in rows for api in apis}
        for name, rows in {
            "n": [(("completions", "chat", "responses"), "n")],
            "max_tokens": [
                (("completions", "chat", "messages"), "max_tokens"),
                (("responses",), "max_output_tokens"),
                (OLLAMA, "options.num_predict"),
            ],
            **{
                one: [
                    (("completions", "chat", "responses", "messages"), one),
                    (OLLAMA, f"options.{one}"),
                ]
                for one in ("temperature", "top_p", "top_k", "seed")
            },
            **{
                one: [(("completions", "chat", "responses"), one), (OLLAMA, f"options.{one}")]
                for one in ("min_p", "typical_p", "presence_penalty", "frequency_penalty", "num_keep", "repeat_last_n")
            },
            "repetition_penalty": [
                (("completions", "chat", "responses"), "repetition_penalty"),
                (OLLAMA, "options.repeat_penalty"),
            ],
            "stop": [
                (("completions", "chat", "responses"), "stop"),
                (("messages",), "stop_sequences"),
                (OLLAMA, "options.stop"),
            ],
            **{
                one: [(("completions", "chat", "responses"), one)]
                for one in ("logit_bias", "stop_token_ids", "stream_options")
            },
            "stream": [(WRITING, "stream")],
            "top_logprobs": [(("chat", "responses", *OLLAMA), "top_logprobs")],
            "logprobs": [(("completions",), "logprobs")],
            "shift": [(("completions", "chat", "responses", *OLLAMA), "shift")],
            "cache_salt": [(("completions", "chat", "responses", "messages", "embeddings"), "cache_salt")],
            "user": [
                (("completions", "chat", "responses", "embeddings"), "user"),
                (("messages",), "metadata.user_id"),
            ],
            "keep_alive": [((*OLLAMA, "ollama embed", "ollama embedding"), "keep_alive")],
            "model": [(tuple(name for name in APIS if name != "conversations"), "model")],
            "ids": [
                (("completions",), "prompt"),
                (("embeddings", "ollama embed"), "input"),
                (("detokenize",), "tokens"),
            ],
            "messages": [
                (("chat", "messages", "count", "ollama chat", "tokenize"), "messages"),
                (("responses",), "input"),
            ],
            "tools": [(("chat", "responses", "messages", "count", "ollama chat"), "tools")],
        }.items()
    }
)


def put(body: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The body with a value in a field; a dot leads into an object."""
    first, _, rest = field.partition(".")
    return {**body, first: put(body.get(first) or {}, rest, value) if rest else value}


def valid(api: str) -> dict[str, Any]:
    body = APIS[api].named(MODEL)
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} if api == "tokenize" else body


def sent(api: str, body: Any, status: int | tuple[int, ...] = 400, names: str = "", **more: Any) -> Case:
    return Case(APIS[api].path, body, status, names, **more)


def values(
    name: str, *given: Any, status: int | tuple[int, ...] = 400, without: Iterable[str] = (), only: Iterable[str] = ()
) -> Iterator[Case]:
    """Each value in the field of each API that has it. `without` and `only` are names of APIs."""
    for api, own in FIELDS[name].items():
        if api in without or (only and api not in only):
            continue
        for value in given:
            yield sent(api, put(valid(api), own, value), status, own.rpartition(".")[2])


def everywhere(*bodies: bytes, status: int = 400, names: str = "", **headers: str) -> Iterator[Case]:
    """Each body, to each route that reads JSON."""
    for method, path in JSON_ROUTES:
        for body in bodies:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            yield Case(path, body, status, names, method, named)


def anywhere(case: Case) -> Iterator[Case]:
    """The request to each route of the server, whatever it has for a body."""
    for method, path in EVERY_ROUTE:
        yield replace(case, method=method, path=path)
