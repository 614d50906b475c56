"""guest: a transformers model that runs on our memory, after it has shown that it does so rightly.

Always true:
  * a guest exists only if a mixed batch through our memory (chunked prompts, a fork, decoding) gave the logits of the
    model's own eager forward over the same tokens, on the real weights;
  * `mode` says how it is run: "flat" (all sequences in one row, our attention) or "solo" (one sequence per forward, its
    own attention); `refused` says why flat was refused to a solo guest.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from math import isfinite
from threading import RLock
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.attention.choose import Chosen, choose
from kvcellar.cache.memory import Memory
from kvcellar.contracts import Backend, StoredAs
from kvcellar.errors import KvcellarError, ModelRefused
from kvcellar.models.facts import context_of, embedding_rows, first_position, random_text
from kvcellar.models.mixers import install, uninstall
from kvcellar.models.own_layers import fresh_layers
from kvcellar.models.quiet import quiet
from kvcellar.models.rope import with_rotations
from kvcellar.models.seam import ATTENTION, Door, FlatDoor, SoloDoor, current_door, opened, register
from kvcellar.models.shape import PROBE_TOKENS, ProbeDoor, Shape, causal_shape, describe, differing
from kvcellar.models.tenancy import Tenancy, Tenant, attentions, set_attentions
from kvcellar.plan import Batch, Feed, Plan
from kvcellar.progress import report
from kvcellar.spans import Span

Mode = Literal["flat", "solo"]
TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2,
}  # fmt: skip
LEAST_CONTEXT = 8  # positions without which the self-test has nothing to test
STRANGE = (
    # What a stranger's code may raise under our doors. It means that a way does not work, and is reported.
    KvcellarError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError,
    ImportError, OSError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test saw: the largest difference of logits, relative to max(1, max|logit|), and the bound."""

    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.bound


def cache_argument(accepts: frozenset[str]) -> str:
    """What a model's forward calls its cache; some that have only recurrent layers call it otherwise."""
    return "past_key_values" if "past_key_values" in accepts or "cache_params" not in accepts else "cache_params"


class Guest:
    """Runs one model. Made by `adopt`; call `forward` between `Memory.begin` and `commit`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tenancy: Tenancy,
        shape: Shape,
        mode: Mode,
        chosen: Mapping[str, Chosen],
        *,
        offsets: bool = True,
        refused: str | None = None,
    ) -> None:
        self.model, self.shape, self.mode, self.chosen, self.refused = model, shape, mode, dict(chosen), refused
        self._offsets = offsets
        self._tenancy, self._tenant = tenancy, Tenant(mode, refused)
        self.verdict: Verdict | None = None
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._first = first_position(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def lock(self) -> RLock:
        """Held by whoever runs the network or changes something about it. `forward` takes it by itself."""
        return self._tenancy.lock

    @property
    def backends(self) -> dict[str, Backend]:
        return {name: chosen.backend for name, chosen in self.chosen.items()}

    def memory(
        self,
        cells: Mapping[str, int],
        *,
        rows: int = 0,
        captures: int = 0,
        spare_rows: int | None = None,
        limits: int | None = None,
        max_bytes: int | None = None,
    ) -> Memory:
        """A memory of this model's shape. The rest is as in `Memory`; `rows` are needed by recurrent layers only."""
        return Memory(
            self.shape.groups,
            cells=cells,
            dtype=self.dtype,
            device=self.device,
            backend=self.backends,
            recurrent=self.shape.recurrent,
            rows=rows,
            captures=captures,
            spare_rows=spare_rows,
            limits=limits,
            max_bytes=max_bytes,
        )

    def storing(self, stored: StoredAs, backends: Sequence[Backend]) -> "Guest":
        """The same model, its K/V stored as `stored` from now on. Raises `NoBackend` if nobody can read that."""
        twin = copy(self)
        twin.shape = self.shape.storing(stored)
        twin.chosen = _choose(twin.shape, backends)
        return twin

    def settle(self) -> None:
        """It stays. Until it is released, its network is there for guests only."""
        self._tenancy.enter(self._tenant)

    def release(self) -> None:
        """Leave the network: if no other guest serves it, it is what it was before the first of them. The twins that
        `storing` made leave with it. May be called again."""
        self._tenancy.leave(self._tenant)

    def seen(self, positions: Tensor) -> int | Tensor:
        """What the model is told when it asks how many tokens came before its rows at `positions` [T].

        With a range over the rows added, the answer gives the real positions. Code that wants a number is told 0.
        """
        return positions - torch.arange(len(positions), device=positions.device) if self._offsets else 0

    @torch.inference_mode()
    def forward(self, memory: Memory, plan: Plan, ids: Tensor, want: Tensor) -> Tensor:
        """Run the open step of `memory`: ids [T] -> logits [len(want), V] of the rows in `want`."""
        positions = torch.tensor(plan.positions, dtype=torch.long, device=self.device)
        with self.lock:  # somebody may be testing the network with its own attention
            if self.mode == "flat":
                return self._through(
                    FlatDoor(memory, plan, self.seen(positions), self.shape.bindings), ids, positions, want
                )
            door = SoloDoor(memory, plan, fresh_layers(self.model))
            logits = self._through(door, ids, positions, want)
            door.put()
            return logits

    def _through(self, door: Door, ids: Tensor, positions: Tensor, want: Tensor) -> Tensor:
        with opened(door) as cache:
            inputs: dict[str, Any] = {"input_ids": ids[None], cache_argument(self._accepts): cache, "use_cache": True}
            if "position_ids" in self._accepts:
                inputs["position_ids"] = positions[None] + self._first
            if "logits_to_keep" in self._accepts:
                return self.model(**inputs, logits_to_keep=want).logits[0]
            return self.model(**inputs).logits[0].index_select(0, want)


def adopt(model: PreTrainedModel, backends: Sequence[Backend]) -> Guest:
    """Learn the model's shape and test it. Raises `ModelRefused`, with the reason of every way that was tried.

    The model is in eval mode, without gradients and with our attention, until its guest is released. One that is
    refused is as it was. One that has another guest goes on serving that, and is run as that runs it, or refused: it
    can have only one attention. The forwards of other guests wait until it is adopted.
    """
    name = type(model).__name__
    if model.dtype not in TOLERANCE:
        raise ModelRefused(f"{name} cannot be served: its weights are {model.dtype}, not a float of 16, 32 or 64 bits")
    if context_of(model) < LEAST_CONTEXT:
        raise ModelRefused(
            f"{name} cannot be served: its context of {context_of(model)} positions is too short to test"
        )
    report("testing the network")
    register()
    refused: dict[str, str] = {}
    installed: list[nn.Module] = []  # by this adoption
    with Tenancy.visited(model) as tenancy, tenancy.lock, quiet(), ExitStack() as undo:
        ways = {
            "flat": lambda: _flat(model, tenancy, backends, installed, offsets=True),
            "flat, told that nothing came before": lambda: _flat(model, tenancy, backends, installed, offsets=False),
            "solo": lambda: _solo(model, tenancy, backends, refused["flat"]),
        }
        undo.callback(set_attentions, attentions(model))
        undo.callback(uninstall, installed)
        model.eval().requires_grad_(False)
        try:
            trial = _trial(model, seed=0)
        except STRANGE as error:
            raise ModelRefused(f"{name} cannot be served: its own forward fails. {_told(error)}") from error
        for mode, way in ways.items():
            other = tenancy.tenant
            found = _attempt(way, trial) if other is None or mode.startswith(other.mode) else _told_by(other)
            if isinstance(found, Guest):
                found.shape = with_rotations(found)
                undo.pop_all()
                tenancy.afterwards(uninstall, installed)
                found.settle()
                return found
            refused[mode] = found
    raise ModelRefused(_refusal(model, refused))


def _told_by(other: Tenant) -> str:
    """Why a network that has a guest is not run in another way."""
    return other.refused or f"it has a guest that runs it {other.mode}, and it can have only one attention at a time"


def _attempt(way: Callable[[], Guest], trial: "_Trial") -> Guest | str:
    """A guest that passed, or why this way does not work."""
    try:
        guest = way()
        verdict = _verdict(guest, trial)
        if not verdict.passed and isfinite(verdict.difference):
            # A router's tie may fall either way, once in a while. What is wrong is wrong with other tokens, too.
            verdict = _verdict(guest, _trial(guest.model, seed=1))
    except STRANGE as error:
        return _told(error)
    guest.verdict = verdict
    if verdict.passed:
        return guest
    return f"its logits differ by {verdict.difference:.1e} from its own forward ({verdict.bound:.0e} is allowed)"


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, KvcellarError) else f"its code raised {type(error).__name__}: {error}"


def _refusal(model: PreTrainedModel, refused: Mapping[str, str]) -> str:
    """Every reason once, with the first way that it holds for where they differ."""
    ways: dict[str, str] = {}
    for mode, why in refused.items():
        ways.setdefault(why, mode)
    reasons = [f"{mode}: {why}" for why, mode in ways.items()] if len(ways) > 1 else list(ways)
    return f"{type(model).__name__} cannot be served: " + "; ".join(reasons)


def _flat(
    model: PreTrainedModel, tenancy: Tenancy, backends: Sequence[Backend], installed: list[nn.Module], *, offsets: bool
) -> Guest:
    """Adds to `installed` the mixers that it lets the doors call."""
    context = context_of(model)
    near = ProbeDoor(context)
    if not model._can_set_attn_implementation():
        raise ModelRefused("its attention does not go through transformers' attention interface")
    _our_attention(model)
    _probe(model, near, range(PROBE_TOKENS))
    if near.reads and "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelRefused("its forward takes no positions")
    installed += install(list(near.mixers), current_door)
    shape = describe(near, dtype=str(model.dtype).removeprefix("torch."), device=model.device.type)
    guest = Guest(model, tenancy, shape, "flat", _choose(shape, backends), offsets=offsets)
    positions = [*range(PROBE_TOKENS - 1), context - 1]
    # A model that is told nothing about what came before must not care what it is told.
    past = guest.seen(torch.tensor(positions, device=model.device)) if offsets else context - PROBE_TOKENS
    far = ProbeDoor(context, past)
    _probe(model, far, positions)
    if (why := differing(near, far, PROBE_TOKENS - 1)) is not None:
        raise ModelRefused(why)
    return guest


def _choose(shape: Shape, backends: Sequence[Backend]) -> dict[str, Chosen]:
    return {name: choose(ask, backends) for name, ask in shape.asks.items()}


class StoreProbe(ProbeDoor):
    """For a model with its own attention: only what it stores is watched."""

    @property
    def held(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By layer, k [1,G,T,D] and v [1,G,T,Dv]."""
        return {layer: (stored.k, stored.v) for layer, stored in self.stored.items()}

    def mask(self, rule: Any, local_size: int | None, q_length: int, device: torch.device) -> Tensor:
        raise ModelRefused("a model that runs solo must use its own masks")


def _solo(model: PreTrainedModel, tenancy: Tenancy, backends: Sequence[Backend], why: str) -> Guest:
    _own_attention(model)
    shape = stored_shape(model, fresh=fresh_layers(model))
    return Guest(model, tenancy, shape, "solo", _choose(shape, backends), refused=why)


def stored_shape(model: PreTrainedModel, *, fresh: Callable[[int], Any] | None = None) -> Shape:
    """What a model stores, told by a small forward with the attention that it has. Raises `ModelRefused`.

    So it does for layers that store more of a token than keys and values (an indexer's keys, say), unless the caller
    keeps that, too, and says with `fresh` how cache layers of the model's own class are made.
    """
    door = StoreProbe(context_of(model), fresh=fresh)
    _probe(model, door, range(PROBE_TOKENS))
    if not door.held and not door.states:
        raise ModelRefused("its forward stores nothing through the cache, so there is nothing to remember")
    dtype = str(model.dtype).removeprefix("torch.")
    return causal_shape(door.held, door.recurrent, beside=door.planes, dtype=dtype, device=model.device.type)


def _own_attention(model: PreTrainedModel) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")


def _our_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation(ATTENTION)


@torch.inference_mode()
def _probe(model: PreTrainedModel, door: ProbeDoor, positions: Sequence[int]) -> None:
    ids = (torch.arange(PROBE_TOKENS, device=model.device)[None] + first_position(model)) % embedding_rows(model)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    accepts = frozenset(inspect.signature(model.forward).parameters)
    if "position_ids" in accepts:
        inputs["position_ids"] = torch.tensor(positions, device=model.device)[None] + first_position(model)
    watches = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, _: door.running.append(module)),
            module.register_forward_hook(lambda *_: [door.running.pop()] and None, always_call=True),
        )
    ]
    try:
        with opened(door) as cache:
            model(**inputs, **{cache_argument(accepts): cache})
    finally:
        for watch in watches:
            watch.remove()


# -- the self-test ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Trial:
    """Token ids of three sequences, and the logits [L,V] of the model's own eager forward over each."""

    texts: Mapping[int, list[int]]
    logits: Mapping[int, Tensor]


def _trial(model: PreTrainedModel, seed: int) -> _Trial:
    """Sequence 1 begins as 0 does; 2 is of its own. Leaves the model with its own attention."""
    most = min(24, context_of(model))
    draw = torch.Generator().manual_seed(seed)
    ids = random_text(model, 3 * most, draw)
    half = most // 2
    texts = {0: ids[:most], 1: ids[: half - 2] + ids[most : most + 6], 2: ids[2 * most : 2 * most + half]}
    _own_attention(model)
    with torch.inference_mode():
        logits = {
            seq: model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0].float()
            for seq, text in texts.items()
        }
    if not all(bool(rows.isfinite().all()) for rows in logits.values()):
        raise ModelRefused(
            f"its logits are not finite: the weights are damaged, or {model.dtype} is too narrow for them"
        )
    return _Trial(texts, logits)


def _verdict(guest: Guest, trial: _Trial) -> Verdict:
    """A mixed batch through a small memory of its own, against the trial."""
    if guest.mode == "flat":
        _our_attention(guest.model)
    scale = max(1.0, max(float(logits.abs().max()) for logits in trial.logits.values()))
    gaps = [
        (ours - theirs).abs().amax(-1) / scale
        for seq, parts in _played(guest, trial.texts).items()
        for ours, theirs in zip(parts, trial.logits[seq].split([len(part) for part in parts]), strict=True)
    ]
    bound = TOLERANCE[guest.dtype]
    if not all(bool(gap.isfinite().all()) for gap in gaps):
        return Verdict(float("inf"), bound)
    return Verdict(worst(gaps, guest.dtype), bound)


def worst(gaps: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The difference that counts, of the gaps [l] of the rows of feeds: the largest, or in half precision a middle one.

    A router's near tie falls either way on a token now and then there: each feed is judged by its middle row, not its
    worst, and the feeds of a token or two together.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return max((float(gap.max()) for gap in gaps), default=0.0)
    short = [gap for gap in gaps if len(gap) < 5]
    judged = [*([torch.cat(short)] if short else []), *(gap for gap in gaps if len(gap) >= 5)]
    return max((float(gap.median()) for gap in judged), default=0.0)


def _played(guest: Guest, texts: Mapping[int, list[int]]) -> dict[int, list[Tensor]]:
    """Logits [l,V] of each text by feed: chunks of prompts beside decoding, 1 forked from 0, then single tokens."""
    cells = {group.name: 4 * len(texts[0]) for group in guest.shape.groups}
    memory = guest.memory(cells, rows=8, captures=1)
    got: dict[int, list[Tensor]] = {seq: [] for seq in texts}
    a, b, c = (len(texts[seq]) for seq in texts)
    half = a // 2

    def forward(feeds: Sequence[Feed], wanted: int | None = None) -> Tensor:
        """Rows are asked for from the last to the first, to see that the model heeds what is asked."""
        plan = memory.begin(Batch(tuple(feeds)))
        read = [texts[f.seq][pos] for f in feeds for pos in range(f.pos.start, f.pos.end)]
        ids = torch.tensor(read, device=guest.device)
        rows = torch.arange(len(ids), device=guest.device).flip(0)[:wanted]
        return guest.forward(memory, plan, ids, rows).float().flip(0)

    def step(*feeds: Feed) -> None:
        for part in [feeds] if guest.mode == "flat" else [(feed,) for feed in feeds]:
            logits = forward(part).split([len(feed.pos) for feed in part])
            memory.commit()
            for feed, rows in zip(part, logits, strict=True):
                got[feed.seq].append(rows)

    step(Feed(0, Span(0, half - 2), capture=True), Feed(2, Span(0, 1)))
    step(Feed(0, Span(half - 2, half)))
    shared = memory.fork(0, 1, upto=half - 2)
    if shared:
        got[1].append(got[0][0])
    step(Feed(1, Span(shared, b - 2)), Feed(0, Span(half, half + 1)), Feed(2, Span(1, c - 2)))
    step(Feed(0, Span(half + 1, a - 2)), Feed(1, Span(b - 2, b - 1)))
    step(Feed(2, Span(c - 2, c - 1)), Feed(1, Span(b - 1, b)), Feed(0, Span(a - 2, a - 1)))
    forward([Feed(2, Span(c - 1, c))], wanted=0)
    memory.abandon()
    step(Feed(2, Span(c - 1, c)))
    step(Feed(0, Span(a - 1, a)))
    return got
