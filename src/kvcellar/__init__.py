"""kvcellar: the memory of LLM inference, as a library and as a server.

All public names are here. They are imported when they are first used, so that importing `kvcellar` does not import
torch. `Engine` serves a model; `Memory` is the KV cache alone, for a model of your own.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvcellar.errors import (
    BadRequest,
    CacheFull,
    CapacityTooSmall,
    EngineClosed,
    EngineDied,
    EngineFailed,
    KvcellarError,
    ModelNotFound,
    ModelRefused,
    NotSupported,
    Overloaded,
    PromptTooLong,
    PullFailed,
    UnknownSequence,
    WrongStage,
)
from kvcellar.version import __version__ as __version__

if TYPE_CHECKING:
    from kvcellar.attention.reference import Reference
    from kvcellar.attention.sdpa import Sdpa
    from kvcellar.cache.group import Group
    from kvcellar.cache.layouts import Causal, Chunked, Sliding
    from kvcellar.cache.memory import Memory
    from kvcellar.engine.engine import Engine
    from kvcellar.engine.request_options import RequestOptions
    from kvcellar.engine.result import Result
    from kvcellar.engine.session import Session
    from kvcellar.engine.settings import EngineOptions, Settings
    from kvcellar.library.hub import Pulled, pull
    from kvcellar.plan import Batch, Feed, Plan
    from kvcellar.progress import Progress
    from kvcellar.retention import RetentionOptions
    from kvcellar.sample.constraint import Constraint
    from kvcellar.sample.params import SamplingOptions, SamplingParams
    from kvcellar.shapes import Plane, Scoring, Storage
    from kvcellar.spans import Span


__all__ = [
    "BadRequest",
    "Batch",
    "CacheFull",
    "CapacityTooSmall",
    "Causal",
    "Chunked",
    "Constraint",
    "Engine",
    "EngineClosed",
    "EngineDied",
    "EngineFailed",
    "EngineOptions",
    "Feed",
    "Group",
    "KvcellarError",
    "Memory",
    "ModelNotFound",
    "ModelRefused",
    "NotSupported",
    "Overloaded",
    "Plan",
    "Plane",
    "Progress",
    "PromptTooLong",
    "PullFailed",
    "Pulled",
    "Reference",
    "RequestOptions",
    "Result",
    "RetentionOptions",
    "SamplingOptions",
    "SamplingParams",
    "Scoring",
    "Sdpa",
    "Session",
    "Settings",
    "Sliding",
    "Span",
    "Storage",
    "UnknownSequence",
    "WrongStage",
    "pull",
]

_NAMES = {  # the names that are not errors, by the module that defines them
    "kvcellar.attention.reference": ("Reference",),
    "kvcellar.attention.sdpa": ("Sdpa",),
    "kvcellar.cache.group": ("Group",),
    "kvcellar.cache.layouts": ("Causal", "Chunked", "Sliding"),
    "kvcellar.cache.memory": ("Memory",),
    "kvcellar.engine.engine": ("Engine",),
    "kvcellar.engine.request_options": ("RequestOptions",),
    "kvcellar.engine.result": ("Result",),
    "kvcellar.engine.session": ("Session",),
    "kvcellar.engine.settings": ("EngineOptions", "Settings"),
    "kvcellar.library.hub": ("Pulled", "pull"),
    "kvcellar.plan": ("Batch", "Feed", "Plan"),
    "kvcellar.progress": ("Progress",),
    "kvcellar.retention": ("RetentionOptions",),
    "kvcellar.sample.constraint": ("Constraint",),
    "kvcellar.sample.params": ("SamplingOptions", "SamplingParams"),
    "kvcellar.shapes": ("Plane", "Scoring", "Storage"),
    "kvcellar.spans": ("Span",),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"kvcellar has no public name {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
