"""adapters_client: the adapters of an engine, by name, wherever it runs: added, replaced and removed while
requests run.

All methods may be called from any thread, and raise what `EngineClient.ask` raises beside what they say.
"""

from kvcellar import messages
from kvcellar.engine.arguments import Places, adapter_directories, adapter_name
from kvcellar.engine.client import EngineClient
from kvcellar.engine.control_replies import AdapterInfo


class AdaptersClient:
    """Of one engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def add(self, name: str, path: Places) -> AdapterInfo:
        """Load the LoRA adapter of a directory, or the sum of several, under a name. If there is one of that name,
        requests that run keep it, and later ones have the new one. Blocks while it is read and tested.

        Raises `AdapterRefused` with the reason, and `BadRequest`; then nothing has changed.
        """
        name, directories = adapter_name(name), adapter_directories(path)
        return self._client.ask(messages.AddAdapter(name, tuple(str(one.absolute()) for one in directories)))

    def remove(self, name: str, *, wait: bool = False) -> None:
        """Let no later request have the adapter of this name. It is freed when those that run with it have ended; with
        `wait`, that, or the end of the engine, is waited for. Raises `BadRequest` if there is none."""
        self._client.ask(messages.RemoveAdapter(adapter_name(name), wait))

    def list(self) -> list[AdapterInfo]:
        """Those that requests can name, by name."""
        return self._client.ask(messages.ListAdapters())
