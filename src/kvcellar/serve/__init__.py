"""serve: an HTTP server with OpenAI's API for engines, with API keys and limits on what a client may send.

Names are imported when they are used: commands that only send requests to a server import none of it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcellar.serve.http.server import Server, build_app, run
    from kvcellar.serve.models.model_manager import ModelManager
    from kvcellar.serve.settings import ServeSettings, key_digest

__all__ = ["ModelManager", "ServeSettings", "Server", "build_app", "key_digest", "run"]

_NAMES = {
    "kvcellar.serve.models.model_manager": ("ModelManager",),
    "kvcellar.serve.http.server": ("Server", "build_app", "run"),
    "kvcellar.serve.settings": ("ServeSettings", "key_digest"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"kvcellar.serve has no public name {name!r}; it has {', '.join(__all__)}")
