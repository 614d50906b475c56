"""schemathesis sends what the OpenAPI document of each API allows, and what it does not, and judges the responses.

No response is a server error; each has a declared status, content type and shape, those of streams too; what the
document does not allow is refused; and each request ends in time. With `--long` there are many more requests, all of
them also to a real engine.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar import Engine
from kvcellar.inspector.routes import OPERATIONS, inspector
from kvcellar.library.library import Library
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.admin.cache import ARCHIVE
from kvcellar.serve.openapi import document
from kvcellar.serve.operation import Operation
from kvcellar.serve.routes import TABLE
from tests.library.made import FakeTools
from tests.serve.declared import declared
from tests.serve.fake_library import World

KEY = "sk-key-of-the-operator"
SECONDS = 60  # until a request must have ended, on a machine that has much else to do
FEW, MANY = 4, 200  # requests of each kind to each operation
CONTEXT = 256
NO_END = ("GET", "/inspector/api/stream")
ALL = {key: one for key, one in {**TABLE, **OPERATIONS}.items() if key != NO_END}
OF_ENGINES = [key for key, one in ALL.items() if one.api == "Inspector" or key[1].startswith("/admin/cache")]
OF_FAKES = [key for key in ALL if key not in OF_ENGINES]


@dataclass
class Served:
    """A server, and what it has: values of parameters of paths, and of fields of bodies, that name something."""

    url: str
    fields: dict[str, str]
    paths: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=SECONDS)
        made = self.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2}).json()["id"]
        name = {"name": "known"}
        self.paths = {
            "/v1/models/{name}": {"name": self.fields["model"]},
            "/v1/responses/{id}": {"id": made},
            "/admin/requests/{id}": {"id": made},
            **{path: name for _, path in ALL if path.startswith("/kvcellar/conversations/")},
        }

    def have_conversation(self) -> None:
        """There is one of this name, whether the last request has deleted it or not."""
        assert self.http.post("/kvcellar/conversations", json={"name": "known"}).status_code in (201, 409)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of an engine that repeats the prompt."""
    world = World(tmp_path_factory.mktemp("models"), context=CONTEXT, admin_digests=(key_digest(KEY),))
    with world.serving() as server:
        served = Served(server.url, {"model": "fake", "source": "fake", "conversation": "known"})
        with closing(served.http):
            yield served


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedded model, with a store, the inspector, and a library."""
    root = tmp_path_factory.mktemp("real")
    options: dict[str, Any] = {"cache_bytes": 16_000_000, "context": CONTEXT, "max_sequences": 4, "threads": 1}
    settings = ServeSettings(port=0, admin_digests=(key_digest(KEY),), inspector=True)
    with Engine(device="cpu", store=str(root / "store"), **options) as engine:
        more: dict[str, Any] = {"library": Library(root / "models"), "tools": FakeTools, "mount": inspector}
        with Server(engine, settings, **more) as server:
            served = Served(server.url, {"model": engine.model.name, "conversation": "known"})
            with closing(served.http):
                yield served


@cache
def schema() -> Any:
    import schemathesis  # every worker collects this module, and few run its tests

    @schemathesis.serializer(ARCHIVE)
    def sent(context: Any, value: Any) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode()

    return schemathesis.openapi.from_dict(document({**TABLE, **OPERATIONS}))


def name_known(case: Any, served: Served) -> None:
    """Let a request name what there is: names that were made up find nothing."""
    for name, value in served.fields.items():
        if isinstance(case.body, dict) and isinstance(case.body.get(name), str):
            case.body[name] = value
    for message in case.body.get("messages") or () if isinstance(case.body, dict) else ():
        if isinstance(message, dict) and message.get("role") in ("user", "assistant", "system"):
            message["content"] = message.get("content") or "hello"
            message.pop("tool_calls", None)
    if known := served.paths.get(case.operation.path):
        case.path_parameters = known


def judge(served: Served, method: str, path: str, kind: str, examples: int) -> None:
    """Send `examples` requests to one operation."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    mode = GenerationMode.POSITIVE if kind == "valid" else GenerationMode.NEGATIVE
    judged = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
    ]
    cases = schema()[path][method].as_strategy(generation_mode=mode)

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(case=cases, known=st.booleans())
    def send(case: Any, known: bool) -> None:
        if path.startswith("/kvcellar/conversations/"):
            served.have_conversation()
        if kind == "valid" and known:
            name_known(case, served)
        response = case.call(served.url, headers={"authorization": f"Bearer {KEY}"}, timeout=SECONDS)
        refused = response.status_code == 413  # a list that is too long may be a body that is
        case.validate_response(response, checks=judged if refused else [*judged, checks.negative_data_rejection])
        content_type = response.headers.get("content-type", [""])[0]
        declared().check(method, path, response.status_code, content_type, response.content or b"")

    send()


def refuses(one: Operation) -> bool:
    """Whether a request can be wrong by the document: by its body, or by a parameter that is not any text."""
    parameters = [*one.path.values(), *(parameter.schema for parameter in one.query.values())]
    return one.body is not None or any(schema != {"type": "string"} for schema in parameters)


def requests_to(keys: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(*key, kind, id=f"{ALL[key].api} {' '.join(key)} {kind}")
        for key in keys
        for kind in ("valid", *(("invalid",) if refuses(ALL[key]) else ()))
    ]


@pytest.mark.parametrize(("method", "path", "kind"), requests_to(OF_FAKES))
def test_requests_of_the_document_get_declared_responses(fakes, request, method, path, kind):
    judge(fakes, method, path, kind, MANY if request.config.getoption("--long") else FEW)


@pytest.mark.parametrize(("method", "path", "kind"), requests_to(OF_ENGINES))
def test_requests_about_a_cache_get_declared_responses(engines, request, method, path, kind):
    judge(engines, method, path, kind, MANY if request.config.getoption("--long") else FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "kind"), requests_to(OF_FAKES))
def test_requests_to_a_real_engine_get_declared_responses(engines, method, path, kind):
    judge(engines, method, path, kind, MANY)
