"""settings: what the server allows, in numbers. Frozen; the command line resolves it once, at start."""

import hashlib
import ipaddress
from dataclasses import dataclass, field

from kvcellar.errors import BadRequest

MAX_DRAIN = 86400.0  # seconds


def key_digest(key: str) -> bytes:
    """What is kept of an API key: its sha256, 32 bytes. Raises `BadRequest` for a key no client could send."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadRequest("an API key needs one or more visible ASCII characters, without spaces", "api_keys")
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Where to listen, which clients to serve, and the limits of what one client may send.

    docs/reference/server-settings.md is made from the comments.

    Raises `BadRequest`, naming the field, for values that cannot work, and for an address that others can reach while
    no API key is required, unless `allow_open` says that this is wanted.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8080  # 0: any free port
    key_digests: tuple[bytes, ...] = field(
        default=(), repr=False
    )  # `key_digest(key)` of each API key; empty: no key is required
    allow_open: bool = False  # without keys, listen on an address that other machines can reach
    allowed_hosts: tuple[str, ...] = ()  # accepted in the Host header, beside the names of the loopback interface
    max_body_bytes: int = 8 * 2**20  # of one request
    max_bodies_bytes: int | None = None  # of all requests being received; None: 8 times max_body_bytes
    max_header_bytes: int = 64 * 2**10  # request line and headers together
    max_headers: int = 100  # header lines of one request
    max_connections: int = 512  # open at once; below 1024, the usual limit on open files
    max_backlog_events: int = 4096  # events of one request, queued for a slow client; more cancel the request
    header_seconds: float = 15.0  # to receive a request line and its headers
    body_seconds: float = 60.0  # to receive a body
    write_seconds: float = 60.0  # to wait for a client whose buffers are full
    ping_seconds: float = 15.0  # a stream that has no data for so long sends a comment line
    idle_seconds: int = 75  # to keep an idle connection open
    drain_seconds: float = 5.0  # running requests may go on for after the first SIGTERM

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadRequest(f"port must be from 0 to 65535, not {self.port}", "port")
        for name in ("max_body_bytes", "max_header_bytes", "max_headers", "max_connections", "max_backlog_events"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, not {getattr(self, name)}", name)
        if self.bodies_bytes < self.max_body_bytes:
            message = (
                f"max_bodies_bytes must be at least max_body_bytes, {self.max_body_bytes}, not {self.bodies_bytes}"
            )
            raise BadRequest(message, "max_bodies_bytes")
        for name in ("header_seconds", "body_seconds", "write_seconds", "ping_seconds", "idle_seconds"):
            if not getattr(self, name) > 0:
                raise BadRequest(f"{name} must be more than 0, not {getattr(self, name)}", name)
        if not 0 <= self.drain_seconds <= MAX_DRAIN:
            message = f"drain_seconds must be from 0 to {MAX_DRAIN:g}, not {self.drain_seconds}"
            raise BadRequest(message, "drain_seconds")
        if any(len(digest) != hashlib.sha256().digest_size for digest in self.key_digests):
            raise BadRequest("key_digests are what key_digest() returns, not the keys themselves", "key_digests")
        if not self.loopback and not self.key_digests and not self.allow_open:
            raise BadRequest(
                f"{self.host!r} can be reached from other machines and no API key is set. Set one, listen on "
                f"127.0.0.1, or say with allow_open that everybody may use this server.",
                "host",
            )

    @property
    def bodies_bytes(self) -> int:
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @property
    def loopback(self) -> bool:
        """Can only this machine reach the server?"""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names that a Host header may have, without port and in lower case; None: any.

        On loopback a list is always kept: a web page whose name was made to point to this machine (DNS rebinding) still
        sends its own name.
        """
        extra = {name.lower() for name in self.allowed_hosts}
        if self.loopback:
            own = f"[{self.host}]" if ":" in self.host else self.host
            return frozenset({"localhost", "127.0.0.1", "[::1]", own.lower()} | extra)
        return frozenset(extra) or None
