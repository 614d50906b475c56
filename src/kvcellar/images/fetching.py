"""fetching: images at URLs, from hosts that the operator allows. No torch.

A client that names a URL lets this machine connect to a place that it may not reach itself. So nothing is fetched
unless its host is in a list; its name is resolved once, an address that is not a public one is refused, and the
connection is made to that address: no answer of a name server that comes later decides. Redirects are not followed, and
proxies not used.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from urllib.parse import SplitResult, urlsplit

from kvcellar.errors import BadRequest, shown

SECONDS = 10.0  # for an image
_MOST_URL = 4096  # characters
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an address of IPv4

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]


def resolved(host: str, port: int) -> list[str]:
    """Its addresses. Raises `OSError`."""
    return list(dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


class Fetcher:
    """Fetches from hosts of a list, each as `host`, or `host:port` for other ports than those of HTTP and HTTPS."""

    def __init__(self, hosts: Sequence[str], resolve: Resolve = resolved) -> None:
        self._hosts, self._resolve = frozenset(host.lower().rstrip(".") for host in hosts), resolve

    def fetch(self, url: str, most: int) -> bytes:
        """The file there, of at most so many bytes. Raises `BadRequest`."""
        parts, host, port = self._checked(url)
        address = self._address(host, port)
        try:
            with closing(socket.create_connection((address, port), SECONDS)) as plain:
                watch, until = threading.Timer(SECONDS, _shut, [plain]), time.monotonic() + SECONDS
                watch.start()
                try:
                    data = _answer(plain, parts, host, port, most)
                    if time.monotonic() >= until:  # what was read until then may look like all of it
                        raise TimeoutError
                    return data
                finally:
                    watch.cancel()
        except (OSError, http.client.HTTPException) as error:
            raise BadRequest(
                f"the image cannot be fetched from {host} within {SECONDS:g} seconds ({type(error).__name__})"
            ) from None

    def _checked(self, url: str) -> tuple[SplitResult, str, int]:
        if len(url) > _MOST_URL:
            raise BadRequest(f"the URL of the image has {len(url)} characters; {_MOST_URL} are allowed")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise BadRequest(f"{shown(url)} is not a URL: {error}") from None
        if parts.scheme not in _PORTS:
            raise BadRequest(
                f"{shown(url[:80])}: an image may be a data: URL, or an http: or https: URL on a host that the server "
                f"allows"
            )
        if "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise BadRequest(f"the URL {shown(url)} has a user name, or characters that must be escaped")
        named = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
        if named not in self._hosts:
            raise BadRequest(
                f"images are not fetched from {shown(named)}. Send the image as a data: URL",
                hint="--allow-image-host names hosts that images are fetched from",
            )
        return parts, host, port or _PORTS[parts.scheme]

    def _address(self, host: str, port: int) -> str:
        try:
            found = [ipaddress.ip_address(one.partition("%")[0]) for one in self._resolve(host, port)]
        except (OSError, ValueError, UnicodeError) as error:
            raise BadRequest(f"the host {shown(host)} of the image is not found ({type(error).__name__})") from None
        if not found or not all(map(_is_public, found)):
            raise BadRequest(f"the host {shown(host)} of the image has an address that is not a public one")
        return str(found[0])


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast


def _shut(plain: socket.socket) -> None:
    with suppress(OSError):  # it has been closed meanwhile
        plain.shutdown(socket.SHUT_RDWR)


def _answer(plain: socket.socket, parts: SplitResult, host: str, port: int, most: int) -> bytes:
    secure = parts.scheme == "https"
    connection = http.client.HTTPConnection(host, port)
    connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host) if secure else plain
    with closing(connection):
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise BadRequest(
                f"{host} answers {answer.status} for the image; only 200 is read, redirects are not followed"
            )
        kind = answer.headers.get_content_type()
        if not kind.startswith("image/"):
            raise BadRequest(f"{host} sends {shown(kind)}, which is not an image")
        data = answer.read(most + 1)
        if len(data) > most:
            raise BadRequest(f"the image has more than {most} bytes")
        return data
