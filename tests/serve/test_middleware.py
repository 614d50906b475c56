"""Keys on every route but those of supervisors, names of this machine only, CORS for named origins; the request log."""

import logging
import time

import httpx
import pytest

from kvcellar.errors import BadRequest
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import COMPLETIONS, completion, connected, error_of, read_response, request

GOOD = "sk-one"


@pytest.fixture(scope="module")
def locked(shared_engine: FakeEngine):
    digests = (key_digest(GOOD), key_digest("sk-two"))
    with Server(shared_engine, ServeSettings(port=0, key_digests=digests)) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
            yield client


@pytest.mark.parametrize("header", [f"Bearer {GOOD}", "bearer sk-two", f"BEARER  {GOOD}"])
def test_each_key_is_accepted(locked, engine, header):
    assert locked.get("/v1/models", headers={"authorization": header}).status_code == 200
    assert locked.post(COMPLETIONS, headers={"authorization": header}, json=completion()).status_code == 200


def test_two_authorization_headers_are_refused(locked):
    headers = [("authorization", f"Bearer {GOOD}"), ("authorization", "Bearer x")]
    assert locked.get("/v1/models", headers=headers).status_code == 401


def test_all_keys_are_compared_in_constant_time(locked, engine, monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    for key in (GOOD, "sk-two", "x"):
        locked.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert [known for _, known in compared] == [key_digest(GOOD), key_digest("sk-two")] * 3
    assert all(len(tried) == 32 for tried, _ in compared)


OTHERS = ["evil.com", "evil.com:80", "localhost.evil.com", "127.0.0.1.evil.com", "localhost@evil.com", "::1", ""]
OTHERS += ["evil.com@localhost", "127.0.0.2", "[::2]", "localhost:80:80", "localhost:x", "127.1", "2130706433", "a b"]
OTHERS += ["localhost, evil.com", "localhost/evil", "localhost."]


@pytest.mark.parametrize("host", OTHERS)
def test_other_hosts_are_refused_on_loopback(http, host):
    response = http.get("/v1/models", headers={"host": host})
    assert response.status_code == 403
    assert error_of(response)["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:65535"])
def test_hosts_of_this_machine_are_accepted_with_any_port(http, host):
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_two_host_headers_are_refused(server, engine):
    with connected(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n")
        assert read_response(wire)[0] == 400


def test_an_absolute_target_does_not_bypass_the_host_check(server, engine):
    with connected(server) as wire:
        wire.sendall(request("http://evil.com/v1/models"))
        assert read_response(wire)[0] == 404


def test_no_cors_headers_are_sent(http):
    preflight = {"origin": "https://evil.com", "access-control-request-method": "POST"}
    for response in (
        http.options(COMPLETIONS, headers=preflight),
        http.get("/v1/models", headers={"origin": "https://evil.com"}),
        http.post(COMPLETIONS, json=completion(), headers={"origin": "null"}),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)


PAGE = "https://chat.example.com"


@pytest.fixture(scope="module")
def named_origins(shared_engine: FakeEngine):
    origins = (PAGE, "http://localhost:3000")
    with (
        Server(shared_engine, ServeSettings(port=0, key_digests=(key_digest(GOOD),), cors_origins=origins)) as server,
        DeclaredClient(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield client


def cors(response: httpx.Response) -> dict[str, str]:
    names = [name for name in response.headers if name.startswith("access-control") or name == "vary"]
    return {name.removeprefix("access-control-"): response.headers[name] for name in names}


@pytest.mark.parametrize("wanted", ["authorization, content-type, x-api-key", "x-stainless-os,authorization", ""])
def test_a_page_of_a_named_origin_may_send_requests(named_origins, wanted):
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": wanted}
    for path in (COMPLETIONS, "/api/chat", "/no-such-route"):
        found = named_origins.options(path, headers=asked)
        assert (found.status_code, found.content) == (204, b"")
        assert cors(found) == {
            "allow-origin": PAGE,
            "allow-methods": "GET, HEAD, POST, DELETE",
            "allow-headers": wanted or "authorization, content-type, x-api-key",
            "max-age": "600",
            "expose-headers": "x-request-id, request-id, retry-after",
            "vary": "Access-Control-Request-Headers, Origin",
        }


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
def test_a_page_of_a_named_origin_reads_responses_streams_and_errors(named_origins, engine, origin):
    key, expected = {"authorization": f"Bearer {GOOD}"}, {"allow-origin": origin, "vary": "Origin"}
    expected["expose-headers"] = "x-request-id, request-id, retry-after"
    for headers, status in ((key, 200), ({}, 401)):
        for stream in (False, True):
            body = completion(stream=stream)
            found = named_origins.post(COMPLETIONS, json=body, headers=headers | {"origin": origin})
            assert (found.status_code, cors(found)) == (status, expected)


ORIGINS = ["https://evil.com", "null", "https://chat.example.com.evil.com", "http://chat.example.com", "*", PAGE + ":8"]


@pytest.mark.parametrize("origin", [*ORIGINS, PAGE + "/", PAGE.upper(), ""])
def test_other_origins_are_as_without_cors(named_origins, origin):
    asked = {"origin": origin, "access-control-request-method": "POST", "authorization": f"Bearer {GOOD}"}
    preflight, got = named_origins.options(COMPLETIONS, headers=asked), named_origins.get("/v1/models", headers=asked)
    assert (preflight.status_code, got.status_code) == (405, 200)
    assert cors(preflight) == cors(got) == {"vary": "Origin"}


def test_two_origins_are_none(named_origins):
    headers = [("origin", PAGE), ("origin", "https://evil.com"), ("authorization", f"Bearer {GOOD}")]
    assert cors(named_origins.get("/v1/models", headers=headers)) == {"vary": "Origin"}


@pytest.mark.parametrize(
    "origin", ["*", "null", "chat.example.com", PAGE + "/", "https://*.example.com", "HTTPS://a", ""]
)
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(BadRequest, match="is no origin") as refused:
        ServeSettings(cors_origins=(origin,))
    assert refused.value.param == "cors_origins"


def test_the_log_contains_no_text_of_requests(http, engine, caplog):
    with caplog.at_level(logging.INFO, "kvcellar.serve"):
        responses = [
            http.post(COMPLETIONS, json=completion("my secret prompt", user="my secret name")),
            http.get("/v1/models/a%0aINFO%20forged%1b[31m%00"),
        ]
        with engine.scripted(fail=ValueError("my secret prompt")):
            responses.append(http.post(COMPLETIONS, json=completion()))
        ids = [response.headers["x-request-id"] for response in responses]
        served, missing, failed, failure = logged(caplog, ids, 4)
    assert "POST /v1/completions 200" in served
    assert "404" in missing
    assert missing.isprintable()
    assert "unexpected ValueError" in failed
    assert "500" in failure
    assert "secret" not in caplog.text


def logged(caplog: pytest.LogCaptureFixture, ids: list[str], count: int) -> list[str]:
    """The log lines of these requests. A line may be written after the client has read the response."""
    while True:
        lines = [record.getMessage() for record in list(caplog.records)]
        if len(found := [line for one in ids for line in lines if line.startswith(one)]) >= count:
            return found
        time.sleep(0.01)


def test_every_response_has_its_own_id(http):
    ids = [http.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/health")]
    assert len(set(ids)) == 3
