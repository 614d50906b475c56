"""kv_quality: how storing K/V in fewer bits changes a model's predictions, measured on the model itself.

The model samples a text at temperature 1, with unquantised K/V. Then the text is computed again with every storage
type, and the predictions are compared at each position. The text before each prediction is the same, so an early
difference does not affect later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.engine.load.capacity import sized
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import context_of, embedding_rows
from kvcellar.errors import BadRequest, NoBackend
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import StoredAs
from kvcellar.memory.spans import Span

WAYS = (
    *("fp8", "fp8+hadamard", "int8", "int8+hadamard", "int4", "int4+hadamard"),
    *("k=fp8", "v=fp8", "k=int8", "v=int8", "k=int4", "k=int4+hadamard", "v=int4"),
)
TOKENS = 256  # of a sample
SMALL = 30_000_000  # parameters of a model that is measured within seconds
CHUNK = 64  # rows compared at once: bounds the size of the logits


@dataclass(frozen=True, slots=True)
class KvQuality:
    """One way of storing K/V. If no backend supports it, `refused` is the reason, and there are no measurements.

    `kl` is the mean KL divergence in nats of the predictions from those with unquantised K/V; `agreement` is the
    fraction of positions at which the most likely token is the same.
    """

    stored: str
    bytes_per_token: int
    tokens: int
    kl: float | None
    agreement: float | None
    refused: str | None = None

    def __str__(self) -> str:
        if self.kl is None or self.agreement is None:
            return f"{self.stored:16} refused: {self.refused}"
        return (
            f"{self.stored:16} {sized(self.bytes_per_token):>20} a token, KL {self.kl:.1e} nats, "
            f"same most likely token {self.agreement:.1%}"
        )


def is_small(parameters: int) -> bool:
    """Whether a model is measured by default."""
    return parameters <= SMALL


@dataclass(slots=True)
class _Tried:
    """One way of storing K/V, while it is measured."""

    way: str
    guest: Guest
    memory: Memory
    kl: float = 0.0
    same: int = 0


def kv_quality(
    guest: Guest, backends: Sequence[Backend], ways: Sequence[str] = WAYS, *, tokens: int = TOKENS
) -> list[KvQuality]:
    """Measure `ways` on a sample of `tokens` tokens, or of the model's context if that is less."""
    if tokens < 1:
        raise BadRequest(f"a sample needs at least one token, not {tokens}")
    if not guest.shape.groups:  # a purely recurrent model stores no K/V
        return []
    plain = guest.storing(StoredAs(), backends)
    tokens = min(tokens, context_of(guest.model))
    cells = {group.name: tokens for group in guest.shape.groups}
    text = _sampled(plain, plain.memory(cells, rows=2), tokens)
    tried: list[_Tried] = []
    refused: dict[str, str] = {}
    for way in ways:
        try:
            quantised = guest.storing(StoredAs.parse(way), backends)
        except NoBackend as error:
            refused[way] = str(error)
        else:
            tried.append(_Tried(way, quantised, quantised.memory(cells, rows=2)))
    _compare(plain, plain.memory(cells, rows=2), tried, text)
    by_way = {one.way: _result(one, tokens) for one in tried}
    return [by_way[way] if way in by_way else KvQuality(way, 0, 0, None, None, refused[way]) for way in ways]


def _result(tried: _Tried, tokens: int) -> KvQuality:
    size = sum(tried.guest.shape.bytes_per_cell(tried.guest.dtype.itemsize).values())
    return KvQuality(tried.way, size, tokens, tried.kl / tokens, tried.same / tokens)


def _sampled(guest: Guest, memory: Memory, tokens: int) -> list[int]:
    """A text that the model samples after a random first token."""
    generator = torch.Generator().manual_seed(0)
    text: list[int] = torch.randint(0, embedding_rows(guest.model), (1,), generator=generator, device="cpu").tolist()
    for at in range(tokens - 1):
        logits = _logits(guest, memory, text[at:], at)
        text += torch.multinomial(logits[-1].softmax(-1).cpu(), 1, generator=generator).tolist()
    return text


def _compare(plain: Guest, reference: Memory, tried: Sequence[_Tried], text: Sequence[int]) -> None:
    for start in range(0, len(text), CHUNK):
        piece = text[start : start + CHUNK]
        expected = _logits(plain, reference, piece, start).log_softmax(-1)
        for one in tried:
            got = _logits(one.guest, one.memory, piece, start).log_softmax(-1)
            one.kl += float((expected.exp() * (expected - got)).nan_to_num(torch.inf).sum().clamp(min=0))
            one.same += int((expected.argmax(-1) == got.argmax(-1)).sum())


def _logits(guest: Guest, memory: Memory, ids: Sequence[int], start: int) -> Tensor:
    """Compute and commit the tokens `ids` from position `start` on. Returns their logits [T,V] in float32."""
    with memory.stepping(Batch((Feed(0, Span(start, start + len(ids))),))) as plan:
        logits = guest.forward(memory, plan, ids, range(len(ids)))
        memory.commit()
    return logits.float()
