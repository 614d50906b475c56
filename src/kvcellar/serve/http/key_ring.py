"""key_ring: the keys of a server, which may be read again while it runs, and which of them a request needs.

A key is sent as `Authorization: Bearer KEY`, or as `x-api-key: KEY`. All comparisons take the same time for every key.

Always true:
  * a server never gets or loses a kind of keys while it runs: a mistake in a file cannot open it, and the routes that
    exist only with a kind of keys do not change;
  * a request is checked with the keys of one reading.
"""

import hashlib
import hmac
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from kvcellar.errors import BadRequest
from kvcellar.serve.generation.namespaces import set_api_key
from kvcellar.serve.http.api_errors import OLLAMA, ApiError
from kvcellar.serve.http.request_log import RequestLog
from kvcellar.serve.settings import ServeSettings

log = logging.getLogger("kvcellar.serve")

ADMIN = "/admin/"
METRICS = "/metrics"
CHANGING = tuple(f"/api/{name}" for name in ("create", "copy", "delete", "pull", "push", "blobs"))

Names = Mapping[bytes, str]  # of keys, by digest


@dataclass(frozen=True, slots=True)
class Keys:
    """The name of each key, by its digest, and the weights of those that have one."""

    api: Names
    admin: Names
    metrics: Names
    weights: Mapping[bytes, float] = field(default_factory=dict[bytes, float])  # of API keys; others have 1

    @classmethod
    def of(cls, settings: ServeSettings) -> "Keys":
        """Keys that have no names are numbered."""
        api, admin, metrics = settings.key_digests, settings.admin_digests, settings.metrics_digests
        return cls(_numbered("key", api), _numbered("admin", admin), _numbered("metrics", metrics))

    def __or__(self, other: "Keys") -> "Keys":
        """Of a key in both, what `other` says."""
        return Keys(
            {**self.api, **other.api},
            {**self.admin, **other.admin},
            {**self.metrics, **other.metrics},
            {**self.weights, **other.weights},
        )

    def fields(self) -> dict[str, Any]:
        """Their digests, as fields of `ServeSettings`."""
        return {
            "key_digests": tuple(self.api),
            "admin_digests": tuple(self.admin),
            "metrics_digests": tuple(self.metrics),
        }

    def counts(self) -> dict[str, int]:
        return {"api": len(self.api), "admin": len(self.admin), "metrics": len(self.metrics)}


class KeyRing:
    """The keys of one server. Methods may be called from any thread."""

    def __init__(self, settings: ServeSettings, read: Callable[[], Keys] | None = None) -> None:
        """`read` reads all keys again; it may read files, and raises `BadRequest`. None: they do not change."""
        self._settings, self._read = settings, read
        self._lock = threading.Lock()  # one reading at a time
        self._keys = read() if read is not None else Keys.of(settings)
        self._check(self._keys)

    @property
    def now(self) -> Keys:
        return self._keys

    @property
    def reloads(self) -> bool:
        """Whether the keys can be read again."""
        return self._read is not None

    def reload(self) -> Keys:
        """Read the keys again. Raises `BadRequest`, and then those from before stay, and the reason is logged."""
        with self._lock:
            try:
                found = self._new()
            except BadRequest as error:
                log.error("the keys were not changed: %s", error)
                raise
            before, self._keys = self._keys, found
        log.info("read the keys again: %s", _changes(before, found))
        return found

    def _new(self) -> Keys:
        if self._read is None:
            raise BadRequest("this server was given its keys when it was made; make another one to change them", "keys")
        found = self._read()
        self._check(found)
        for kind, count in found.counts().items():
            if bool(count) != bool(self._keys.counts()[kind]):
                change = "lost its last" if not count else "was given its first"
                raise BadRequest(f"the server {change} {kind} key; start it again for that", "keys")
        return found

    def _check(self, keys: Keys) -> None:
        """Raises `BadRequest` for keys that are not valid together, or leave the server open."""
        replace(self._settings, **keys.fields())

    # -- requests -------------------------------------------------------------------------------------------------

    def check(self, scope: Scope, operated: tuple[str, ...] = ()) -> None:
        """Raises `ApiError` unless a request has the key that its path needs; else notes the key. Below `operated` an
        admin key counts as an API key."""
        keys, path, sent = self._keys, scope["path"], _sent(Headers(scope=scope))
        if (keys.admin and path.startswith(ADMIN)) or path.startswith(CHANGING):
            self._check_admin(scope, keys, sent)
        elif path == METRICS and (operators := {**keys.metrics, **keys.admin}):
            self._accept(scope, sent, operators, "metrics key or admin key", "invalid_metrics_key")
        elif keys.api:
            known = {**keys.api, **keys.admin} if path.startswith((OLLAMA, *operated)) else keys.api
            digest = self._accept(scope, sent, known, "API key", "invalid_api_key")
            set_api_key(scope, digest, keys.weights.get(digest, 1.0))
            if path == METRICS and len(keys.api) > 1:
                message = "metrics are sums over all API keys, so none of several may read them: send a metrics key"
                raise ApiError(403, message, code="not_allowed")

    def _check_admin(self, scope: Scope, keys: Keys, sent: str | None) -> None:
        """Raises `ApiError` without an admin key. A server without any keys, which only this machine can reach, allows
        what changes its library."""
        if keys.admin:
            self._accept(scope, sent, keys.admin, "admin key", "invalid_admin_key")
        elif keys.api or not self._settings.loopback:
            message = "this server has no admin key, so its models cannot be changed by requests"
            raise ApiError(403, message, code="not_allowed")

    def _accept(self, scope: Scope, sent: str | None, known: Names, kind: str, code: str) -> bytes:
        """The digest of the key. Raises `ApiError` 401 if it is not one of `known`."""
        digest = _digest(sent, known)
        if digest is None:
            message = f"a valid {kind} is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})
        RequestLog.of(scope).key = known[digest]
        return digest


def _sent(headers: Headers) -> str | None:
    """The key of a request; None if there is none, or there are several. A key in `x-api-key`, the header of
    Anthropic's API, counts if there is no other."""
    if not (authorizations := headers.getlist("authorization")):
        keys = headers.getlist("x-api-key")
        return keys[0] if len(keys) == 1 else None
    scheme, _, key = authorizations[0].partition(" ")
    return key.strip() if len(authorizations) == 1 and scheme.lower() == "bearer" else None


def _digest(sent: str | None, known: Iterable[bytes]) -> bytes | None:
    """The digest of a key, if it is known. Every key takes the same time, however many of its characters are right."""
    if not sent:
        return None
    digest = hashlib.sha256(sent.encode("latin-1")).digest()
    matches = [hmac.compare_digest(digest, one) for one in known]
    return digest if any(matches) else None


def _numbered(kind: str, digests: Iterable[bytes]) -> Names:
    return {digest: f"{kind}-{number}" for number, digest in enumerate(digests, 1)}


def _changes(before: Keys, after: Keys) -> str:
    def of(kind: str, old: Names, new: Names) -> str:
        return f"{len(new)} {kind} ({len(new.keys() - old.keys())} new, {len(old.keys() - new.keys())} removed)"

    kinds = (
        ("API", before.api, after.api),
        ("admin", before.admin, after.admin),
        ("metrics", before.metrics, after.metrics),
    )
    return ", ".join(of(*one) for one in kinds)
