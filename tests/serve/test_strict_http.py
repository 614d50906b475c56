"""What a proxy and this server could read differently is refused, and the connection is closed: on raw sockets, with a
second request behind the first that must never be served."""

import json

import pytest

from tests.serve.wire import COMPLETIONS, completion, connected, read_response, read_to_end, read_until, request

HOST = b"Host: localhost\r\n"
TYPE = b"Content-Type: application/json\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps(completion("hi")).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CODED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(headers: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1") -> bytes:
    return b"POST /v1/completions " + version + b"\r\n" + HOST + TYPE + headers + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return post(CODED, body)


SIZE = b"%x" % len(BODY)
REST = b"\r\n" + BODY + b"\r\n0\r\n\r\n"

REFUSED = {
    "length and coding": post(LENGTH + CODED, CHUNKS),
    "coding and length": post(CODED + LENGTH, CHUNKS),
    "length 0 and coding": post(b"Content-Length: 0\r\n" + CODED, CHUNKS),
    "length and coding in other letters": post(LENGTH.upper() + CODED.swapcase(), CHUNKS),
    "two lengths": post(LENGTH + b"Content-Length: 1\r\n", BODY),
    "two equal lengths": post(LENGTH * 2, BODY),
    "a list of equal lengths": post(b"Content-Length: %d, %d\r\n" % ((len(BODY),) * 2), BODY),
    "a length with a sign": post(b"Content-Length: +%d\r\n" % len(BODY), BODY),
    "a length with an underscore": post(b"Content-Length: 1_0\r\n", BODY),
    "a length in hexadecimal": post(b"Content-Length: 0x10\r\n", BODY),
    "an empty length": post(b"Content-Length:\r\n", BODY),
    "a length of many digits": post(b"Content-Length: " + b"0" * 30 + b"5\r\n", BODY),
    "two codings": post(CODED * 2, CHUNKS),
    "chunked twice": post(b"Transfer-Encoding: chunked, chunked\r\n", CHUNKS),
    "chunked not last": post(b"Transfer-Encoding: chunked, identity\r\n", CHUNKS),
    "another coding before chunked": post(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS),
    "an unknown coding": post(b"Transfer-Encoding: xchunked\r\n", CHUNKS),
    "a quoted coding": post(b'Transfer-Encoding: "chunked"\r\n', CHUNKS),
    "a vertical tab before the coding": post(b"Transfer-Encoding: \x0bchunked\r\n", CHUNKS),
    "an empty coding": post(b"Transfer-Encoding:\r\n", CHUNKS),
    "a coding in HTTP/1.0": post(CODED, CHUNKS, b"HTTP/1.0"),
    "a coding on a continued line": post(b"Transfer-Encoding:\r\n chunked\r\n", CHUNKS),
    "a space before the colon": post(b"Content-Length : %d\r\n" % len(BODY), BODY),
    "a tab before the colon": post(CODED.replace(b":", b"\t:"), CHUNKS),
    "a space before a name": post(b" " + LENGTH, BODY),
    "an empty name": post(b": 5\r\n"),
    "a line without a colon": post(b"Content-Length\r\n", BODY),
    "a continued line": post(b"X-A: one\r\n two\r\n" + LENGTH, BODY),
    "a continued first line": b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "LF after the first line": b"GET /health HTTP/1.1\n" + HOST + b"\r\n",
    "LF after a header": post(LENGTH.replace(b"\r\n", b"\n"), BODY),
    "LF alone everywhere": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "LF instead of the empty line": b"GET /health HTTP/1.1\r\n" + HOST + b"\n",
    "CR alone in a value": post(b"X-A: a\rContent-Length: 5\r\n" + LENGTH, BODY),
    "CR alone at the end of a line": post(b"X-A: a\r" + LENGTH, BODY),
    "CR before CRLF": post(b"X-A: a\r\r\n" + LENGTH, BODY),
    "NUL in a value": post(b"X-A: a\x00b\r\n" + LENGTH, BODY),
    "NUL in a name": post(b"X-A\x00: b\r\n" + LENGTH, BODY),
    "a control character in a value": post(b"X-A: a\x01b\r\n" + LENGTH, BODY),
    "DEL in a value": post(b"X-A: a\x7fb\r\n" + LENGTH, BODY),
    "NUL in the target": b"GET /health\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces in the first line": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab in the first line": b"GET\t/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http in lower case": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "an empty line first": b"\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST * 2 + b"\r\n",
    "a chunk size with a plus": chunked(b"+" + SIZE + REST),
    "a negative chunk size": chunked(b"-" + SIZE + REST),
    "a chunk size with 0x": chunked(b"0x" + SIZE + REST),
    "a chunk size with an underscore": chunked(b"0_" + SIZE + REST),
    "a space before a chunk size": chunked(b" " + SIZE + REST),
    "a space after a chunk size": chunked(SIZE + b" " + REST),
    "a chunk size of many digits": chunked(b"0" * 16 + SIZE + REST),
    "an empty chunk size": chunked(b"" + REST),
    "LF after a chunk size": chunked(SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n"),
    "LF in a chunk extension": chunked(SIZE + b";a\n" + REST),
    "CR in a chunk extension": chunked(SIZE + b";a\rb" + REST),
    "NUL in a chunk extension": chunked(SIZE + b";a\x00b" + REST),
    "LF after a chunk": chunked(SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"),
    "nothing after a chunk": chunked(SIZE + b"\r\n" + BODY + b"0\r\n\r\n"),
    "a chunk longer than its size": chunked(SIZE + b"\r\n" + BODY + b"  \r\n0\r\n\r\n"),
    "LF after the last chunk": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\n\r\n"),
    "LF after a trailer": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-A: b\n\r\n"),
    "LF instead of the end of trailers": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n\n"),
    "a continued trailer": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n c\r\n\r\n"),
    "NUL in a trailer": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-A: b\x00\r\n\r\n"),
}


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_http_gets_400_and_the_connection_is_closed(server, engine, data, whole):
    with connected(server) as wire:
        try:
            for part in [data + SMUGGLED] if whole else [data[at : at + 1] for at in range(len(data))]:
                wire.sendall(part)
        except (BrokenPipeError, ConnectionResetError):  # it was refused before it was sent completely
            assert not whole
        status, body = read_response(wire)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
        assert read_to_end(wire) == b""
    assert not engine.seen


ACCEPTED = {
    "names in other letters": post(LENGTH.swapcase(), BODY),
    "a coding in other letters": post(b"tRANSFER-eNCODING: CHUNKED\r\n", CHUNKS),
    "spaces and tabs around a value": post(b"Content-Length:\t %d \t\r\n" % len(BODY), BODY),
    "no space after a colon": post(b"Content-Length:%d\r\n" % len(BODY), BODY),
    "a length with zeros": post(b"Content-Length: 000%d\r\n" % len(BODY), BODY),
    "other headers twice": post(b"X-A: b\r\nX-A: b\r\n" + LENGTH, BODY),
    "an empty value, and one of Latin letters": post(b"X-A:\r\nX-B: \xe9\t\xe9\r\n" + LENGTH, BODY),
    "several chunks with an extension": chunked(b"1;a=b\r\n" + BODY[:1] + b"\r\n%X\r\n" % len(BODY[1:]) + REST[3:]),
    "trailers": chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-A: b\r\nX-B: c\r\n\r\n"),
}


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_unambiguous_http_is_served_and_the_next_request_too(server, engine, data):
    with connected(server) as wire:
        wire.sendall(data + SMUGGLED)
        assert read_response(wire)[0] == 200
        assert read_response(wire)[0] == 200


def test_http_1_0_is_served(server, engine):
    with connected(server) as wire:
        wire.sendall(post(LENGTH, BODY, b"HTTP/1.0"))
        assert read_response(wire)[0] == 200


def test_an_error_to_a_client_that_waits_to_be_asked_for_the_body_closes_the_connection(server, engine):
    head = request(COMPLETIONS, {}, "Expect: 100-continue", "Content-Length: 9999999")[:-2]
    with connected(server) as wire:
        wire.sendall(head)
        response = read_until(wire, b"\r\n\r\n").lower()
    assert response.startswith(b"http/1.1 413")
    assert b"\r\nconnection: close\r\n" in response
