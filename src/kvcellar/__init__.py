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
    from kvcellar.constraint import Constraint
    from kvcellar.engine.load.attach import attach
    from kvcellar.engine.load.settings import EngineOptions, Settings
    from kvcellar.engine.models.attached import Attached, MemoryCache
    from kvcellar.engine.request_options import RequestOptions
    from kvcellar.frontend.engine import Engine
    from kvcellar.frontend.result import Result
    from kvcellar.frontend.session import Session
    from kvcellar.library.hub import Pulled, pull
    from kvcellar.memory.attention.reference import Reference
    from kvcellar.memory.attention.sdpa import Sdpa
    from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
    from kvcellar.memory.kv.group import Group
    from kvcellar.memory.memory import Memory
    from kvcellar.memory.plan import Batch, Feed, Plan
    from kvcellar.memory.retention import RetentionOptions
    from kvcellar.memory.shapes import Plane, Scoring, Storage
    from kvcellar.memory.spans import Span
    from kvcellar.progress import Progress
    from kvcellar.sampling_params import SamplingOptions, SamplingParams


__all__ = [
    "Attached",
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
    "MemoryCache",
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
    "attach",
    "pull",
]

_NAMES = {  # the names that are not errors, by the module that defines them
    "kvcellar.memory.attention.reference": ("Reference",),
    "kvcellar.memory.attention.sdpa": ("Sdpa",),
    "kvcellar.memory.kv.group": ("Group",),
    "kvcellar.memory.cells.layouts": ("Causal", "Chunked", "Sliding"),
    "kvcellar.memory.memory": ("Memory",),
    "kvcellar.frontend.engine": ("Engine",),
    "kvcellar.engine.request_options": ("RequestOptions",),
    "kvcellar.frontend.result": ("Result",),
    "kvcellar.frontend.session": ("Session",),
    "kvcellar.engine.load.attach": ("attach",),
    "kvcellar.engine.load.settings": ("EngineOptions", "Settings"),
    "kvcellar.engine.models.attached": ("Attached", "MemoryCache"),
    "kvcellar.library.hub": ("Pulled", "pull"),
    "kvcellar.memory.plan": ("Batch", "Feed", "Plan"),
    "kvcellar.progress": ("Progress",),
    "kvcellar.memory.retention": ("RetentionOptions",),
    "kvcellar.constraint": ("Constraint",),
    "kvcellar.sampling_params": ("SamplingOptions", "SamplingParams"),
    "kvcellar.memory.shapes": ("Plane", "Scoring", "Storage"),
    "kvcellar.memory.spans": ("Span",),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"kvcellar has no public name {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
