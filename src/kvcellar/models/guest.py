"""guest: a transformers model that runs on our memory, after it has shown that it does so rightly.

Always true:
  * a guest exists only if a mixed batch through our memory (chunked prompts, a fork, decoding) gave the logits of the
    model's own eager forward over the same tokens, on the real weights;
  * `mode` says how it is run: "flat" (all sequences in one row, our attention) or "solo" (one sequence per forward, its
    own attention); `refused` says why flat was refused to a solo guest.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.attention.choose import Chosen, choose
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend
from kvcellar.errors import KvcellarError, ModelRefused
from kvcellar.models.seam import ATTENTION, FlatDoor, SoloDoor, opened, register
from kvcellar.models.shape import PROBE_TOKENS, ProbeDoor, Shape, causal_shape, describe
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.spans import Span

Mode = Literal["flat", "solo"]
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test saw: the largest difference of logits, relative to max(1, max|logit|), and the bound."""

    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.bound


class Guest:
    """Runs one model. Made by `adopt`; call `forward` between `Memory.begin` and `commit`."""

    def __init__(
        self,
        model: PreTrainedModel,
        shape: Shape,
        mode: Mode,
        chosen: Mapping[str, Chosen],
        *,
        offsets: bool = True,
        refused: str | None = None,
    ) -> None:
        self.model, self.shape, self.mode, self.chosen, self.refused = model, shape, mode, dict(chosen), refused
        self._offsets = offsets
        self.verdict: Verdict | None = None
        self._accepts = frozenset(inspect.signature(model.forward).parameters)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def backends(self) -> dict[str, Backend]:
        return {name: chosen.backend for name, chosen in self.chosen.items()}

    def memory(self, cells: Mapping[str, int]) -> Memory:
        """A memory of this model's shape."""
        return Memory(self.shape.groups, cells=cells, dtype=self.dtype, device=self.device, backend=self.backends)

    def seen(self, positions: Tensor) -> int | Tensor:
        """What the model is told when it asks how many tokens came before its rows at `positions` [T].

        With a range over the rows added, the answer gives the real positions. Code that wants a number is told 0.
        """
        return positions - torch.arange(len(positions), device=positions.device) if self._offsets else 0

    @torch.inference_mode()
    def forward(self, memory: Memory, plan: Plan, ids: Tensor, want: Tensor) -> Tensor:
        """Run the open step of `memory`: ids [T] -> logits [len(want), V] of the rows in `want`."""
        positions = torch.tensor(plan.positions, dtype=torch.long, device=self.device)
        if self.mode == "flat":
            door = FlatDoor(memory, self.seen(positions), self.shape.bindings)
        else:
            door = SoloDoor(memory, plan)
        with opened(door) as cache:
            inputs: dict[str, Any] = {"input_ids": ids[None], "past_key_values": cache, "use_cache": True}
            if "position_ids" in self._accepts:
                inputs["position_ids"] = positions[None]
            if "logits_to_keep" in self._accepts:
                return self.model(**inputs, logits_to_keep=want).logits[0]
            return self.model(**inputs).logits[0].index_select(0, want)


def adopt(model: PreTrainedModel, backends: Sequence[Backend]) -> Guest:
    """Learn the model's shape and test it. Raises `ModelRefused`, with the reason of every way that was tried."""
    model.eval().requires_grad_(False)
    register()
    refused: dict[str, str] = {}
    ways = {
        "flat": lambda: _flat(model, backends, offsets=True),
        "flat, told that nothing came before": lambda: _flat(model, backends, offsets=False),
        "solo": lambda: _solo(model, backends, refused["flat"]),
    }
    for mode, way in ways.items():
        try:
            guest = way()
            guest.verdict = _self_test(guest)
        except (KvcellarError, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            # Whatever a stranger's code raises under our doors means that this way does not work; it is reported.
            refused[mode] = f"{type(error).__name__}: {error}" if not isinstance(error, KvcellarError) else str(error)
            continue
        if guest.verdict.passed:
            return guest
        refused[mode] = (
            f"its logits differ by {guest.verdict.difference:.1e} from its own forward ({guest.verdict.bound:.0e})"
        )
    reasons = "; ".join(f"{mode}: {why}" for mode, why in refused.items())
    raise ModelRefused(f"{type(model).__name__} cannot be served. {reasons}")


def context_of(model: PreTrainedModel) -> int:
    """Positions that the model is made for.

    RoPE kinds that change all frequencies once a sequence is longer than some length (longrope, dynamic) would make
    keys stored before that wrong, so the context ends there.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
    sizes = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    context = sizes[0] if sizes else 2**17
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            context = min(context, int(original or context))
    return context


def embedding_rows(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return []
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, Mapping)]


def _flat(model: PreTrainedModel, backends: Sequence[Backend], *, offsets: bool) -> Guest:
    if not model._can_set_attn_implementation():
        raise ModelRefused("its attention does not go through transformers' attention interface")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelRefused("its forward takes no positions")
    model.set_attn_implementation(ATTENTION)
    door = ProbeDoor(context_of(model))
    _probe(model, door)
    shape = describe(door, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type)
    return Guest(model, shape, "flat", _choose(shape, backends), offsets=offsets)


def _choose(shape: Shape, backends: Sequence[Backend]) -> dict[str, Chosen]:
    return {name: choose(ask, backends) for name, ask in shape.asks.items()}


class _StoreProbe(ProbeDoor):
    """For a model with its own attention: only what it stores is watched."""

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        raise ModelRefused("a model that runs solo must use its own masks")


def _solo(model: PreTrainedModel, backends: Sequence[Backend], why: str) -> Guest:
    _own_attention(model)
    door = _StoreProbe(context_of(model))
    _probe(model, door)
    stored = {layer: (s.k, s.v) for layer, s in door.stored.items()}
    if not stored:
        raise ModelRefused("its forward stores no keys and values through the cache, so there is nothing to remember")
    shape = causal_shape(stored, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type)
    return Guest(model, shape, "solo", _choose(shape, backends), refused=why)


def _own_attention(model: PreTrainedModel) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


@torch.inference_mode()
def _probe(model: PreTrainedModel, door: ProbeDoor) -> None:
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % embedding_rows(model)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(PROBE_TOKENS, device=model.device)[None]
    with opened(door) as cache:
        model(**inputs, past_key_values=cache)


# -- the self-test ----------------------------------------------------------------------------------------------------


def _self_test(guest: Guest) -> Verdict:
    """A mixed batch through a small memory of its own, against the model's eager forward over each sequence."""
    most = min(24, context_of(guest.model))
    size = embedding_rows(guest.model)
    drawn = torch.randint(0, size, (3 * most,), generator=torch.Generator().manual_seed(0)).tolist()
    half = most // 2
    texts = {
        0: drawn[:most],
        1: drawn[: half - 2] + drawn[most : most + 6],
        2: drawn[2 * most : 2 * most + max(2, half // 2)],
    }
    ours = _played(guest, texts, half)
    theirs = _judged(guest, texts)
    scale = max(1.0, max(float(logits.abs().max()) for logits in theirs.values()))
    gaps = torch.cat([(ours[seq] - theirs[seq]).abs().amax(-1) for seq in texts]) / scale
    # In half precision a router's near tie may fall either way on a token: judge by the middle, not by the worst.
    worst = gaps.max() if guest.dtype is torch.float32 else gaps.median()
    return Verdict(float(worst) if bool(torch.isfinite(gaps).all()) else float("inf"), TOLERANCE[guest.dtype])


def _played(guest: Guest, texts: Mapping[int, list[int]], half: int) -> dict[int, Tensor]:
    """Logits [L,V] of each text: 0 and 2 in two chunks, 1 forked from 0, several sequences in every step."""
    memory = guest.memory({group.name: 4 * len(texts[0]) for group in guest.shape.groups})
    got: dict[int, list[Tensor]] = {seq: [] for seq in texts}

    def step(*feeds: Feed) -> None:
        for batch in [feeds] if guest.mode == "flat" else [(feed,) for feed in feeds]:
            plan = memory.begin(Batch(batch))
            ids = [texts[f.seq][pos] for f in batch for pos in range(f.pos.start, f.pos.end)]
            rows = torch.arange(len(ids), device=guest.device)
            logits = guest.forward(memory, plan, torch.tensor(ids, device=guest.device), rows)
            memory.commit()
            for feed, part in zip(batch, logits.float().split([len(f.pos) for f in batch]), strict=True):
                got[feed.seq].append(part)

    step(Feed(0, Span(0, half)), Feed(2, Span(0, 1)))
    shared = memory.fork(0, 1, upto=half - 2)
    got[1].append(torch.cat(got[0])[:shared])
    step(Feed(1, Span(shared, len(texts[1]) - 1)), Feed(0, Span(half, half + 1)), Feed(2, Span(1, len(texts[2]))))
    step(Feed(0, Span(half + 1, len(texts[0]))), Feed(1, Span(len(texts[1]) - 1, len(texts[1]))))
    return {seq: torch.cat(parts) for seq, parts in got.items()}


@torch.inference_mode()
def _judged(guest: Guest, texts: Mapping[int, list[int]]) -> dict[int, Tensor]:
    model: nn.Module = guest.model
    _own_attention(guest.model)
    try:
        return {
            seq: model(input_ids=torch.tensor([ids], device=guest.device), use_cache=False).logits[0].float()
            for seq, ids in texts.items()
        }
    finally:
        if guest.mode == "flat":
            guest.model.set_attn_implementation(ATTENTION)
