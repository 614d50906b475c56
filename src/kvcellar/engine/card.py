"""card: what a front end knows of an engine: all that does not change while the engine lives. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.events import Pooling
from kvcellar.sampling_params import SamplingParams, check_ids
from kvcellar.text.conversation import NO_PREAMBLE, Preamble
from kvcellar.text.tokens import TextAssets


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model that is served. `mode` is how it runs: "flat" or "solo"."""

    name: str
    path: Path | None
    architecture: str
    context: int
    vocab_size: int
    dtype: str
    device: str
    mode: str
    has_text: bool
    has_chat: bool
    default_sampling: SamplingParams
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])  # by role; empty without a tokenizer
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCard:
    """What makes tokens of the texts of an engine, and texts of its tokens."""

    assets: TextAssets | None
    why_not: str  # the reason, if there are none
    context: int
    text_bytes: int  # CPU memory for tokenizing
    end_ids: frozenset[int] = frozenset()  # tokens that end a completion
    preamble: Preamble = NO_PREAMBLE  # before all messages
    borders: bool = False  # the model can resume only at checkpoints, so where messages begin is found
    replay_bytes: int = 0  # CPU memory for the texts and tokens of chats


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCard:
    """What images a model takes. `why_not`: why none; "": it takes some, which the processor prepares that `path` has,
    and `placeholder` is the token that stands for each row of one."""

    why_not: str = ""
    placeholder: int = -1
    path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """Of one engine."""

    model: ModelCard
    text: TextCard
    padding: int | None  # the padding token, in models that do not count it as a position
    cells: Mapping[str, int]  # of groups that cannot hold a prompt as long as the context: one cell for each token
    vision: VisionCard
    pooling: Pooling | str  # how it embeds, or why it does not
    cache_bytes: int  # most bytes on its device beside weights and adapters
    max_waiting: int  # requests that wait for admission


def default_sampling(defaults: Mapping[str, Any], *, vocab_size: int, model: str) -> SamplingParams:
    """The sampling parameters of requests that set none: from the library, else from the files of the model, else those
    of `SamplingParams`. Raises `ModelRefused` if they name tokens that it does not have: each request would."""
    params = SamplingParams(**defaults)
    try:
        check_ids(params, vocab_size)
    except BadRequest as error:
        raise ModelRefused(f"the default sampling parameters of {model} cannot be followed: {error}") from error
    return params
