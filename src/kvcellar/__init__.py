"""kvcellar: the memory of LLM inference, as a library and as a server.

Names are looked up when they are first used, so that the thinking half (cells, layouts, text, the scheduler) can be
imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvcellar.errors import (
    BadRequest,
    CapacityTooSmall,
    EngineClosed,
    EngineFailed,
    KvcellarError,
    ModelNotFound,
    ModelRefused,
    NotSupported,
    Overloaded,
    PromptTooLong,
)

if TYPE_CHECKING:
    from kvcellar.engine.engine import Engine
    from kvcellar.engine.result import Result
    from kvcellar.engine.session import Session
    from kvcellar.progress import Progress
    from kvcellar.sample.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "BadRequest",
    "CapacityTooSmall",
    "Engine",
    "EngineClosed",
    "EngineFailed",
    "KvcellarError",
    "ModelNotFound",
    "ModelRefused",
    "NotSupported",
    "Overloaded",
    "Progress",
    "PromptTooLong",
    "Result",
    "SamplingParams",
    "Session",
]

_LIVES_IN = {
    "Engine": "kvcellar.engine.engine",
    "Progress": "kvcellar.progress",
    "Result": "kvcellar.engine.result",
    "SamplingParams": "kvcellar.sample.params",
    "Session": "kvcellar.engine.session",
}


def __getattr__(name: str) -> object:
    if name not in _LIVES_IN:
        raise AttributeError(f"kvcellar has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_LIVES_IN[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
