"""retained: how long what a request computes is kept, by the fields of its body and what its client may ask for."""

from dataclasses import replace
from typing import Any, Literal

from starlette.types import Scope

from kvcellar.memory.retention import RetentionOptions
from kvcellar.serve.generation.namespaces import owner, weight
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.settings import ServeSettings

LONG = 86400.0  # seconds of "24h"


def options(
    *,
    key: str | None,
    retention: Literal["in_memory", "24h"] | None,
    ttl: float | None,
    priority: int | None,
    pin: bool | None,
) -> RetentionOptions:
    """From the values of `prompt_cache_key`, `prompt_cache_retention`, `cache_ttl`, `cache_priority` and `cache_pin`.
    Raises `ApiError`."""
    if retention == "24h":
        if ttl not in (None, LONG):
            message = "cache_ttl and prompt_cache_retention differ; send one of them"
            raise ApiError(400, message, "cache_ttl", "invalid_value")
        ttl = LONG
    given: dict[str, Any] = {"priority": priority, "ttl": ttl, "pinned": pin}
    return RetentionOptions(
        stored=retention != "in_memory",
        recurring=bool(key),
        **{name: value for name, value in given.items() if value is not None},
    )


def allowed(wanted: RetentionOptions, scope: Scope, settings: ServeSettings) -> RetentionOptions:
    """The same, with the tenant of the request. Raises `ApiError` 403 for what would keep the entries of one client at
    the cost of all others, unless the server allows it."""
    for name, more in (("cache_pin", wanted.pinned), ("cache_priority", wanted.priority > 0)):
        if more and not settings.client_pins:
            what = "cache_pin" if name == "cache_pin" else "a cache_priority above 0"
            raise ApiError(403, f"this server does not allow {what}; leave it out", name, "not_allowed")
    return replace(wanted, owner=owner(scope), weight=weight(scope))
