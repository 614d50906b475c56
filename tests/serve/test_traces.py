"""Spans of requests: the conventions of `gen_ai.*`, the client's trace as parent, and no text of a prompt."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvcellar.errors import BadRequest
from kvcellar.events import Done, Timings, Usage
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.http.traces import Traces, _usage, open_traces, wanted
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, MODEL, chat, completion

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A server whose spans are in memory."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self._exporter, self._provider = engine, InMemorySpanExporter(), TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(self._provider)

    def spans(self, count: int = 1) -> list[ReadableSpan]:
        """The spans so far, once there are `count`: one is made after the client has read its response."""
        while len(found := list(self._exporter.get_finished_spans())) < count:
            pass
        return found

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(f"{self.server.url}{path}", json=body, headers=headers, timeout=PATIENCE)

    server: Server


@pytest.fixture
def traced(shared_engine: FakeEngine, engine: FakeEngine) -> Iterator[Traced]:
    found = Traced(shared_engine)
    with Server(shared_engine, ServeSettings(port=0), traces=found.traces) as found.server:
        yield found


def test_a_chat_has_the_attributes_of_the_conventions(traced):
    with traced.engine.scripted(cached=4):
        body = chat(max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop=["a secret stop"], n=2)
        response = traced.post(CHAT, body).json()
    (span,) = traced.spans()
    assert (span.name, span.kind, span.parent) == (f"chat {MODEL}", SpanKind.SERVER, None)
    found = dict(span.attributes or {})
    usage = response["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvcellar",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": response["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": tuple(sorted(one["finish_reason"] for one in response["choices"])),
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 4,
        "http.response.status_code": 200,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert 0 < (span.end_time or 0) - (span.start_time or 0)
    assert "secret" not in span.to_json()
    assert "hello" not in span.to_json()


def test_of_several_prompts_the_first_chunk_counts():
    ends = [Done(Usage(5, 2, 3), Timings(queued=0.0, first_token=first, decoding=1.0)) for first in (0.75, 0.25, 0.5)]
    found = _usage(RequestLog("one", done=dict(enumerate(ends))))
    assert found["gen_ai.response.time_to_first_chunk"] == 0.25
    assert found["gen_ai.usage.cache_read.input_tokens"] == 6


def test_the_trace_of_the_client_is_the_parent_and_one_that_is_invalid_is_none(traced):
    traced.post(COMPLETIONS, completion(), traceparent=PARENT, tracestate="vendor=1")
    (span,) = traced.spans()
    assert span.name == f"text_completion {MODEL}"
    assert (span.context.trace_id, span.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    for number, wrong in enumerate(("00-0-0-01", "x" * 5000, PARENT.replace("00-", "ff-", 1), ""), 2):
        traced.post(COMPLETIONS, completion(), traceparent=wrong)
        assert traced.spans(number)[-1].parent is None


def test_an_error_has_its_code_and_other_routes_have_no_span(traced):
    httpx.get(f"{traced.server.url}/v1/models")
    traced.post(COMPLETIONS, completion(frob="a secret"))
    traced.post(CHAT, {"model": "x\ny", "messages": []})
    with traced.engine.scripted(fail=ValueError("a secret"), fail_at=1):
        traced.post(COMPLETIONS, completion(stream=True))
    spans = traced.spans(3)
    assert [dict(one.attributes or {})["error.type"] for one in spans] == [
        "unknown_parameter",
        "model_not_found",
        "internal_error",
    ]
    assert [one.status.status_code for one in spans] == [StatusCode.ERROR] * 3
    assert spans[1].name == "chat", "a name that a client made up is in no span"
    assert not any("secret" in one.to_json() or "x\\ny" in one.to_json() for one in spans)


def test_spans_are_made_where_they_are_wanted():
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert not wanted(None, {})
    assert wanted(None, endpoint)
    assert wanted(True, {})
    assert not wanted(False, endpoint)
    assert not wanted(None, endpoint | {"OTEL_SDK_DISABLED": "true"})


def test_without_the_extra_the_reason_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadRequest, match=r"kvcellar\[otel\]"):
        open_traces()


def test_a_server_without_traces_imports_nothing_of_them():
    code = "import sys, kvcellar.cli.serve; print([m for m in sys.modules if 'opentelemetry' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_spans_reach_a_collector_and_one_that_hangs_does_not_delay_the_end(monkeypatch, shared_engine, engine):
    from http.server import BaseHTTPRequestHandler, HTTPServer

    received: list[tuple[str, bytes]] = []
    hang = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            hang.wait(PATIENCE)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        try:
            traces = open_traces()
            with Server(shared_engine, ServeSettings(port=0), traces=traces) as server:
                httpx.post(f"{server.url}{COMPLETIONS}", json=completion())
                while not received:
                    pass
            monkeypatch.setattr("kvcellar.serve.http.traces.FLUSH_SECONDS", 0.05)
            traces.close()
        finally:
            hang.set()
            collector.shutdown()
            thread.join()
    (path, body), *_ = received
    assert path == "/v1/traces"
    assert b"text_completion" in body
    assert b"kvcellar" in body
