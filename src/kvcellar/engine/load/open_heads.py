"""open_heads: heads that draft from the hidden states of the model: its own MTP layers, or an assistant's directory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvcellar.engine.load.allocate import Needs, allocated
from kvcellar.engine.load.capacity import Capacity
from kvcellar.engine.load.open_store import Source
from kvcellar.engine.load.settings import Settings, step_tokens_of
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.assistant_head import AssistantHead
from kvcellar.engine.models.heads.draft_fit import Check, DraftFit, fit_of
from kvcellar.engine.models.heads.heads import OWN, find_head
from kvcellar.engine.models.heads.mtp_head import MtpHead
from kvcellar.engine.models.input_limits import context_of
from kvcellar.engine.models.load import Loaded
from kvcellar.engine.speculate.assistant import AssistantDrafter
from kvcellar.engine.speculate.chain import Key
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.drafter import Drafter
from kvcellar.engine.speculate.head import FLUSH, HISTORY, HeadDrafter
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import named
from kvcellar.memory.memory import Memory
from kvcellar.memory.prefixes import Shares
from kvcellar.memory.store import OpenStore
from kvcellar.progress import report

DEEPEST = 8  # drafts of a head with one layer in a round


class Reads(NamedTuple):
    """What drafters may read of the target: its memory, and the sequences of the completions that are drafted for."""

    memory: Memory
    sequence: Callable[[Key], int | None]


@dataclass(frozen=True, slots=True)
class AssistantDrafts:
    """A network that attends to the target's own cells, and keeps nothing. Its steps take less than the target's."""

    name: str
    fit: DraftFit
    head: AssistantHead
    deepest: int
    context: int

    @property
    def source(self) -> Source:
        return Source(())

    def needs(self) -> None:
        return None

    def made(
        self, capacity: Capacity | None, shares: Shares, reads: Reads, open_store: OpenStore
    ) -> tuple[Drafter, None]:
        how = {"context": self.context, "deepest": self.deepest}
        return AssistantDrafter(self.name, self.head, reads.memory, reads.sequence, **how), None


@dataclass(frozen=True, slots=True)
class MtpDrafts:
    """The model's own MTP layers, with a memory of their own."""

    name: str
    fit: DraftFit
    head: MtpHead
    deepest: int
    context: int
    step_tokens: int
    source: Source

    def needs(self) -> Needs:
        """A step of the layers runs between two of the model, and takes no more than one of these: they are fewer, of
        the same sizes, and have the same output head. Hidden states that wait are added."""
        network, backends = self.head.network, {name: chosen.backend for name, chosen in self.head.chosen.items()}
        state = network.config.get_text_config(decoder=True).hidden_size * network.dtype.itemsize

        def waiting(longest: int, tokens: int, sequences: int) -> int:
            return min(tokens, sequences * min(FLUSH, longest)) * state

        return Needs(
            self.head.shape.groups, network.dtype.itemsize, backends, self.head.device.type, 0, self.context, waiting
        )

    def made(
        self, capacity: Capacity | None, shares: Shares, reads: Reads, open_store: OpenStore
    ) -> tuple[Drafter, DraftMemory]:
        assert capacity is not None, "MTP layers have a memory"
        memory = allocated(self.head.memory, capacity, self.context, self.head.device)
        cache = DraftMemory(memory, ahead=self.head.layers, shares=shares, open_store=open_store)
        drafter = HeadDrafter(
            self.name,
            self.head,
            cache,
            context=self.context,
            history=HISTORY,
            deepest=self.deepest,
            step_tokens=self.step_tokens,
        )
        return drafter, cache


def open_head(
    draft: str | Path, loaded: Loaded, guest: Guest, settings: Settings, checks: Mapping[str, Check]
) -> MtpDrafts | AssistantDrafts | None:
    """The head that `draft` names, which passes `checks`, too; None: it names an ordinary model. Raises `DraftRefused`
    and `ModelNotFound`."""
    found: list[MtpHead | AssistantHead | None] = []

    def load() -> str:
        report("looking for a head")
        found.append(find_head(draft, loaded, guest, named(None)))
        return "a model of its own" if found[0] is None else _described(found[0])

    fit = fit_of(loaded.name, str(draft) if draft == OWN else Path(draft).name, {**checks, "head": load})
    fit.require()
    if (head := found[0]) is None:
        return None
    deepest, context = settings.draft_depth or DEEPEST, context_of(guest.model)
    if isinstance(head, AssistantHead):
        return AssistantDrafts(fit.draft, fit, head, deepest, context)
    if settings.pack and guest.device.type == "cpu":
        pack(head.network.layers)
    if head.layers > 1:
        deepest = min(deepest, head.layers)
    paths = () if loaded.path is None else (loaded.path,)
    # They read what the model computes from its K/V.
    source = Source(paths, f"MTP layers, kv_dtype {settings.kv_dtype}", loaded.multiplied)
    steps = step_tokens_of(settings, guest.device.type)
    return MtpDrafts(fit.draft, fit, head, deepest, context, steps, source)


def _described(head: MtpHead | AssistantHead) -> str:
    if isinstance(head, AssistantHead):
        count = sum(parameter.numel() for parameter in head.network.parameters())
        return f"an assistant with {count:,} parameters, which reads the target's keys and values as by itself"
    count = sum(parameter.numel() for parameter in head.network.layers.parameters())
    return f"MTP layers of its own: {head.layers}, with {count:,} parameters, which compute what they do by themselves"
