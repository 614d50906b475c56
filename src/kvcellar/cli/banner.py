"""banner: what `kvcellar serve` prints once it serves requests: what, where, in how much memory, and for which keys."""

from collections.abc import Iterator

from kvcellar.cli.models import size
from kvcellar.inspector.page import PAGE
from kvcellar.serve.host import Host
from kvcellar.serve.key_ring import Keys, Names
from kvcellar.serve.settings import ServeSettings

APIS = {
    "OpenAI": "/v1",
    "Anthropic": "/v1/messages",
    "Ollama": "/api",
    "conversations": "/kvcellar/conversations",
    "metrics": "/metrics",
}
SHOWN = 8  # names of keys of one kind


def banner(url: str, host: Host, settings: ServeSettings, keys: Keys) -> Iterator[str]:
    """Lines of text. `url` is that of the server, without a path."""
    yield f"Serving {', '.join(host.names)} at {url}/v1"
    yield "; ".join(f"{name}: {url}{path}" for name, path in APIS.items())
    if settings.inspects:
        yield f"See inside at {url}{PAGE}"
    used, limit = host.residents.bytes, host.limits.max_bytes
    yield f"Memory: {size(used)} of {size(limit)}, for at most {host.limits.max_models} models at once"
    yield f"Keys: {_keys(settings, keys)}"


def _keys(settings: ServeSettings, keys: Keys) -> str:
    kinds = {"API": keys.api, "admin": keys.admin, "metrics": keys.metrics}
    found = [_kind(name, names) for name, names in kinds.items() if names]
    if not keys.api:
        reach = "only this machine" if settings.loopback else f"every machine that reaches {settings.host}"
        found.insert(0, f"no API key is needed, and {reach} can connect")
    return "; ".join(found)


def _kind(kind: str, names: Names) -> str:
    shown, more = list(names.values())[:SHOWN], len(names) - SHOWN
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return f"{len(names)} {kind} key{'s' if len(names) > 1 else ''} ({listed})"
