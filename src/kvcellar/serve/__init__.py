"""serve: an HTTP server with OpenAI's API for engines, with API keys and limits on what a client may send."""

from kvcellar.serve.app import build_app
from kvcellar.serve.host import Host
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.server import Server, run
from kvcellar.serve.settings import ServeSettings, key_digest

__all__ = ["Host", "ServeSettings", "ServedEngine", "Server", "build_app", "key_digest", "run"]
