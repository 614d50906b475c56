"""A server whose engines are fakes, and whose models are files of a library."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcellar.frontend.engine import Engine
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.library.library import Library, LibraryModel
from kvcellar.serve import ModelManager, Server, ServeSettings
from kvcellar.serve.models.model_manager import Limits
from kvcellar.serve.models.model_spec import Caches, LibraryModels, ModelSpec
from tests.library.made import FakeTools, model
from tests.serve.fake_engine import CONTEXT, FakeEngine, FakeModel

CONFIG = {"model_type": "llama", "max_position_embeddings": 512, "hidden_size": 8, "num_hidden_layers": 2}


class World:
    """A server whose engines are fakes and whose models are files of the library."""

    def __init__(self, root: Path, tools: Any = None, *, context: int = CONTEXT, **settings: Any) -> None:
        self.library, self.loaded, self.tools = Library(root), list[str](), tools or FakeTools()
        self.limits = Limits(10**9, max_models=3)
        self.catalogue = LibraryModels(self.library, self.make, self.variant, Caches(10**9, 0.3, 1000))
        self.host = ModelManager(self.catalogue, self.limits, unload=FakeEngine.close, free=lambda: None)
        fake = FakeModel("fake", context=context)
        self.host.open(ModelSpec("fake", "fake", 0, 0, 0, lambda cache, going_on: FakeEngine(fake)))
        self.settings = ServeSettings(port=0, **settings)

    def make(self, name: str, cache: int, going_on: Callable[[], None]) -> FakeEngine:
        self.loaded.append(name)
        return FakeEngine(FakeModel(name))

    def variant(self, engine: Engine, model: LibraryModel) -> NamedEngine:
        return NamedEngine(engine)

    @contextmanager
    def serving(self, listener: socket.socket | None = None) -> Iterator[Server]:
        served: dict[str, Any] = {"library": self.library, "tools": lambda: self.tools, "listener": listener}
        try:
            with Server(self.host, self.settings, **served) as server:
                yield server
        finally:
            self.host.close()


def source_in(folder: Path) -> Path:
    """A directory with a config and one tensor."""
    folder = model(folder / "source")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000, 1200], "data_offsets": [0, 4_800_000]}}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, weights.stat().st_size + 4_800_000)  # readers look whether the file is whole
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
