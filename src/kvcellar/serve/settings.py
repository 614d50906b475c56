"""settings: the settings of the server, immutable; checked once, at start."""

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvcellar.errors import BadRequest
from kvcellar.values import UNBOUNDED, Kind, Real, Whole

MetricsCompat = Literal["vllm"]
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?")  # as browsers send it
MAX_DRAIN, MAX_SECONDS = 86400.0, 1e9
_NUMBERS: Mapping[str, Kind] = {
    **dict.fromkeys(("max_body_bytes", "max_upload_bytes", "max_header_bytes", "max_headers"), Whole(1, UNBOUNDED)),
    **dict.fromkeys(("max_connections", "max_backlog_events", "responses_bytes"), Whole(1, UNBOUNDED)),
    **dict.fromkeys(("header_seconds", "body_seconds", "write_seconds"), Real(0.0, MAX_SECONDS, above=True)),
    **dict.fromkeys(("ping_seconds", "idle_seconds", "responses_seconds"), Real(0.0, MAX_SECONDS, above=True)),
    "port": Whole(0, 65535),
    "drain_seconds": Real(0.0, MAX_DRAIN),
}


def key_digest(key: str) -> bytes:
    """SHA-256 of an API key, 32 bytes; only this is stored. Raises `BadRequest` for a key that HTTP cannot carry."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadRequest("an API key needs one or more visible ASCII characters, without spaces", "api_keys")
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Where to listen, which clients to serve, and the limits of what one client may send.

    docs/reference/server-settings.md is generated from the comments.

    Raises `BadRequest` with the field's name for invalid values, and for an address that other machines can reach
    without an API key, unless `allow_open` is set.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8080  # port to listen on; 0: any free port
    # `key_digest(key)` of each API key; empty: no key is required
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    # `key_digest(key)` of each admin key, which the routes below `/admin/` need; empty: there are no such routes
    admin_digests: tuple[bytes, ...] = field(default=(), repr=False)
    # `key_digest(key)` of each metrics key, which `/metrics` needs, or an admin key; without either it needs the API
    # key, if there is only one
    metrics_digests: tuple[bytes, ...] = field(default=(), repr=False)
    # "vllm": `/metrics` has vLLM's names beside ours, where they mean the same
    metrics_compat: MetricsCompat | None = None
    allow_open: bool = False  # without keys, listen on an address that other machines can reach
    allowed_hosts: tuple[str, ...] = ()  # names accepted in the Host header besides those of the loopback interface
    # origins (scheme, host and port, as `https://chat.example.com`) whose web pages may read responses
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20  # largest body of one request
    max_bodies_bytes: int | None = None  # largest sum of bodies being received; None: 8 times max_body_bytes
    # most bytes of files that were uploaded to create models, and that no model has
    max_upload_bytes: int = 64 * 2**30
    max_header_bytes: int = 64 * 2**10  # largest request line and headers together
    max_headers: int = 100  # most header lines of one request
    # most connections open at once; below 1024, the usual limit on open files. Those that sent no key are closed first
    max_connections: int = 512
    max_backlog_events: int = 4096  # most events of one request queued for a slow client; more cancel the request
    header_seconds: float = 15.0  # limit for receiving a request line and its headers
    body_seconds: float = 60.0  # limit for receiving a body
    write_seconds: float = 60.0  # limit for a client that does not read
    ping_seconds: float = 15.0  # a stream without data for this long sends an empty line
    idle_seconds: int = 75  # limit for an idle connection
    share_prefixes: bool = False  # requests of different API keys and users find each other's prefixes in memory
    both_reasoning_names: bool = False  # chats have reasoning as `reasoning_content` and as `reasoning`, too
    allow_pull: bool = False  # Ollama's route /api/pull downloads models from the hub
    # the page at `/inspector`; None: only without API keys, and where only this machine can reach the server
    inspector: bool | None = None
    chat_page: bool = True  # the page to chat in at `/`, for browsers; where there are API keys it asks for one
    client_pins: bool = False  # requests may set cache_pin, and cache_priority above 0
    # most bytes of responses of `/v1/responses` that are kept for one API key, of a 64th of the bytes of the store for
    # all, or, without a store, of 256 MiB
    responses_bytes: int = 64 * 2**20
    responses_seconds: float = 30 * 86400.0  # how long such a response is kept after it was used last
    drain_seconds: float = 5.0  # seconds for running requests after the first SIGTERM

    def __post_init__(self) -> None:
        self._check_numbers()
        for origin in self.cors_origins:
            if _ORIGIN.fullmatch(origin) is None:
                example = "as in https://chat.example.com or http://localhost:3000"
                raise BadRequest(f"{origin!r} is no origin: scheme, host and port, {example}", "cors_origins")
        for name in ("key_digests", "admin_digests", "metrics_digests"):
            if any(len(digest) != hashlib.sha256().digest_size for digest in getattr(self, name)):
                raise BadRequest(f"{name} are what key_digest() returns, not the keys themselves", name)
        if set(self.key_digests) & set(self.admin_digests):
            raise BadRequest("an admin key is an API key, too; clients would be admins", "admin_digests")
        if set(self.metrics_digests) & {*self.key_digests, *self.admin_digests}:
            raise BadRequest(
                "a metrics key is an API key or an admin key, too; give it a value of its own", "metrics_digests"
            )
        if self.metrics_compat not in (None, *get_args(MetricsCompat)):
            raise BadRequest(
                f"metrics_compat is {' or '.join(get_args(MetricsCompat))}, not {self.metrics_compat!r}",
                "metrics_compat",
            )
        if not self.loopback and not self.key_digests and not self.allow_open:
            raise BadRequest(
                f"{self.host!r} can be reached from other machines and no API key is set. Set one, listen on "
                f"127.0.0.1, or set allow_open to serve every client.",
                "host",
            )

    def _check_numbers(self) -> None:
        for name, kind in _NUMBERS.items():
            kind.check(name, getattr(self, name))
        if self.bodies_bytes < self.max_body_bytes:
            least = f"at least max_body_bytes, {self.max_body_bytes}, not {self.bodies_bytes}"
            raise BadRequest(f"max_bodies_bytes must be {least}", "max_bodies_bytes")

    @property
    def bodies_bytes(self) -> int:
        return 8 * self.max_body_bytes if self.max_bodies_bytes is None else self.max_bodies_bytes

    @property
    def inspects(self) -> bool:
        """Whether there is a page at `/inspector`."""
        return self.inspector if self.inspector is not None else self.loopback and not self.key_digests

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names accepted in the Host header, without port and in lower case; None: any.

        On loopback there is always a list. It defeats DNS rebinding: a web page whose name resolves to this machine
        still sends its own name.
        """
        extra = {name.lower() for name in self.allowed_hosts}
        if self.loopback:
            own = f"[{self.host}]" if ":" in self.host else self.host
            return frozenset({"localhost", "127.0.0.1", "[::1]", own.lower()} | extra)
        return frozenset(extra) or None
