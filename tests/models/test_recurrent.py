"""Recurrent layers of real architectures: wherever a text was cut, kept in part, forked or taken up again, what comes
next is what a plain forward over all of its tokens says. And whoever forgets one thing that makes it so is found out.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from random import Random
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.zamba import modeling_zamba

from kvcellar.attention.choose import backends
from kvcellar.cache.cells import Cells
from kvcellar.cache.memory import Memory
from kvcellar.cache.rows import Rows, Track
from kvcellar.cache.states import States
from kvcellar.engine.reserve import peak, uncollected
from kvcellar.errors import ModelRefused, NotSupported
from kvcellar.models import build_guest as guest_building
from kvcellar.models import scan
from kvcellar.models.build_guest import build_guest
from kvcellar.models.guest import Guest
from kvcellar.models.mixers import Mixing, StateView
from kvcellar.models.scan import SCANS, Advance, Call, Scan, selective_scan
from kvcellar.models.shared_weights import sharing_weights
from kvcellar.plan import Batch, Feed, Run, StateSegment
from kvcellar.spans import Span
from tests.laws.prefixes import Made
from tests.models.timeline import BOUND, animal, relative
from tests.zoo import ARCHS, RECURRENT, reference_logits

FAR = 10 * BOUND
# Convolutions; delta rules; a scan of Mamba's first kind, beside attention and with several heads; of its second kind.
FEW = ("lfm2", "qwen3.5", "jamba", "zamba", "mamba2")
SOLO = ("inkling",)
EVERY = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in RECURRENT if name not in SOLO]
# Of the rest, whose window or chunk hides what lies before it, one cannot go back to every point.
WHOLE = [param for param in EVERY if "sliding" not in ARCHS[param.values[0]].kinds]


def text(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 101) for _ in range(length)]


class Told:
    """A guest's memory with NaN in every row, what each sequence has read, and how far its logits were ever off."""

    def __init__(self, guest: Guest, judge: PreTrainedModel, *, rows: int = 60) -> None:
        self.guest, self.judge = guest, judge
        self.memory = guest.memory({g.name: 2000 for g in guest.shape.groups}, rows=rows)
        for planes in self.memory._states._planes.values():
            for plane in planes.values():
                plane[1:] = torch.nan
        self.texts: dict[int, list[int]] = {}
        self.worst = 0.0

    def feed(self, new: Mapping[int, Sequence[int]], *, judged: bool = True, **feed: bool) -> None:
        """In one step, which stays open."""
        starts = {seq: self.memory.length(seq) for seq in new}
        feeds = tuple(Feed(seq, Span(starts[seq], starts[seq] + len(ids)), **feed) for seq, ids in new.items())
        plan = self.memory.begin(Batch(feeds))
        ids = torch.tensor([token for ids in new.values() for token in ids])
        logits = self.guest.forward(self.memory, plan, ids, torch.arange(len(ids))).float()
        for (seq, ids), rows in zip(new.items(), logits.split([len(ids) for ids in new.values()]), strict=True):
            if judged:
                wanted = reference_logits(self.judge, [*self.texts.get(seq, ()), *ids])[-len(ids) :]
                gap = relative(rows, wanted)
                self.worst = max(self.worst, gap if gap == gap else float("inf"))

    def read(
        self,
        new: Mapping[int, Sequence[int]],
        accepted: Mapping[int, int] | None = None,
        *,
        judged: bool = True,
        **feed: bool,
    ) -> None:
        for part in [new] if self.guest.mode == "flat" else [{seq: ids} for seq, ids in new.items()]:
            self.feed(part, judged=judged, **feed)
            kept = {seq: n for seq, n in (accepted or {}).items() if seq in part}
            self.memory.commit(kept)
            self.memory.check()
            for seq, ids in part.items():
                self.texts[seq] = [*self.texts.get(seq, ()), *ids[: kept.get(seq)]]

    def fork(self, src: int, dst: int, upto: int) -> int:
        kept = self.memory.fork(src, dst, upto)
        self.memory.check()
        self.texts[dst] = self.texts[src][:kept]
        return kept


def cuts(guest: Guest, judge: PreTrainedModel) -> float:
    """A text cut in two at every place, all beside each other, and one read token by token."""
    whole, told = text(11, seed=1), Told(guest, judge)
    told.read({cut: whole[:cut] for cut in range(1, 11)})
    told.read({cut: whole[cut:] for cut in reversed(range(1, 11))})
    for token in whole[:4]:
        told.read({0: [token]})
    told.read({0: whole[4:5], 1: [5], 2: [6]})
    told.read({11: whole, 0: whole[5:]})
    return told.worst


def parts(guest: Guest, judge: PreTrainedModel) -> float:
    """Of feeds of 4, 3 and 1 tokens, begun at different places, every part is kept; then they go on otherwise."""
    told, draw = Told(guest, judge), count(10)
    told.read({seq: text(1 + seq % 3, next(draw)) for seq in range(9) if seq != 4})
    fed = {**dict.fromkeys(range(5), 4), **dict.fromkeys(range(5, 9), 3), 9: 1, 10: 1}
    kept = {0: 2, 1: 0, 2: 4, 3: 1, 4: 3, 5: 3, 6: 0, 7: 1, 8: 2, 9: 0, 10: 1}
    told.read({seq: text(n, next(draw)) for seq, n in fed.items()}, kept, revertible=True)
    told.read({seq: text(1 + (seq == 3), next(draw)) for seq in reversed(range(11))})
    return told.worst


def points(guest: Guest, judge: PreTrainedModel) -> float:
    """States are captured on the way; forked and rewound there and in between, texts are read again and go on."""
    whole, told, draw = text(16, seed=2), Told(guest, judge, rows=24), count(40)
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 16)):
        told.read({0: whole[start:end]}, capture=True)
    for pos in range(17):
        kept = told.memory.can_cut(0, pos)
        assert kept == max(point for point in (0, 3, 4, 9, 16) if point <= pos)
        assert told.fork(0, 100 + pos, pos) == kept
    told.read({0: text(1, next(draw))})
    told.read({0: text(2, next(draw))})
    assert told.memory.rows.points(0) == (3, 4, 9, 16, 19)
    odd = {100 + pos: [*whole[len(told.texts[100 + pos]) : pos], next(draw)] for pos in range(1, 17, 3)}
    told.read(odd)
    for pos in (10, 7, 3):
        kept = told.memory.can_cut(0, pos)
        assert told.memory.remove(0, Span(kept, told.memory.length(0))) == kept == {10: 9, 7: 4, 3: 3}[pos]
        told.texts[0] = told.texts[0][:kept]
        told.read({0: [*whole[kept:pos], next(draw)], 116 - pos: text(2, next(draw))})
    return told.worst


# -- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_prompt_may_be_cut_anywhere(name: str) -> None:
    assert cuts(*animal(name)) <= BOUND


@pytest.mark.parametrize("name", EVERY)
def test_every_part_of_a_feed_can_be_kept(name: str) -> None:
    assert parts(*animal(name)) <= BOUND


@pytest.mark.parametrize("name", WHOLE)
def test_one_can_go_on_from_every_captured_state(name: str) -> None:
    assert points(*animal(name)) <= BOUND


@pytest.mark.parametrize("name", SOLO)
def test_a_model_that_runs_solo_keeps_parts_of_its_convolutions(name: str) -> None:
    assert animal(name)[0].mode == "solo"
    told = Told(*animal(name))
    for n in range(5):
        told.read({n: text(6, seed=n)})
        told.read({n: text(4, seed=9)}, {n: n}, revertible=True)
        told.read({n: text(2, seed=8)})
    assert told.worst <= BOUND


# -- the scan ---------------------------------------------------------------------------------------------------------


def obvious(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor, h: Tensor):
    """Token by token, channel by channel, in float64."""
    u, delta, A, B, C, D, z, bias, h = (x.double() for x in (u, delta, A, B, C, D, z, bias, h))
    y = torch.zeros_like(u)
    for b in range(u.shape[0]):
        for d in range(u.shape[1]):
            state = h[b, d].clone()
            for t in range(u.shape[2]):
                step = torch.log1p(torch.exp(delta[b, d, t] + bias[d]))
                state = torch.exp(step * A[d]) * state + step * B[b, :, t] * u[b, d, t]
                gate = z[b, d, t] * torch.sigmoid(z[b, d, t])
                y[b, d, t] = (C[b, :, t] @ state + D[d] * u[b, d, t]) * gate
            h[b, d] = state
    return y, h


def drawn(batch: int, channels: int, states: int, length: int) -> list[Tensor]:
    """u, delta, A, B, C, D, z and the bias of delta."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(batch, channels, length)] * 2 + [(channels, states)] + [(batch, states, length)] * 2
    shapes += [(channels,), (batch, channels, length), (channels,)]
    made = [torch.randn(shape, generator=draw) for shape in shapes]
    made[2] = -made[2].exp()
    return made


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_scan_goes_on_from_its_state(length: int) -> None:
    u, delta, A, B, C, D, z, bias = drawn(2, 3, 4, length)
    state = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    y, last = selective_scan(u, delta, A, B, C, D, z, bias, True, True, state)
    wanted, wanted_last = obvious(u, delta, A, B, C, D, z, bias, state)
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last.double(), wanted_last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("theirs", [modeling_mamba, modeling_zamba], ids=lambda module: module.__name__[-5:])
def test_from_zero_it_is_transformers_own(theirs: ModuleType, plain: bool) -> None:
    u, delta, A, B, C, D, z, bias = drawn(2, 3, 4, 9)
    if plain:
        delta = delta.abs()
    more: dict[str, Any] = {} if plain else {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
    ours = selective_scan(u, delta, A, B, C, return_last_state=True, **more)
    own = theirs.mamba_selective_scan(u, delta, A, B, C, return_last_state=True, **more)
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(selective_scan(u, delta, A, B, C, **more), own[0], atol=1e-5, rtol=1e-5)


def test_a_scan_in_half_precision_keeps_its_sums_in_float32() -> None:
    """A thousand small steps are lost beside a large sum, had it 8 bits."""
    u, delta, A, B, C, D, z, bias = (x.bfloat16() for x in drawn(1, 2, 3, 400))
    A, B, u = torch.full_like(A, -1e-4), torch.ones_like(B), torch.ones_like(u)
    state = torch.full((1, 2, 3), 50.0)
    y, last = selective_scan(u, delta, A, B, C, D, z, bias, True, True, state)
    wanted, wanted_last = obvious(u, delta, A, B, C, D, z, bias, state)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert relative(last.double(), wanted_last) < 1e-2
    assert relative(y.double(), wanted) < 2e-2


def call_of(name: str, theirs: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    """As a mixer makes it. All arguments are there, by name."""
    kind = SCANS[name]
    bound = inspect.signature(kind.ours or theirs).bind(**arguments)
    bound.apply_defaults()
    return Call(kind, kind.ours or theirs, bound.arguments)


def drawn_calls() -> Iterator[tuple[str, Call]]:
    """Scans of 4 sequences of 6 tokens, of every kind and with whatever changes what they reckon."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    u, delta, A, B, C, D, z, bias = drawn(4, 3, 5, 6)
    first = {"hidden_states": u, "dt": delta, "A": A, "B": B, "C": C, "D": D, "return_last_state": True}
    state = {"initial_states": draw(4, 3, 5)}
    settled = {"z": z, "delta_bias": bias, "delta_softplus": True}
    yield "selective", call_of("mamba_selective_scan", modeling_mamba.mamba_selective_scan, first | settled | state)
    bare = first | state | {"dt": delta.abs()}
    yield "selective, bare", call_of("mamba_selective_scan", modeling_mamba.mamba_selective_scan, bare)

    second = {
        "hidden_states": draw(4, 6, 6, 3),
        "dt": draw(4, 6, 6),
        "A": -draw(6).exp(),
        "B": draw(4, 6, 2, 5),
        "C": draw(4, 6, 2, 5),
        "chunk_size": 8,
        "D": draw(6),
        "dt_bias": draw(6),
        "dt_softplus": True,
        "initial_states": draw(4, 6, 3, 5),
        "return_final_states": True,
    }
    yield "dual", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, second)
    limited = second | {"dt_limit": (0.3, 0.9)}
    yield "dual, limited", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, limited)
    bare = second | {"dt": draw(4, 6, 6).abs(), "dt_bias": None, "dt_softplus": False}
    yield "dual, bare", call_of("mamba2_chunk_scan", modeling_mamba2.mamba2_chunk_scan, bare)

    third = {
        "query": draw(4, 6, 2, 5),
        "key": draw(4, 6, 2, 5) / 5,
        "value": draw(4, 6, 4, 3),
        "g": -draw(4, 6, 4).exp(),
        "beta": draw(4, 6, 4).sigmoid(),
        "initial_state": draw(4, 4, 5, 3),
        "output_final_state": True,
    }
    delta_rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    for normed in (False, True):
        given = third | {"use_qk_l2norm_in_kernel": normed}
        yield f"delta, {normed}", call_of("torch_chunk_gated_delta_rule", delta_rule, given)
    channels = {"query": draw(4, 6, 4, 5), "key": draw(4, 6, 4, 5), "g": -draw(4, 6, 4, 5).exp()}
    given = third | channels | {"use_qk_l2norm_in_kernel": True}
    yield "kimi", call_of("chunk_kimi_delta_attention", modeling_kimi_linear.chunk_kimi_delta_attention, given)


CALLS = dict(drawn_calls())
ALL_TOKENS = {"hidden_states", "dt", "B", "C", "z", "query", "key", "value", "g", "beta"}


@pytest.mark.parametrize("kind", CALLS)
def test_a_state_after_some_tokens_is_what_the_scan_of_these_alone_leaves(kind: str) -> None:
    call = CALLS[kind]
    indices, counts = [3, 0, 2], [6, 2, 1]
    before = call.arguments[call.scan.state]
    found = call.kept().after(before[indices], indices, counts)
    for state, index, most in zip(found, indices, counts, strict=True):
        alone = {
            name: value[index : index + 1].narrow(call.scan.axis, 0, most)
            for name, value in call.arguments.items()
            if name in ALL_TOKENS and isinstance(value, Tensor)
        }
        before = {call.scan.state: call.arguments[call.scan.state][index : index + 1]}
        _, wanted = call.function(**{**call.arguments, **alone, **before})
        torch.testing.assert_close(state, wanted[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CALLS)
def test_a_short_scan_is_what_the_whole_chunks_of_transformers_give(kind: str) -> None:
    call = CALLS[kind]
    torch.testing.assert_close(call.made(), call.function(**call.arguments), atol=1e-5, rtol=1e-5)


class _Held:
    """A memory that remembers one state."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def state(self, layer: int, segments: Sequence[StateSegment]) -> dict[str, Tensor]:
        return {scan.recurrent(0): self._state}


def test_heads_are_scanned_in_order_from_their_own_states() -> None:
    u, delta, A, B, C, *_ = drawn(2, 3, 4, 5)
    state = torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    turn = StateView(cast(Memory, _Held(state)), [], 5)
    zero, none = torch.zeros(3), torch.full((2, 3, 5), 1e4)
    for head in range(3):
        given = {"hidden_states": u, "dt": delta.abs(), "A": A, "B": B, "C": C, "return_last_state": True}
        call = Call(SCANS["mamba_selective_scan"], selective_scan, given)
        _, last = turn.scan(0, call)
        unbiased = torch.expm1(delta.abs().double()).log()  # what softplus makes delta of
        _, wanted = obvious(u, unbiased, A, B, C, zero, none, zero, state[:, head])
        torch.testing.assert_close(last.double(), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelRefused, match="scans more often than it has states"):
        turn.scan(0, call)


# -- how often a mixer runs -------------------------------------------------------------------------------------------


@contextmanager
def counted(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """How often each module within these is called."""
    calls: dict[nn.Module, int] = {}

    def called(module: nn.Module, *_: object) -> None:
        calls[module] = calls.get(module, 0) + 1

    hooks = [part.register_forward_hook(called) for one in modules for part in one.modules() if part is not one]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", FEW)
def test_one_can_resume_at_every_checkpoint_inside_a_feed(name: str) -> None:
    guest, judge = animal(name)
    told, whole = Told(guest, judge), text(11, seed=3)
    batch = Batch((Feed(0, Span(0, 9), checkpoints=(2, 5, 6, 9)),))
    plan = told.memory.begin(batch)
    guest.forward(told.memory, plan, torch.tensor(whole[:9]), torch.tensor([8]))
    claim = told.memory.commit()[0]
    told.memory.drop(0)
    for pos in (2, 5, 6, 9):
        told.memory.claims.assemble(pos, [claim], pos)
        told.texts[pos] = whole[:pos]
    told.read({pos: whole[pos:] for pos in (2, 5, 6, 9)})
    assert told.worst <= BOUND


@pytest.mark.parametrize("name", FEW)
def test_a_mixer_runs_once_for_each_length_there_is(name: str) -> None:
    guest, judge = animal(name)
    told = Told(guest, judge)
    runs: list[dict[nn.Module, int]] = []
    for sizes in ((2,), (2,) * 5, (1,), (1,) * 6, (1, 2, 1, 3, 2, 1)):
        with counted(guest.shape.mixers) as calls:
            told.feed({seq: text(n, seed=seq) for seq, n in enumerate(sizes)}, judged=False)
        told.memory.abandon()
        runs.append(dict(calls))
    alone, equal, token, decoding, mixed = runs
    assert guest.shape.mixers
    assert alone == equal
    assert token == decoding
    assert sum(mixed.values()) == 2 * sum(alone.values()) + sum(token.values())


def test_the_rows_of_equal_feeds_are_looked_up_once_for_all_mixers() -> None:
    """And what a mixer answers comes back to the rows that asked."""
    segments = [StateSegment(0, 0, 2, 0, 1), StateSegment(1, 2, 1, 0, 2), StateSegment(2, 3, 2, 0, 3)]
    mixing = Mixing(Told(*animal("lfm2")).memory, segments, 5, opened=nullcontext)
    hidden, shapes = torch.arange(10.0).reshape(1, 5, 2), []

    def mixer(x: Tensor, scale: int) -> tuple[Tensor, None]:
        shapes.append(tuple(x.shape))
        return x * scale + torch.arange(x.shape[1])[:, None], None

    wanted = hidden * 3 + torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])[None, :, None]
    assert torch.equal(mixing.mix(mixer, (hidden,), {"scale": 3})[0], wanted)
    with Made() as made:
        assert torch.equal(mixing.mix(mixer, (hidden,), {"scale": 3})[0], wanted)
    assert not made.told
    assert shapes == [(2, 2, 2), (1, 1, 2)] * 2


@pytest.mark.parametrize("name", FEW)
def test_nothing_of_a_mixer_but_its_scan_is_computed_again_for_a_part(name: str) -> None:
    """And what a convolution remembers of a part is cut from its inputs."""
    guest, judge = animal(name)
    told = Told(guest, judge)
    told.feed({0: text(4, 1), 1: text(4, 2), 2: text(4, 3)}, judged=False, revertible=True)
    with counted(guest.shape.mixers) as calls:
        told.memory.commit({0: 2, 1: 2})
    assert not calls


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_of_which_a_part_is_kept_takes_no_more_memory_than_reserving_it_tells(name: str) -> None:
    guest, _ = animal(name)
    if guest.mode == "solo":
        pytest.skip("a model that runs solo gets one sequence a forward, and cannot keep a part of sums")
    memory = guest.memory({group.name: 40 for group in guest.shape.groups}, rows=12)

    def taken(*, reserve: bool) -> int:
        feeds = tuple(Feed(seq, Span(0, 8), revertible=True) for seq in range(4))
        with uncollected(), peak(guest.device) as meter:
            plan = memory.begin(Batch(feeds), reserve=reserve)
            guest.forward(memory, plan, torch.arange(3, 35), torch.arange(32))
            if reserve:
                memory.abandon()
            else:
                memory.commit({0: 7, 1: 1, 2: 7})
        for seq in memory.sequences:
            memory.drop(seq)
        return meter.bytes

    taken(reserve=True)  # what is made once
    assert taken(reserve=False) <= taken(reserve=True)


# -- the model is a guest ---------------------------------------------------------------------------------------------


def own_answers(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The logits of its own forward, and of a few tokens that it generates with its own cache.

    Without gradients before as afterwards: torch multiplies otherwise where it keeps a graph in mind.
    """
    model.requires_grad_(False)
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    ids = torch.tensor([text(9, seed=5)])
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return plain, torch.stack(made.logits)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "jamba", "mamba"])
def test_outside_of_our_forwards_a_model_is_what_it_was(name: str) -> None:
    model = ARCHS[name].build()
    before = own_answers(model)
    guest = build_guest(model, backends())
    assert guest.mode == "flat"
    for ours, theirs in zip(own_answers(model), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["qwen3.5", "mamba", "lfm2"])
def test_two_guests_on_the_same_weights_do_not_disturb_each_other(name: str) -> None:
    model, judge = ARCHS[name].build(), animal(name)[1]
    one, other = (Told(build_guest(sharing_weights(model), backends()), judge) for _ in range(2))
    one.read({0: text(5, 1), 1: text(3, 2)})
    other.read({0: text(3, 3)})
    one.feed({0: text(3, 4), 1: text(3, 5)}, revertible=True)
    other.read({0: text(2, 6), 1: text(3, 7)})
    one.memory.commit({0: 1, 1: 2})
    one.texts[0] += text(3, 4)[:1]
    one.texts[1] += text(3, 5)[:2]
    for told in (one, other):
        told.read({0: text(2, 8), 1: text(1, 9)})
        assert told.worst <= BOUND


@pytest.mark.parametrize("name", ["qwen3.5", "mamba", "mamba2"])
def test_sums_have_32_bits_in_a_model_of_16(name: str) -> None:
    guest = build_guest(ARCHS[name].build().to(torch.bfloat16), backends())
    assert guest.shape.recurrent is not None
    memory = guest.memory({g.name: 64 for g in guest.shape.groups}, rows=2)
    for layer, planes in guest.shape.recurrent.layers.items():
        kinds = {plane.name: plane.kind for plane in planes}
        assert kinds == {name: "float32" if name.startswith("recurrent") else "bfloat16" for name in kinds}
        stored = {name: str(plane.dtype) for name, plane in memory._states._planes[layer].items()}
        assert stored == {name: f"torch.{kind}" for name, kind in kinds.items()}
    plan = memory.begin(Batch((Feed(0, Span(0, 3)),)))
    guest.forward(memory, plan, torch.tensor([3, 4, 5]), torch.tensor([2]))
    memory.commit()
    sums = [
        memory._states.read(layer, [StateSegment(0, 0, 1, memory._states.rows._tracks[0].row, 0)])["recurrent 0"]
        for layer in guest.shape.recurrent.layers
    ]
    assert any((x != x.bfloat16().float()).any() for x in sums), "and they are used"


def test_a_solo_model_with_sums_keeps_all_of_a_feed_or_nothing() -> None:
    judge = animal("qwen3.5")[1]
    model = ARCHS["qwen3.5"].build()
    told = Told(guest_building._solo(model, backends(), "to see how it would be"), judge)
    told.read({0: text(5, 1)})
    for accepted in (3, 0):
        told.feed({0: text(3, 2)}, judged=False, revertible=True)
        for n in (1, 2):
            with pytest.raises(NotSupported, match=r"a part of the tokens cannot be kept.*runs solo"):
                told.memory.commit({0: n})
            told.memory.check()
        told.memory.commit({0: accepted})
        told.texts[0] += text(3, 2)[:accepted]
        told.read({0: text(1, 3)})
    assert told.worst <= BOUND


# -- whoever forgets something is found out ---------------------------------------------------------------------------


def a_fork_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Rows.fork

    def fork(self: Rows, src: int, dst: int, kept: int) -> None:
        honest(self, src, dst, kept)
        if row := self._tracks[dst].row:
            self._rows[row].own -= 1
            self._rows[row].captors.clear()

    monkeypatch.setattr(Rows, "fork", fork)


def steps_write_where_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = States.write

    def write(self: States, layer: int, segments: Sequence[StateSegment], planes: Any, at: Any = None) -> None:
        honest(self, layer, segments, planes, at)
        for i, segment in enumerate(segments):
            for name, plane in self._planes[layer].items():
                if segment.read:
                    plane[segment.read] = planes[name][i].to(plane.dtype)

    monkeypatch.setattr(States, "write", write)


def parts_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "settle", lambda self, batch, counts: None)


def convolutions_are_cut_one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StateView._at

    def at(self: StateView, layer: int, again: Any) -> Any:
        rightly = honest(self, layer, again)
        return lambda indices, counts: rightly(indices, [count - 1 for count in counts])

    monkeypatch.setattr(StateView, "_at", at)


def convolutions_remember_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StateView.shift_in

    def shift_in(self: StateView, new: Tensor, layer: int, name: str) -> Tensor:
        longer = honest(self, new, layer, name)
        self._states[layer][name] = longer[..., -self._states[layer][name].shape[-1] - 1 : -1]
        return longer

    monkeypatch.setattr(StateView, "shift_in", shift_in)


def captures_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a captured state is given away once its sequence goes on."""
    honest = Rows._capture

    def capture(self: Rows, track: Track, pos: int, row: int) -> None:
        honest(self, track, pos, row)
        if row:
            self._rows[row].captors.clear()

    monkeypatch.setattr(Rows, "_capture", capture)


def nothing_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = States.__init__

    def init(self: States, *args: Any, **kwargs: Any) -> None:
        honest(self, *args, **kwargs)
        for planes in self._planes.values():
            for plane in planes.values():
                plane[0] = 1

    monkeypatch.setattr(States, "__init__", init)
    monkeypatch.setattr(States, "check", lambda self, lengths: None)


def groups_are_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StateView.__init__

    def init(self: StateView, memory: Memory, segments: Sequence[StateSegment], length: int, **more: Any) -> None:
        honest(self, memory, segments[::-1], length, **more)

    monkeypatch.setattr(StateView, "__init__", init)


def scans_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StateView.scan

    def from_zero(self: StateView, layer: int, call: Call) -> Any:
        if call.scan.ours is None:
            return honest(self, layer, call)
        ours = call.function
        return honest(self, layer, replace(call, function=lambda **given: ours(**given | {call.scan.state: None})))

    monkeypatch.setattr(StateView, "scan", from_zero)


def parts_are_of_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Call.after
    monkeypatch.setattr(
        Call, "after", lambda self, before, indices, counts: honest(self, before, list(range(len(indices))), counts)
    )


def parts_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Call.after

    def after(self: Call, before: Tensor, indices: Sequence[int], counts: Sequence[int]) -> Tensor:
        return honest(self, torch.zeros_like(before), indices, counts)

    monkeypatch.setattr(Call, "after", after)


Scenario = Callable[[Guest, PreTrainedModel], float]
MUTATIONS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    ("lfm2", a_fork_holds_nothing, points),
    ("lfm2", steps_write_where_they_read, points),
    ("lfm2", parts_are_kept_whole, parts),
    ("qwen3.5", parts_are_kept_whole, parts),
    ("lfm2", convolutions_are_cut_one_off, parts),
    ("lfm2", convolutions_remember_one_less, cuts),
    ("qwen3.5", captures_are_let_go, points),
    ("mamba2", nothing_is_not_zero, cuts),
    ("lfm2", groups_are_out_of_order, cuts),
    ("jamba", scans_begin_at_zero, cuts),
    ("zamba", scans_begin_at_zero, cuts),
    ("qwen3.5", parts_are_of_other_sequences, parts),
    ("qwen3.5", parts_begin_at_zero, parts),
    ("mamba2", parts_begin_at_zero, parts),
]
SEEN_AT_ADOPTION = [
    ("lfm2", steps_write_where_they_read),
    ("lfm2", convolutions_remember_one_less),
    ("lfm2", nothing_is_not_zero),
    ("lfm2", groups_are_out_of_order),
    ("mamba", scans_begin_at_zero),
]


@pytest.mark.parametrize(("name", "mutate", "scenario"), MUTATIONS)
def test_who_forgets_a_part_of_it_is_found_out(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its logits, or because a row is gone when it is needed: what checks itself is not asked."""
    guest, judge = animal(name)
    monkeypatch.setattr(Memory, "check", lambda self: None)
    mutate(monkeypatch)
    try:
        gap = scenario(guest, judge)
    except KeyError:
        gap = float("inf")
    assert gap > FAR


@pytest.mark.parametrize(("name", "mutate"), SEEN_AT_ADOPTION)
def test_the_self_test_finds_it_out_too_and_does_not_serve_flat(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    try:
        guest = build_guest(ARCHS[name].build(), backends())
    except ModelRefused as refusal:  # the mutation reaches the solo way as well
        why = str(refusal)
    else:
        assert guest.mode == "solo"
        why = str(guest.refused)
    assert "its logits differ" in why


# -- what the self-test finds wrong in parts of steps -----------------------------------------------------------------


def recurrences_take_each_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(honest: Callable[[Mapping[str, Any]], Advance]) -> Callable[[Mapping[str, Any]], Advance]:
        def recurrence(given: Mapping[str, Any]) -> Advance:
            advance = honest(given)

            def twice(states: Tensor, t: int) -> None:
                advance(states, t)
                advance(states, t)

            return twice

        return recurrence

    for name, kind in SCANS.items():
        monkeypatch.setitem(cast(dict[str, Scan], SCANS), name, replace(kind, recurrence=wrong(kind.recurrence)))


def checkpoints_inside_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "_settle_between", lambda self, batch, counts: None)


WRONG_IN_PART = [
    ("qwen3.5", checkpoints_inside_are_never_written),
    ("lfm2", checkpoints_inside_are_never_written),
    ("qwen3.5", recurrences_take_each_token_twice),
    ("kimi-linear", recurrences_take_each_token_twice),
    ("jamba", recurrences_take_each_token_twice),
    ("zamba", recurrences_take_each_token_twice),
    ("mamba2", recurrences_take_each_token_twice),
    ("lfm2", convolutions_are_cut_one_off),
    ("lfm2", parts_are_kept_whole),
    ("qwen3.5", parts_are_kept_whole),
    ("qwen3.5", parts_are_of_other_sequences),
    ("mamba", parts_begin_at_zero),
]


@pytest.mark.parametrize(("name", "mutate"), WRONG_IN_PART)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_wrong_in_parts_of_steps_only_is_switched_off_with_the_reason(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    guest = build_guest(ARCHS[name].build().to(dtype), backends())
    assert (guest.mode, guest.verdict is not None and guest.verdict.passed) == ("flat", True)
    assert guest.no_partial_commit is not None
    assert guest.no_partial_commit.startswith("its logits differ by")
    told = Told(guest, animal(name)[1])
    told.read({0: text(5, 1)}, judged=dtype == torch.float32)
    for how in ({"revertible": True}, {"checkpoints": (6,)}):
        plan = told.memory.begin(Batch((Feed(0, Span(5, 8), **how),)))
        with pytest.raises(NotSupported, match="cannot be kept, nor be a checkpoint: its logits differ"):
            guest.forward(told.memory, plan, torch.tensor([5, 6, 7]), torch.tensor([2]))
        told.memory.abandon()
    told.read({0: text(3, 3), 1: text(2, 4)}, judged=dtype == torch.float32)
    assert told.worst <= BOUND


def test_a_solo_model_with_sums_is_adopted_without_parts_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHS["qwen3.5"].build()
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    guest = build_guest(model, backends())
    assert guest.mode == "solo"
    assert guest.no_partial_commit is not None
    assert "runs solo" in guest.no_partial_commit
    assert "nothing has changed" not in guest.no_partial_commit


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_a_model_without_recurrent_layers_is_refused_where_parts_of_steps_are_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no feeds to refuse: any of its steps may be committed in part."""
    honest = Cells.divide_all

    def the_last(self: Cells, runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
        first, last = honest(self, runs, sum(run.n for run in runs) - count)
        return last, first

    monkeypatch.setattr(Cells, "divide_all", the_last)
    with pytest.raises(ModelRefused, match="after a commit of a part of a step, its logits differ by"):
        build_guest(ARCHS[name].build(), backends())


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_of_layer_keeps_parts_of_steps(name: str) -> None:
    assert animal(name)[0].no_partial_commit is None
