"""card: what a front end knows of an engine: all that does not change while the engine lives. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.engine.defaults import default_sampling
from kvcellar.engine.settings import text_bytes_of
from kvcellar.events import Pooling
from kvcellar.sample.params import SamplingParams
from kvcellar.snapshot import Snapshot
from kvcellar.text.assets import TextAssets
from kvcellar.text.preamble import Preamble
from kvcellar.text.stored_texts import first_of

if TYPE_CHECKING:
    from kvcellar.engine.build import Built


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
class EngineCard:
    """Of one engine."""

    model: ModelCard
    end_ids: frozenset[int]  # tokens that end a completion
    padding: int | None  # the padding token, in models that do not count it as a position
    cells: Mapping[str, int]  # of groups that cannot hold a prompt as long as the context: one cell for each token
    pooling: Pooling | str  # how it embeds, or why it does not
    cache_bytes: int  # most bytes on its device beside weights and adapters
    capacity: str  # what fits into the granted bytes: a line with the sum, and one for each part
    max_waiting: int  # requests that wait for admission
    # of its text:
    text: TextAssets | None
    without_text: str  # the reason, if there is none
    preamble: Preamble
    borders: bool  # the model can resume only at checkpoints, so where messages begin is found
    text_bytes: int  # CPU memory for tokenizing
    replay_bytes: int  # CPU memory for the texts and tokens of chats
    stored: tuple[Snapshot, ...]  # what its store has, as far as `replay_bytes` allow


def card_of(built: "Built") -> EngineCard:
    """Before the engine runs. Raises `ModelRefused` if the model has default sampling parameters that it cannot
    follow."""
    from kvcellar.models.pooling import NONE, pooling_of  # imports transformers, so not at the top

    loaded, settings, memory, store = built.loaded, built.settings, built.memory, built.loop.manager.store
    context, cells = built.intake.context, built.capacity.cells
    return EngineCard(
        model=model_card(built),
        end_ids=loaded.end_ids,
        padding=built.intake.padding,
        cells={
            group.name: cells[group.name]
            for group in memory.storage.groups
            if group.layout.most_cells(context, 1) > cells[group.name]
        },
        pooling=NONE if loaded.path is None else pooling_of(loaded.path),
        cache_bytes=_cache_bytes(built),
        capacity=str(built.capacity),
        max_waiting=settings.max_waiting,
        text=loaded.text,
        without_text=loaded.without_text,
        preamble=built.preamble,
        borders=memory.rows.capacity is not None or any(group.bounded for group in memory.storage.groups),
        text_bytes=text_bytes_of(settings, context) // 2,
        replay_bytes=settings.replay_bytes,
        stored=first_of(store.catalogue, settings.replay_bytes) if store is not None else (),
    )


def model_card(built: "Built") -> ModelCard:
    guest, loaded, text, vocab_size = built.guest, built.loaded, built.loaded.text, built.intake.vocab_size
    return ModelCard(
        name=loaded.name,
        path=loaded.path,
        architecture=type(guest.model).__name__,
        context=built.intake.context,
        vocab_size=vocab_size,
        dtype=str(guest.dtype).removeprefix("torch."),
        device=str(guest.device),
        mode=guest.mode,
        has_text=text is not None,
        has_chat=text is not None and text.chat_template is not None,
        default_sampling=default_sampling(loaded.defaults, vocab_size=vocab_size, model=loaded.name),
        special_tokens=text.special if text is not None else {},
        chat_template=text.chat_template if text is not None else None,
    )


def _cache_bytes(built: "Built") -> int:
    """Cells, states, and the largest step, those of drafts included, and on a CPU what evicted prefixes may take."""
    drafts = built.draft_capacity.total if built.draft_capacity is not None else 0
    host = (built.settings.host_bytes or 0) if built.guest.device.type == "cpu" else 0
    return built.capacity.total + drafts + host
