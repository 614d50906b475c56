"""open_heads: heads that draft from the hidden states of the model: its own MTP layers, or an assistant's directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcellar.attention.choose import named
from kvcellar.engine.allocate import Needs, allocated
from kvcellar.engine.capacity import Capacity
from kvcellar.engine.draft_memory import DraftMemory
from kvcellar.engine.open_store import Source
from kvcellar.engine.settings import Settings
from kvcellar.engine.shares import Shares
from kvcellar.kernels.packed import pack
from kvcellar.models.draft_fit import Check, DraftFit, fit_of
from kvcellar.models.guest import Guest
from kvcellar.models.heads import find_head
from kvcellar.models.input_limits import context_of
from kvcellar.models.load import Loaded
from kvcellar.models.mtp_head import MtpHead
from kvcellar.progress import report
from kvcellar.speculate.drafter import Drafter
from kvcellar.speculate.head import FLUSH, HeadDrafter

DEEPEST = 8  # drafts of a head with one layer in a round


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

        return Needs(self.head.shape.groups, network.dtype.itemsize, backends, 0, self.context, waiting)

    def made(self, capacity: Capacity | None, shares: Shares) -> tuple[Drafter, DraftMemory]:
        assert capacity is not None, "MTP layers have a memory"
        memory = allocated(self.head.memory, capacity, self.context, self.head.device)
        cache = DraftMemory(memory, ahead=self.head.layers, shares=shares)
        deepest, context = self.deepest, self.context
        return HeadDrafter(
            self.name, self.head, cache, context=context, deepest=deepest, step_tokens=self.step_tokens
        ), cache


def open_head(
    draft: str | Path, loaded: Loaded, guest: Guest, settings: Settings, checks: Mapping[str, Check]
) -> MtpDrafts | None:
    """The head that `draft` names, which passes `checks`, too; None: it names an ordinary model. Raises `DraftRefused`
    and `ModelNotFound`."""
    found: list[MtpHead | None] = []

    def load() -> str:
        report("looking for a head")
        found.append(find_head(draft, loaded, guest, named(None)))
        return "a model of its own" if found[0] is None else _described(found[0])

    fit = fit_of(loaded.name, str(draft), {**checks, "head": load})
    fit.require()
    if (head := found[0]) is None:
        return None
    if settings.pack and guest.device.type == "cpu":
        pack(head.network.layers)
    deepest = settings.draft_depth or DEEPEST
    if head.layers > 1:
        deepest = min(deepest, head.layers)
    paths = () if loaded.path is None else (loaded.path,)
    source = Source(
        paths, f"MTP layers, kv_dtype {settings.kv_dtype}"
    )  # they read what the model computes from its K/V
    return MtpDrafts(str(draft), fit, head, deepest, context_of(guest.model), settings.step_tokens, source)


def _described(head: MtpHead) -> str:
    count = sum(parameter.numel() for parameter in head.network.layers.parameters())
    return f"MTP layers of its own: {head.layers}, with {count:,} parameters, which compute what they do by themselves"
