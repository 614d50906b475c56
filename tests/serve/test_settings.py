"""Unsafe and invalid settings are refused."""

import errno
import hashlib
import os
import socket

import pytest

from kvcellar.cli.serve import LAST_STEP
from kvcellar.errors import BadRequest
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.server import SHUTDOWN_SECONDS, bind
from tests.serve.fake_engine import FakeEngine

KEYS = (key_digest("secret"),)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "example.com", "2001:db8::1"])
def test_a_public_address_needs_a_key_or_allow_open(host):
    with pytest.raises(BadRequest, match="no API key") as refusal:
        ServeSettings(host=host)
    assert refusal.value.param == "host"
    assert not ServeSettings(host=host, key_digests=KEYS).loopback
    assert not ServeSettings(host=host, allow_open=True).loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_loopback_accepts_its_own_host_names(host):
    settings = ServeSettings(host=host, allowed_hosts=("Box.Internal",))
    assert settings.hosts is not None
    assert {"localhost", "127.0.0.1", "[::1]", "box.internal"} <= settings.hosts
    assert host in settings.hosts or f"[{host}]" in settings.hosts


def test_other_addresses_accept_any_host_name_unless_some_are_set():
    assert ServeSettings(host="0.0.0.0", allow_open=True).hosts is None
    assert ServeSettings(host="0.0.0.0", allow_open=True, allowed_hosts=("a",)).hosts == {"a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("max_headers", 1.5),
        ("drain_seconds", True),
        ("max_body_bytes", 0),
        ("max_connections", 0),
        ("max_backlog_events", 0),
        ("body_seconds", 0),
        ("write_seconds", -1),
        ("ping_seconds", float("nan")),
        ("drain_seconds", -1),
        ("drain_seconds", float("nan")),
        ("drain_seconds", float("inf")),
        ("key_digests", (b"secret",)),
    ],
)
def test_invalid_values_are_refused_with_the_field(name, value):
    with pytest.raises(BadRequest) as refusal:
        ServeSettings(**{name: value})
    assert refusal.value.param == name


def test_shutdown_is_shorter_than_the_timeout_of_supervisors():
    assert ServeSettings().drain_seconds + SHUTDOWN_SECONDS + LAST_STEP < 10


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\x00", "schlüssel"])
def test_keys_that_http_cannot_carry_are_refused(key):
    with pytest.raises(BadRequest):
        key_digest(key)


def test_keys_are_not_stored():
    settings = ServeSettings(key_digests=KEYS)
    assert KEYS == (hashlib.sha256(b"secret").digest(),)
    assert "secret" not in repr(settings)
    assert repr(KEYS[0]) not in repr(settings)


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 70 + ".com"], ids=ascii)
def test_an_invalid_host_name_is_refused(host):
    with pytest.raises(BadRequest, match="it is not a host name") as refusal:
        bind(ServeSettings(host=host, key_digests=KEYS))
    assert refusal.value.param == "host"


@pytest.mark.parametrize(
    ("number", "param"), [(errno.EACCES, "port"), (errno.EADDRINUSE, "port"), (errno.EADDRNOTAVAIL, "host")]
)
@pytest.mark.parametrize("call", ["bind", "listen"])
def test_an_unavailable_address_is_refused(monkeypatch, call, number, param):
    class Refusing(socket.socket):
        def refused(self, *_: object) -> None:
            raise OSError(number, os.strerror(number))

    setattr(Refusing, call, Refusing.refused)
    monkeypatch.setattr("socket.socket", Refusing)
    with FakeEngine() as engine, pytest.raises(BadRequest, match=os.strerror(number)) as refusal:
        Server(engine, ServeSettings(port=0))
    assert refusal.value.param == param


def test_bind_refuses_a_port_in_use():
    with FakeEngine() as engine, Server(engine, ServeSettings(port=0)) as server:
        with pytest.raises(BadRequest, match=f"port {server.port}: Address already in use") as refusal:
            bind(ServeSettings(port=server.port))
        assert refusal.value.param == "port"


def test_connections_are_refused_until_the_server_listens():
    with bind(ServeSettings(port=0)) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with FakeEngine() as engine, Server(engine, ServeSettings(port=0), listener=listener) as server:
            assert server.port == address[1]
            socket.create_connection(address).close()


def test_a_server_refuses_a_port_in_use():
    with FakeEngine() as engine, Server(engine, ServeSettings(port=0)) as server:
        with pytest.raises(BadRequest, match=f"port {server.port}") as refusal:
            Server(engine, ServeSettings(port=server.port))
        assert refusal.value.param == "port"
