"""namespaces: which requests may share memory, and which tenant a request is of.

What a request has computed is found by others of its namespace only. Otherwise the time to the first token, and
`cached_tokens`, would tell one client what another one has sent. A namespace is a digest of the API key, of
`cache_salt`, and of the fields that name the client's user. With `share_prefixes` only `cache_salt` separates requests.
"""

from collections.abc import Sequence
from hashlib import blake2b

from starlette.types import Scope

_API_KEY, _WEIGHT = "kvcellar.api_key", "kvcellar.weight"


def set_api_key(scope: Scope, digest: bytes, weight: float = 1.0) -> None:
    """Record the digest of the API key that a request was accepted with, and the weight of the key."""
    scope[_API_KEY], scope[_WEIGHT] = digest, weight


def api_key(scope: Scope) -> bytes | None:
    """The digest of the API key that a request was accepted with; None: no key was needed."""
    return scope.get(_API_KEY)


def namespace(scope: Scope, share: bool, salt: str | None, users: Sequence[str | None]) -> str:
    """The namespace of a request. `share`: the API key and `users` do not matter. Requests that have none of all this
    are in the empty one."""
    key: bytes = b"" if share else scope.get(_API_KEY, b"")
    names = [salt, *(() if share else users)]
    if not key and not any(names):
        return ""
    digest = blake2b(digest_size=16, person=b"kvcellar-name")
    for part in (key, *((name or "").encode() for name in names)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def owner(scope: Scope) -> str:
    """The tenant that quotas count a request for: a digest of its API key; "" without one. Names of users do not count:
    a client may choose them, and would have a quota for each."""
    key: bytes = scope.get(_API_KEY, b"")
    return blake2b(key, digest_size=16, person=b"kvcellar-owner").hexdigest() if key else ""


def weight(scope: Scope) -> float:
    """How many sequences that tenant has in proportion to others, where not all can run at once."""
    return scope.get(_WEIGHT, 1.0)
