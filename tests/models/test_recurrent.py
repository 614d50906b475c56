"""Recurrent layers of real architectures: after splits, partial commits, forks and resuming, logits equal a reference
forward over all tokens of the sequence; and each mutation that breaks this is detected.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.engine.load.reserve import peak, uncollected
from kvcellar.engine.models import build_guest as guest_building
from kvcellar.engine.models import mixers
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.load import sharing_weights
from kvcellar.engine.models.mixers import Mixing, StateView
from kvcellar.errors import ModelRefused, NotSupported
from kvcellar.kernels.scans import Recurrence, runs_of
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.cells.cells import Cells
from kvcellar.memory.cells.rows import Rows, SequenceStates
from kvcellar.memory.kv.states import States
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed, Run, StateSegment
from kvcellar.memory.spans import Span
from tests.laws.prefixes import Made
from tests.models.timeline import BOUND, guest_and_reference, relative
from tests.zoo import ARCHS, RECURRENT, reference_logits

FAR = 10 * BOUND
# Convolutions; delta rules; Mamba's scan beside attention and with several heads; Mamba-2's scan.
FEW = ("lfm2", "qwen3.5", "jamba", "zamba", "mamba2")
SOLO = ("inkling",)
EVERY = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in RECURRENT if name not in SOLO]
# Those without windows: with a window one cannot resume at every checkpoint.
WHOLE = [param for param in EVERY if "sliding" not in ARCHS[param.values[0]].kinds]


def text(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 101) for _ in range(length)]


class Driver:
    """A guest's memory with NaN in every row, the text of each sequence, and the largest difference of logits."""

    def __init__(self, guest: Guest, reference: PreTrainedModel, *, rows: int = 60) -> None:
        self.guest, self.reference = guest, reference
        self.memory = guest.memory({g.name: 2000 for g in guest.shape.groups}, rows=rows)
        for planes in self.memory.states._planes.values():
            for plane in planes.values():
                plane[1:] = torch.nan
        self.texts: dict[int, list[int]] = {}
        self.worst = 0.0

    def feed(self, new: Mapping[int, Sequence[int]], *, compared: bool = True, **feed: bool) -> None:
        """Run one step, which stays open."""
        starts = {seq: self.memory.length(seq) for seq in new}
        feeds = tuple(Feed(seq, Span(starts[seq], starts[seq] + len(ids)), **feed) for seq, ids in new.items())
        plan = self.memory.begin(Batch(feeds))
        ids = torch.tensor([token for ids in new.values() for token in ids])
        logits = self.guest.forward(self.memory, plan, ids, torch.arange(len(ids))).float()
        for (seq, ids), rows in zip(new.items(), logits.split([len(ids) for ids in new.values()]), strict=True):
            if compared:
                wanted = reference_logits(self.reference, [*self.texts.get(seq, ()), *ids])[-len(ids) :]
                gap = relative(rows, wanted)
                self.worst = max(self.worst, gap if gap == gap else float("inf"))

    def read(
        self,
        new: Mapping[int, Sequence[int]],
        accepted: Mapping[int, int] | None = None,
        *,
        compared: bool = True,
        **feed: bool,
    ) -> None:
        for part in [new] if self.guest.mode == "flat" else [{seq: ids} for seq, ids in new.items()]:
            self.feed(part, compared=compared, **feed)
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


def splits(guest: Guest, reference: PreTrainedModel) -> float:
    """A text split in two at every position, all in one batch, and one fed token by token."""
    whole, driver = text(11, seed=1), Driver(guest, reference)
    driver.read({cut: whole[:cut] for cut in range(1, 11)})
    driver.read({cut: whole[cut:] for cut in reversed(range(1, 11))})
    for token in whole[:4]:
        driver.read({0: [token]})
    driver.read({0: whole[4:5], 1: [5], 2: [6]})
    driver.read({11: whole, 0: whole[5:]})
    return driver.worst


def partial_commits(guest: Guest, reference: PreTrainedModel) -> float:
    """Every part of feeds of 4, 3 and 1 tokens, at different positions, is committed; then other tokens follow."""
    driver, draw = Driver(guest, reference), count(10)
    driver.read({seq: text(1 + seq % 3, next(draw)) for seq in range(9) if seq != 4})
    fed = {**dict.fromkeys(range(5), 4), **dict.fromkeys(range(5, 9), 3), 9: 1, 10: 1}
    kept = {0: 2, 1: 0, 2: 4, 3: 1, 4: 3, 5: 3, 6: 0, 7: 1, 8: 2, 9: 0, 10: 1}
    driver.read({seq: text(n, next(draw)) for seq, n in fed.items()}, kept, revertible=True)
    driver.read({seq: text(1 + (seq == 3), next(draw)) for seq in reversed(range(11))})
    return driver.worst


def checkpoints(guest: Guest, reference: PreTrainedModel) -> float:
    """Forks and rewinds to checkpoints and to positions between them, then other tokens follow."""
    whole, driver, draw = text(16, seed=2), Driver(guest, reference, rows=24), count(40)
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 16)):
        driver.read({0: whole[start:end]}, keep_state=True)
    for pos in range(17):
        kept = driver.memory.can_cut(0, pos)
        assert kept == max(point for point in (0, 3, 4, 9, 16) if point <= pos)
        assert driver.fork(0, 100 + pos, pos) == kept
    driver.read({0: text(1, next(draw))})
    driver.read({0: text(2, next(draw))})
    assert driver.memory.state_positions(0) == (3, 4, 9, 16, 19)
    odd = {100 + pos: [*whole[len(driver.texts[100 + pos]) : pos], next(draw)] for pos in range(1, 17, 3)}
    driver.read(odd)
    for pos in (10, 7, 3):
        kept = driver.memory.can_cut(0, pos)
        assert driver.memory.remove(0, Span(kept, driver.memory.length(0))) == kept == {10: 9, 7: 4, 3: 3}[pos]
        driver.texts[0] = driver.texts[0][:kept]
        driver.read({0: [*whole[kept:pos], next(draw)], 116 - pos: text(2, next(draw))})
    return driver.worst


# -- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_prompt_can_be_split_anywhere(name: str) -> None:
    assert splits(*guest_and_reference(name)) <= BOUND


@pytest.mark.parametrize("name", EVERY)
def test_every_part_of_a_feed_can_be_committed(name: str) -> None:
    assert partial_commits(*guest_and_reference(name)) <= BOUND


@pytest.mark.parametrize("name", WHOLE)
def test_decoding_can_resume_at_every_checkpoint(name: str) -> None:
    assert checkpoints(*guest_and_reference(name)) <= BOUND


@pytest.mark.parametrize("name", SOLO)
def test_a_solo_model_with_convolutions_commits_parts_of_feeds(name: str) -> None:
    assert guest_and_reference(name)[0].mode == "solo"
    driver = Driver(*guest_and_reference(name))
    for n in range(5):
        driver.read({n: text(6, seed=n)})
        driver.read({n: text(4, seed=9)}, {n: n}, revertible=True)
        driver.read({n: text(2, seed=8)})
    assert driver.worst <= BOUND


# -- how often a mixer runs -------------------------------------------------------------------------------------------


@contextmanager
def counted(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """The number of calls of each module within these."""
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
def test_decoding_can_resume_at_every_checkpoint_inside_a_feed(name: str) -> None:
    guest, reference = guest_and_reference(name)
    driver, whole = Driver(guest, reference), text(11, seed=3)
    batch = Batch((Feed(0, Span(0, 9), checkpoints=(2, 5, 6, 9)),))
    plan = driver.memory.begin(batch)
    guest.forward(driver.memory, plan, torch.tensor(whole[:9]), torch.tensor([8]))
    claim = driver.memory.commit()[0]
    driver.memory.drop(0)
    for pos in (2, 5, 6, 9):
        driver.memory.claims.assemble(pos, [claim], pos)
        driver.texts[pos] = whole[:pos]
    driver.read({pos: whole[pos:] for pos in (2, 5, 6, 9)})
    assert driver.worst <= BOUND


@pytest.mark.parametrize("name", FEW)
def test_a_mixer_runs_once_per_distinct_length(name: str) -> None:
    guest, reference = guest_and_reference(name)
    driver = Driver(guest, reference)
    runs: list[dict[nn.Module, int]] = []
    for sizes in ((2,), (2,) * 5, (1,), (1,) * 6, (1, 2, 1, 3, 2, 1)):
        with counted(guest.shape.mixers) as calls:
            driver.feed({seq: text(n, seed=seq) for seq, n in enumerate(sizes)}, compared=False)
        driver.memory.abandon()
        runs.append(dict(calls))
    alone, equal, token, decoding, mixed = runs
    assert guest.shape.mixers
    assert alone == equal
    assert token == decoding
    assert sum(mixed.values()) == 2 * sum(alone.values()) + sum(token.values())


def test_row_indices_of_equal_feeds_are_computed_once_per_step() -> None:
    """And its outputs are returned to their rows."""
    segments = [StateSegment(0, 0, 2, 0, 1), StateSegment(1, 2, 1, 0, 2), StateSegment(2, 3, 2, 0, 3)]
    mixing = Mixing(Driver(*guest_and_reference("lfm2")).memory, segments, 5)
    hidden, shapes = torch.arange(10.0).reshape(1, 5, 2), []

    def mixer(x: Tensor, scale: int) -> tuple[Tensor, None]:
        shapes.append(tuple(x.shape))
        return x * scale + torch.arange(x.shape[1])[:, None], None

    wanted = hidden * 3 + torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])[None, :, None]
    assert torch.equal(mixing.mix(mixer, (hidden,), {"scale": 3}, nullcontext)[0], wanted)
    with Made() as made:
        assert torch.equal(mixing.mix(mixer, (hidden,), {"scale": 3}, nullcontext)[0], wanted)
    assert not made.uploads
    assert shapes == [(2, 2, 2), (1, 1, 2)] * 2


@pytest.mark.parametrize("name", FEW)
def test_a_partial_commit_recomputes_only_the_scan(name: str) -> None:
    """And the state of a convolution is cut from its inputs."""
    guest, reference = guest_and_reference(name)
    driver = Driver(guest, reference)
    driver.feed({0: text(4, 1), 1: text(4, 2), 2: text(4, 3)}, compared=False, revertible=True)
    with counted(guest.shape.mixers) as calls:
        driver.memory.commit({0: 2, 1: 2})
    assert not calls


@pytest.mark.parametrize("name", RECURRENT)
def test_a_partial_commit_takes_no_more_memory_than_its_reservation(name: str) -> None:
    guest, _ = guest_and_reference(name)
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

    for reserve in (True, False):
        taken(reserve=reserve)  # step tables are allocated once per bucket
    assert taken(reserve=False) <= taken(reserve=True)


# -- the model is a guest ---------------------------------------------------------------------------------------------


def own_outputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of its own forward, and of a few tokens generated with its own cache.

    Without gradients before as afterwards: torch selects other kernels where it records a graph.
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
def test_outside_of_guest_forwards_a_model_behaves_as_before(name: str) -> None:
    model = ARCHS[name].build()
    before = own_outputs(model)
    guest = build_guest(model, backends())
    assert guest.mode == "flat"
    for ours, theirs in zip(own_outputs(model), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["qwen3.5", "mamba", "lfm2"])
def test_two_guests_on_the_same_weights_are_independent(name: str) -> None:
    model, reference = ARCHS[name].build(), guest_and_reference(name)[1]
    one, other = (Driver(build_guest(sharing_weights(model), backends()), reference) for _ in range(2))
    one.read({0: text(5, 1), 1: text(3, 2)})
    other.read({0: text(3, 3)})
    one.feed({0: text(3, 4), 1: text(3, 5)}, revertible=True)
    other.read({0: text(2, 6), 1: text(3, 7)})
    one.memory.commit({0: 1, 1: 2})
    one.texts[0] += text(3, 4)[:1]
    one.texts[1] += text(3, 5)[:2]
    for driver in (one, other):
        driver.read({0: text(2, 8), 1: text(1, 9)})
        assert driver.worst <= BOUND


@pytest.mark.parametrize("name", ["qwen3.5", "mamba", "mamba2"])
def test_recurrent_sums_are_float32_in_a_bfloat16_model(name: str) -> None:
    guest = build_guest(ARCHS[name].build().to(torch.bfloat16), backends())
    assert guest.shape.recurrent is not None
    memory = guest.memory({g.name: 64 for g in guest.shape.groups}, rows=2)
    for layer, planes in guest.shape.recurrent.layers.items():
        kinds = {plane.name: plane.kind for plane in planes}
        assert kinds == {name: "float32" if name.startswith("recurrent") else "bfloat16" for name in kinds}
        stored = {name: str(plane.dtype) for name, plane in memory.states._planes[layer].items()}
        assert stored == {name: f"torch.{kind}" for name, kind in kinds.items()}
    plan = memory.begin(Batch((Feed(0, Span(0, 3)),)))
    guest.forward(memory, plan, torch.tensor([3, 4, 5]), torch.tensor([2]))
    memory.commit()
    sums = [
        memory.states.planes(layer)["recurrent 0"][memory._sequences.record(0).states.row]
        for layer in guest.shape.recurrent.layers
    ]
    assert any((x != x.bfloat16().float()).any() for x in sums), "the additional bits are used"


def test_a_solo_model_with_recurrent_sums_commits_all_of_a_feed_or_nothing() -> None:
    reference = guest_and_reference("qwen3.5")[1]
    model = ARCHS["qwen3.5"].build()
    driver = Driver(guest_building._solo(model, backends(), "forced by the test"), reference)
    driver.read({0: text(5, 1)})
    for accepted in (3, 0):
        driver.feed({0: text(3, 2)}, compared=False, revertible=True)
        for n in (1, 2):
            with pytest.raises(NotSupported, match=r"a part of the tokens cannot be kept.*runs solo"):
                driver.memory.commit({0: n})
            driver.memory.check()
        driver.memory.commit({0: accepted})
        driver.texts[0] += text(3, 2)[:accepted]
        driver.read({0: text(1, 3)})
    assert driver.worst <= BOUND


# -- mutations --------------------------------------------------------------------------------------------------------


def forks_hold_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SequenceStates.fork

    def fork(self: SequenceStates, kept: int) -> SequenceStates:
        twin = original(self, kept)
        if twin.row:
            self._rows._rows[twin.row].own -= 1
            self._rows._rows[twin.row].checkpoint_of.clear()
        return twin

    monkeypatch.setattr(SequenceStates, "fork", fork)


def steps_write_where_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    original = States.write

    def write(self: States, layer: int, segments: Sequence[StateSegment], planes: Any, *more: Any) -> None:
        original(self, layer, segments, planes, *more)
        for i, segment in enumerate(segments):
            for name, plane in self._planes[layer].items():
                if segment.read:
                    plane[segment.read] = planes[name][i].to(plane.dtype)

    monkeypatch.setattr(States, "write", write)


def partial_commits_keep_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "settle", lambda self, batch, counts: None)


def partial_convolution_states_are_one_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView._at

    def at(self: StateView, layer: int, again: Any, stored: Any = ()) -> Any:
        rightly = original(self, layer, again, stored)
        return lambda indices, counts: rightly(indices, [count - 1 for count in counts])

    monkeypatch.setattr(StateView, "_at", at)


def convolution_states_are_one_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView.shift_in

    def shift_in(self: StateView, new: Tensor, layer: int, name: str) -> Tensor:
        longer = original(self, new, layer, name)
        self._states[layer][name] = longer[..., -self._states[layer][name].shape[-1] - 1 : -1]
        return longer

    monkeypatch.setattr(StateView, "shift_in", shift_in)


def checkpoint_rows_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a checkpoint is freed once its sequence continues."""
    original = Rows.keep

    def keep(self: Rows, states: SequenceStates, pos: int, row: int) -> None:
        original(self, states, pos, row)
        self._rows[row].checkpoint_of.clear()

    monkeypatch.setattr(Rows, "keep", keep)


def null_row_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    original = States.__init__

    def init(self: States, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for planes in self._planes.values():
            for plane in planes.values():
                plane[0] = 1

    monkeypatch.setattr(States, "__init__", init)
    monkeypatch.setattr(States, "check", lambda self, lengths: None)


def segments_are_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView.__init__

    def init(self: StateView, memory: Memory, segments: Sequence[StateSegment], length: int, **more: Any) -> None:
        original(self, memory, segments[::-1], length, **more)

    monkeypatch.setattr(StateView, "__init__", init)


def scans_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "runs_of", lambda ends: runs_of([(0, rows) for _, rows in ends]))


def partial_states_are_of_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView._after

    def after(self: StateView, layer: int, head: Any, of: Recurrence, indices: Any, counts: Any) -> Tensor:
        return original(self, layer, head, of, list(range(len(indices))), counts)

    monkeypatch.setattr(StateView, "_after", after)


def partial_scans_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView._after

    def after(self: StateView, *given: Any) -> Tensor:
        rightly, self.segments = self.segments, [segment._replace(read=0) for segment in self.segments]
        found = original(self, *given)
        self.segments = rightly
        return found

    monkeypatch.setattr(StateView, "_after", after)


Scenario = Callable[[Guest, PreTrainedModel], float]
MUTATIONS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    ("lfm2", forks_hold_no_rows, checkpoints),
    ("lfm2", steps_write_where_they_read, checkpoints),
    ("lfm2", partial_commits_keep_all_tokens, partial_commits),
    ("qwen3.5", partial_commits_keep_all_tokens, partial_commits),
    ("lfm2", partial_convolution_states_are_one_early, partial_commits),
    ("lfm2", convolution_states_are_one_early, splits),
    ("qwen3.5", checkpoint_rows_are_freed, checkpoints),
    ("mamba2", null_row_is_not_zero, splits),
    ("lfm2", segments_are_reversed, splits),
    ("jamba", scans_begin_at_zero, splits),
    ("zamba", scans_begin_at_zero, splits),
    ("qwen3.5", partial_states_are_of_other_sequences, partial_commits),
    ("qwen3.5", partial_scans_begin_at_zero, partial_commits),
    ("mamba2", partial_scans_begin_at_zero, partial_commits),
]
SEEN_BY_SELF_TEST = [
    ("lfm2", steps_write_where_they_read),
    ("lfm2", convolution_states_are_one_early),
    ("lfm2", null_row_is_not_zero),
    ("lfm2", segments_are_reversed),
    ("mamba", scans_begin_at_zero),
]


@pytest.mark.parametrize(("name", "mutate", "scenario"), MUTATIONS)
def test_scenarios_detect_wrong_states(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By logits, or by a missing row; `Memory.check` is disabled."""
    guest, reference = guest_and_reference(name)
    monkeypatch.setattr(Memory, "check", lambda self: None)
    mutate(monkeypatch)
    try:
        gap = scenario(guest, reference)
    except KeyError:
        gap = float("inf")
    assert gap > FAR


@pytest.mark.parametrize(("name", "mutate"), SEEN_BY_SELF_TEST)
def test_the_self_test_prevents_flat(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    try:
        guest = build_guest(ARCHS[name].build(), backends())
    except ModelRefused as refusal:  # the mutation affects solo as well
        why = str(refusal)
    else:
        assert guest.mode == "solo"
        why = str(guest.refused)
    assert "its logits differ" in why


# -- what the self-test finds wrong in parts of steps -----------------------------------------------------------------


def parts_of_scans_are_one_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StateView._after

    def after(self: StateView, layer: int, head: Any, of: Recurrence, indices: Any, counts: Any) -> Tensor:
        return original(self, layer, head, of, indices, [max(1, count - 1) for count in counts])

    monkeypatch.setattr(StateView, "_after", after)


def checkpoints_inside_have_the_state_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    original = States.write

    def write(self: States, layer: int, segments: Sequence[StateSegment], planes: Any, *more: Any) -> None:
        original(self, layer, segments, planes, *more)
        for segment in segments:
            for _, row in segment.between:
                for plane in self._planes[layer].values():
                    plane[row] = plane[segment.write]

    monkeypatch.setattr(States, "write", write)


WRONG_IN_PART = [  # each mutation once in half precision, too
    ("qwen3.5", checkpoints_inside_have_the_state_at_the_end, "float32 bfloat16"),
    ("lfm2", checkpoints_inside_have_the_state_at_the_end, "float32"),
    ("qwen3.5", parts_of_scans_are_one_early, "float32"),
    ("kimi-linear", parts_of_scans_are_one_early, "float32"),
    ("jamba", parts_of_scans_are_one_early, "float32"),
    ("zamba", parts_of_scans_are_one_early, "float32"),
    ("mamba2", parts_of_scans_are_one_early, "float32 bfloat16"),
    ("lfm2", partial_convolution_states_are_one_early, "float32 bfloat16"),
    ("lfm2", partial_commits_keep_all_tokens, "float32 bfloat16"),
    ("qwen3.5", partial_commits_keep_all_tokens, "float32"),
    ("qwen3.5", partial_states_are_of_other_sequences, "float32 bfloat16"),
    ("mamba", partial_scans_begin_at_zero, "float32 bfloat16"),
]


@pytest.mark.parametrize(
    ("name", "mutate", "dtype"),
    [(name, mutate, getattr(torch, dtype)) for name, mutate, dtypes in WRONG_IN_PART for dtype in dtypes.split()],
)
def test_wrong_partial_commits_are_switched_off_with_the_reason(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    guest = build_guest(ARCHS[name].build().to(dtype), backends())
    assert (guest.mode, guest.verdict is not None and guest.verdict.passed) == ("flat", True)
    assert guest.no_partial_commit is not None
    assert guest.no_partial_commit.startswith("its logits differ by")
    driver = Driver(guest, guest_and_reference(name)[1])
    driver.read({0: text(5, 1)}, compared=dtype == torch.float32)
    for how in ({"revertible": True}, {"checkpoints": (6,)}):
        plan = driver.memory.begin(Batch((Feed(0, Span(5, 8), **how),)))
        with pytest.raises(NotSupported, match="cannot be kept, nor be a checkpoint: its logits differ"):
            guest.forward(driver.memory, plan, torch.tensor([5, 6, 7]), torch.tensor([2]))
        driver.memory.abandon()
    driver.read({0: text(3, 3), 1: text(2, 4)}, compared=dtype == torch.float32)
    assert driver.worst <= BOUND


def test_a_solo_model_with_recurrent_sums_is_served_without_partial_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHS["qwen3.5"].build()
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    guest = build_guest(model, backends())
    assert guest.mode == "solo"
    assert guest.no_partial_commit is not None
    assert "runs solo" in guest.no_partial_commit
    assert "nothing has changed" not in guest.no_partial_commit


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_wrong_partial_commits_refuse_a_model_without_recurrent_layers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of its steps may be committed in part, so it cannot be switched off."""
    original = Cells.divide_all

    def the_last(self: Cells, runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
        first, last = original(self, runs, sum(run.n for run in runs) - count)
        return last, first

    monkeypatch.setattr(Cells, "divide_all", the_last)
    with pytest.raises(ModelRefused, match="after a commit of a part of a step, its logits differ by"):
        build_guest(ARCHS[name].build(), backends())


@pytest.mark.parametrize("name", EVERY)
def test_every_recurrent_architecture_supports_partial_commits(name: str) -> None:
    assert guest_and_reference(name)[0].no_partial_commit is None
