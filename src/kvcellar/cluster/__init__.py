"""Several engines behind gateways, on Ray Serve.

`app` is imported when it is used: what decides where a request goes needs no Ray."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcellar.cluster.application import app

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name == "app":
        return import_module("kvcellar.cluster.application").app
    raise AttributeError(f"kvcellar.cluster has no public name {name!r}; it has {', '.join(__all__)}")
