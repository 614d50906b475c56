"""namespaces: which tenant a request is of, which requests may share memory, and how long entries of a client may stay.

What a request has computed is found by others of its namespace only. Otherwise the time to the first token, and
`cached_tokens`, would tell one client what another one has sent. A namespace is a digest of the API key, of
`cache_salt`, and of the fields that name the client's user. With `share_prefixes` only `cache_salt` separates requests.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from starlette.types import Scope

from kvcellar.memory.retention import RetentionOptions
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.settings import ServeSettings

_API_KEY, _WEIGHT = "kvcellar.api_key", "kvcellar.weight"


def set_api_key(scope: Scope, digest: bytes, weight: float = 1.0) -> None:
    """Record the digest of the API key that a request was accepted with, and the weight of the key."""
    scope[_API_KEY], scope[_WEIGHT] = digest, weight


def api_key(scope: Scope) -> bytes | None:
    """The digest of the API key that a request was accepted with; None: no key was needed."""
    return scope.get(_API_KEY)


def owner(scope: Scope) -> str:
    """The tenant that quotas count a request for: a digest of its API key; "" without one. Names of users do not count:
    a client may choose them, and would have a quota for each."""
    key = api_key(scope)
    return blake2b(key, digest_size=16, person=b"kvcellar-owner").hexdigest() if key else ""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request."""

    scope: Scope
    settings: ServeSettings
    arrived: float = field(default_factory=time.monotonic)  # when the request was received

    @property
    def owner(self) -> str:
        return owner(self.scope)

    @property
    def seconds(self) -> float:
        """Since the request was received."""
        return time.monotonic() - self.arrived

    @property
    def sees_texts(self) -> bool:
        """Whether responses may have the text of other requests of the namespace."""
        return not (self.settings.share_prefixes and self.settings.key_digests)

    def namespace(self, salt: str | None, users: Sequence[str | None]) -> str:
        """That of a salt and of names of users. Requests that have none of all this are in the empty one. Names that
        are missing at the end change nothing: APIs have several numbers of them."""
        share = self.settings.share_prefixes
        key = b"" if share else api_key(self.scope) or b""
        names = [salt, *(() if share else users)]
        while names and not names[-1]:
            names.pop()
        if not key and not names:
            return ""
        digest = blake2b(digest_size=16, person=b"kvcellar-name")
        for part in (key, *((name or "").encode() for name in names)):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()

    def retention(self, wanted: RetentionOptions) -> RetentionOptions:
        """The same, with the tenant and its weight. Raises `ApiError` 403 for what would keep the entries of one client
        at the cost of all others, unless the server allows it."""
        for name, more in (("cache_pin", wanted.pinned), ("cache_priority", wanted.priority > 0)):
            if more and not self.settings.client_pins:
                what = "cache_pin" if name == "cache_pin" else "a cache_priority above 0"
                raise ApiError(403, f"this server does not allow {what}; leave it out", name, "not_allowed")
        return replace(wanted, owner=self.owner, weight=self.scope.get(_WEIGHT, 1.0))
