"""kv_quality: how storing K/V in fewer bits changes a model's predictions, measured on the model itself.

The model samples a text at temperature 1, with unquantised K/V. Then the text is read again with every storage type,
and the predictions are compared at each position. The text before each prediction is the same, so an early difference
does not affect later ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend
from kvcellar.engine.capacity import sized
from kvcellar.errors import BadRequest, NoBackend
from kvcellar.models.guest import Guest
from kvcellar.models.input_limits import context_of, embedding_rows
from kvcellar.plan import Batch, Feed
from kvcellar.shapes import StoredAs
from kvcellar.spans import Span

WAYS = (
    *("fp8", "fp8+hadamard", "int8", "int8+hadamard", "int4", "int4+hadamard"),
    *("k=fp8", "v=fp8", "k=int8", "v=int8", "k=int4", "k=int4+hadamard", "v=int4"),
)
TOKENS = 256  # of a sample
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


@dataclass(slots=True)
class _Tried:
    """One way of storing K/V, while it is measured."""

    way: str
    guest: Guest
    memory: Memory
    kl: float = 0.0
    same: int = 0


def kv_quality(
    guest: Guest, backends: Sequence[Backend], ways: Sequence[str] = WAYS, *, tokens: int = TOKENS, lines: int = 1
) -> list[KvQuality]:
    """Measure `ways` on `lines` samples of `tokens` tokens each, or of the model's context if that is less."""
    if tokens < 1 or lines < 1:
        raise BadRequest(f"a sample needs at least one line of one token, not {lines} of {tokens}")
    if not guest.shape.groups:  # a purely recurrent model stores no K/V
        return []
    plain = guest.storing(StoredAs(), backends)
    tokens = min(tokens, context_of(guest.model))
    cells = {group.name: lines * tokens for group in guest.shape.groups}
    texts = _written(plain, plain.memory(cells, rows=2 * lines), lines, tokens)
    tried: list[_Tried] = []
    refused: dict[str, str] = {}
    for way in ways:
        try:
            quantised = guest.storing(StoredAs.parse(way), backends)
        except NoBackend as error:
            refused[way] = str(error)
        else:
            tried.append(_Tried(way, quantised, quantised.memory(cells, rows=2 * lines)))
    _compare(plain, plain.memory(cells, rows=2 * lines), tried, texts)
    by_way = {one.way: _result(one, lines * tokens) for one in tried}
    return [by_way[way] if way in by_way else KvQuality(way, 0, 0, None, None, refused[way]) for way in ways]


def _result(tried: _Tried, tokens: int) -> KvQuality:
    size = sum(tried.guest.shape.bytes_per_cell(tried.guest.dtype.itemsize).values())
    return KvQuality(tried.way, size, tokens, tried.kl / tokens, tried.same / tokens)


def _written(guest: Guest, memory: Memory, lines: int, tokens: int) -> dict[int, list[int]]:
    """Texts that the model samples after a random first token."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, embedding_rows(guest.model), (lines,), generator=generator, device="cpu").tolist()
    texts = {seq: [token] for seq, token in enumerate(first)}
    for at in range(tokens - 1):
        for seqs in [list(texts)] if guest.mode == "flat" else [[seq] for seq in texts]:
            logits = _read(guest, memory, {seq: texts[seq][at:] for seq in seqs}, at)
            drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).flatten().tolist()
            for seq, token in zip(seqs, drawn, strict=True):
                texts[seq].append(token)
    return texts


def _compare(plain: Guest, reference: Memory, tried: Sequence[_Tried], texts: Mapping[int, list[int]]) -> None:
    for seq, ids in texts.items():
        for start in range(0, len(ids), CHUNK):
            piece = {seq: ids[start : start + CHUNK]}
            expected = _read(plain, reference, piece, start).log_softmax(-1)
            for one in tried:
                got = _read(one.guest, one.memory, piece, start).log_softmax(-1)
                one.kl += float((expected.exp() * (expected - got)).nan_to_num(torch.inf).sum().clamp(min=0))
                one.same += int((expected.argmax(-1) == got.argmax(-1)).sum())


def _read(guest: Guest, memory: Memory, texts: Mapping[int, list[int]], start: int) -> Tensor:
    """Compute and commit pieces that begin at `start`. Returns the logits [T,V] of all their tokens in float32."""
    plan = memory.begin(Batch(tuple(Feed(seq, Span(start, start + len(ids))) for seq, ids in texts.items())))
    ids = torch.tensor([token for piece in texts.values() for token in piece], device=guest.device)
    try:
        logits = guest.forward(memory, plan, ids, torch.arange(len(ids), device=guest.device))
        memory.commit()
    except BaseException:
        if memory.step is not None:
            memory.abandon()
        raise
    return logits.float()
