"""Images are fetched from allowed hosts at public addresses, and from nowhere else."""

import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvcellar.errors import BadRequest
from kvcellar.images import fetching
from kvcellar.images.fetching import Fetcher

NUMBERS = (  # ways to write addresses that are not public
    "127.0.0.1", "127.1", "0", "0.0.0.0", "2130706433", "017700000001", "0x7f000001", "0x7f.1", "10.0.0.5",
    "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]",
    "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[fe80::1]", "[fc00::1]", "[fec0::1]", "[ff02::1]",
    "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
)  # fmt: skip


def numeric(host: str, port: int) -> list[str]:
    """As resolvers read numbers: in parts, in octal and in hexadecimal, too."""
    try:
        return [socket.inet_ntoa(socket.inet_aton(host))]
    except OSError:
        return [host]


@pytest.mark.parametrize("written", NUMBERS)
def test_an_address_that_is_not_public_is_refused_even_on_the_list(written):
    with pytest.raises(BadRequest, match="has an address that is not a public one"):
        Fetcher([written.strip("[]")], numeric).fetch(f"http://{written}/a.png", 100)


@pytest.mark.parametrize(
    "addresses",
    [["10.1.2.3"], ["93.184.215.14", "127.0.0.1"], ["2606:2800:21f:cb07::1", "::1"], ["::ffff:10.0.0.1"], []],
)
def test_a_name_that_resolves_to_a_private_address_is_refused(addresses):
    asked = []

    def resolve(host, port):
        asked.append((host, port))
        return addresses

    with pytest.raises(BadRequest, match=r"'pictures.example' of the image has an address that is not a public one"):
        Fetcher(["pictures.example"], resolve).fetch("https://pictures.example/a.png", 100)
    assert asked == [("pictures.example", 443)]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.example/a.png", "not fetched from 'other.example'"),
        ("http://pictures.example:8080/a.png", "not fetched from 'pictures.example:8080'"),
        ("http://pictures.example.other.example/a", "not fetched from"),
        ("http://a@pictures.example/a", "user name"),
        ("http://pictures.example@other.example/a", "user name"),
        ("http://pictures.example\\@other.example/a", "user name|not fetched"),
        ("http://pictures.example/a b", "must be escaped"),
        ("http://pictures.example/\r\nHost: x", "must be escaped"),
        ("http://pictures.éxample/", "must be escaped"),
        ("http://[pictures.example/", "not a URL"),
        ("http://pictures.example:99999/", "not a URL"),
        ("http:///a.png", "not fetched from ''"),
        ("file://pictures.example/a", "may be a data: URL"),
        ("gopher://pictures.example/a", "may be a data: URL"),
        ("javascript:alert(1)", "may be a data: URL"),
        ("//pictures.example/a", "may be a data: URL"),
        ("http://pictures.example/" + "a" * 5000, "5024 characters; 4096"),
    ],
)
def test_other_urls_are_refused_before_a_name_is_resolved(url, reason):
    def resolve(host, port):
        raise AssertionError("resolved")

    with pytest.raises(BadRequest, match=reason):
        Fetcher(["pictures.example"], resolve).fetch(url, 100)


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self):
        kind, status, data = "image/png", 200, b"picture of " + self.headers["Host"].encode()
        if self.path == "/moved":
            status = 302
        if self.path == "/page":
            kind = "text/html"
        if self.path == "/large":
            data = b"\0" * 5000
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1/secret")
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)
        if self.path == "/slow":
            self.server.release.wait(20)

    def log_message(self, *_):
        pass


@contextmanager
def pictures():
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.daemon_threads = True
        server.release = threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def fetched(monkeypatch):
    """What a server on this machine sends for a path: its address counts as public here."""
    monkeypatch.setattr(fetching, "_is_public", lambda _: True)
    with pictures() as port:
        host = f"pictures.example:{port}"
        fetcher = Fetcher([host], lambda *_: ["127.0.0.1"])
        yield lambda path, most=1000: fetcher.fetch(f"http://{host}{path}", most)


def test_an_allowed_image_is_fetched_from_the_address_that_was_checked(fetched):
    assert fetched("/a.png?x=1").startswith(b"picture of pictures.example:")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "answers 302 for the image; only 200 is read, redirects are not followed"),
        ("/page", "sends 'text/html', which is not an image"),
        ("/large", "more than 1000 bytes"),
    ],
)
def test_other_answers_are_refused(fetched, path, reason):
    with pytest.raises(BadRequest, match=reason):
        fetched(path)


def test_an_answer_that_takes_too_long_is_given_up(fetched, monkeypatch):
    monkeypatch.setattr(fetching, "SECONDS", 0.2)
    with pytest.raises(BadRequest, match=r"cannot be fetched from pictures.example within 0.2 seconds"):
        fetched("/slow")


def test_this_machine_is_refused():
    with pytest.raises(BadRequest, match="'localhost' of the image has an address that is not a public one"):
        Fetcher(["localhost"]).fetch("http://localhost/", 100)


def test_a_name_that_is_not_found_is_refused():
    def resolve(host, port):
        raise OSError("not known")

    with pytest.raises(BadRequest, match="is not found"):
        Fetcher(["no.example"], resolve).fetch("http://no.example/", 100)
