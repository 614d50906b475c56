"""serve: HTTP. The OpenAI routes over an engine, and what keeps the wrong callers out."""

from kvcellar.serve.app import build_app
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.server import Server, run
from kvcellar.serve.settings import ServeSettings, key_digest

__all__ = ["ServeSettings", "ServedEngine", "Server", "build_app", "key_digest", "run"]
