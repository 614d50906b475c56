"""one_engine: a host of one engine that the caller has made, and of no other models."""

from kvcellar.engine.served_engine import ServedEngine
from kvcellar.errors import ModelNotFound
from kvcellar.serve.host import Host
from kvcellar.serve.resident import Limits
from kvcellar.serve.servable import Servable


class NoModels:
    """The catalogue of a server that loads no models."""

    longest = 0

    def find(self, name: str) -> Servable:
        raise ModelNotFound(f"there is no model {name!r}")

    def known(self, name: str) -> bool:
        return True

    def all(self) -> list[Servable]:
        return []


def hosting(engine: ServedEngine) -> Host:
    """A host of one engine, which the caller closes."""
    host = Host(NoModels(), Limits(max_bytes=0, max_models=1), unload=lambda engine: None)
    name, path = engine.model.name, engine.model.path
    host.open(Servable(name, name, 0, 0, 0, lambda cache, going_on: engine, directory=path))
    return host
