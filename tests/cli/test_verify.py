"""`kvcellar verify` finds faults that are injected into the memory, and names the check that found them."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.mixers import StateView
from kvcellar.engine.models.seam import FlatDoor
from kvcellar.memory import step
from kvcellar.memory.cells.layouts import Sliding
from kvcellar.memory.cells.rows import Rows, SequenceStates, StepRows
from kvcellar.memory.cells.tables import Table
from kvcellar.memory.kv.history import LayerHistory
from kvcellar.memory.kv.sequences import Sequences
from kvcellar.memory.kv.states import States
from kvcellar.memory.kv.storage import GroupStore
from kvcellar.memory.plan import Batch, StateSegment
from kvcellar.memory.step import Step
from kvcellar.verify import run
from kvcellar.verify.checks import CHECKS
from tests.cli.command import Ran, kvcellar
from tests.short_bits import short_bits  # noqa: F401  # pytest finds it by name
from tests.zoo import ARCHS, WINDOW

NAMES = {check.name for check in CHECKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            ARCHS[name].build().save_pretrained(path)
            made[name] = str(path)
        return made[name]

    return make


def verified(*words: str, typed: str | None = None) -> Ran:
    return kvcellar("verify", *words, "--no-kv-quality", "--threads", "1", typed=typed)


def test_the_table_lists_all_checks(folder: Callable[[str], str]) -> None:
    ran = verified(folder("gemma3"))
    assert (ran.code, ran.err) == (0, "")
    first, head, *rows = ran.out.splitlines()
    assert "Gemma3ForCausalLM" in first
    assert first.endswith("float32 on cpu, served flat")
    assert head.split() == ["check", "layers", "difference", "bound"]
    for name in NAMES - {"resumption"}:
        (row,) = [row for row in rows if row.startswith(f"  {name} ")]
        assert "  holds  " in row
        assert row.endswith("  1e-04")
    assert "  resumption: it has no recurrent layers" in ran.out
    assert rows[-1] == "warm equals cold in 9 of 9 checks that apply"


def test_json_has_the_same_in_numbers(folder: Callable[[str], str]) -> None:
    ran = verified(folder("lfm2"), "--json", "--tokens", "20", "--seed", "3")
    assert ran.code == 0
    (line,) = ran.out.splitlines()
    report = json.loads(line)
    assert (report["holds"], report["promised"], report["tokens"], report["seed"]) == (True, True, 20, 3)
    assert {check["name"] for check in report["checks"]} == NAMES
    resumption = next(check for check in report["checks"] if check["name"] == "resumption")
    assert (resumption["outcome"], resumption["layers"]) == ("holds", ["conv"])
    assert 0 < resumption["difference"] <= resumption["bound"]


def test_half_precision_is_reported_and_float32_promised(tmp_path: Any) -> None:
    ARCHS["llama"].build().to(torch.bfloat16).save_pretrained(tmp_path)
    half, full = (
        json.loads(verified(str(tmp_path), "--json", "--tokens", "16", *words).out)
        for words in ((), ("--dtype", "float32"))
    )
    assert (half["dtype"], half["promised"]) == ("bfloat16", False)
    assert (full["dtype"], full["promised"]) == ("float32", True)
    assert half["checks"][0]["bound"] > full["checks"][0]["bound"] == 1e-4
    ran = verified(str(tmp_path), "--tokens", "16")
    assert "(median " in ran.out
    assert ran.out.splitlines()[-1].endswith("this is reported, not promised: use --dtype float32 for a strict check")


def test_progress_is_shown_at_a_terminal(folder: Callable[[str], str]) -> None:
    ran = verified(folder("llama"), "--tokens", "8", typed="")
    assert ran.code == 0
    for name in NAMES:
        assert name in ran.err
    assert "%" in ran.err


def test_quantised_storage_is_reported(folder: Callable[[str], str]) -> None:
    ran = kvcellar("verify", folder("llama"), "--tokens", "8", "--threads", "1")
    assert ran.code == 0
    assert "    int8 " in ran.out
    assert " nats, same most likely token " in ran.out


def test_a_refused_model_is_reported_in_one_line(folder: Callable[[str], str]) -> None:
    ran = verified(folder("rwkv"))
    assert (ran.code, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert "cannot be served" in line


def test_too_few_tokens_are_refused(folder: Callable[[str], str]) -> None:
    ran = verified(folder("llama"), "--tokens", "7")
    assert ran.code == 2
    assert "Invalid value for '--tokens': tokens is 7" in ran.err
    assert "at least 8" in ran.err


# -- and it can fail --------------------------------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch, Guest], None]


def windows_are_one_too_wide(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    groups = tuple(replace(group, layout=Sliding(WINDOW + 1)) for group in guest.shape.groups)
    guest.shape = replace(guest.shape, groups=groups)


def keys_go_to_the_row_before(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = FlatDoor.update
    monkeypatch.setattr(FlatDoor, "update", lambda self, k, v, layer: honest(self, k.roll(1, 2), v.roll(1, 2), layer))


def rows_are_positions(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = Guest.past_length

    def past_length(self: Guest, positions: Tensor) -> int | Tensor:
        return honest(self, torch.arange(len(positions)))

    forward = Guest.run
    monkeypatch.setattr(Guest, "past_length", past_length)
    monkeypatch.setattr(
        Guest, "run", lambda self, door, ids, at, want: forward(self, door, ids, torch.arange(len(at)), want)
    )


def all_of_a_draft_is_accepted(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    monkeypatch.setattr(step, "accepted_counts", lambda batch, accepted: [len(feed.pos) for feed in batch.feeds])


def keys_turn_one_position_too_far(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = GroupStore.move
    monkeypatch.setattr(GroupStore, "move", lambda self, old, new, by: honest(self, old, new, by + 1))


def cells_are_not_given_back(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    monkeypatch.setattr(Table, "close", lambda self: None)


def states_are_of_all_of_a_draft(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    monkeypatch.setattr(States, "settle", lambda self, batch, counts: None)


def states_are_not_kept(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    monkeypatch.setattr(Rows, "keep", lambda self, keeper, pos, row: None)


def states_are_kept_from_before_the_step(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    """A checkpoint has the state from before the step."""
    honest = Sequences.commit

    def commit(self: Sequences, batch: Batch, counts: list[int], taken: Any) -> None:
        before = {id(self.record(feed.seq).states): self.record(feed.seq).states.row for feed in batch.feeds}

        def keep(states: SequenceStates) -> None:
            states._keep(states.end, before[id(states)])

        with monkeypatch.context() as patch:
            patch.setattr(SequenceStates, "keep", keep)
            for row in before.values():
                self._states.rows.hold(row)
            honest(self, batch, counts, taken)
            for row in before.values():
                self._states.rows.drop_hold(row)

    monkeypatch.setattr(Sequences, "commit", commit)


def forks_write_the_row_that_they_share(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = StepRows.begin

    def begin(self: StepRows, batch: Batch, row_of: Any) -> tuple[StateSegment, ...]:
        segments: list[StateSegment] = []
        for segment in honest(self, batch, row_of):
            if segment.read and segment.write:
                self._rows.hold(segment.read)
                self._rows.drop_hold(segment.write)
                self._new[segment.seq] = segment.read
                segment = segment._replace(write=segment.read)
            segments.append(segment)
        return tuple(segments)

    monkeypatch.setattr(StepRows, "begin", begin)


def convolutions_are_one_input_behind(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = StateView.shift_in

    def shift_in(self: StateView, new: Tensor, layer: int, name: str) -> Tensor:
        longer = honest(self, new, layer, name)
        self._states[layer][name] = self._states[layer][name].roll(1, -1)
        return longer

    monkeypatch.setattr(StateView, "shift_in", shift_in)


def given_up_steps_keep_their_rows(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = Step.abandon

    def abandon(self: Step) -> None:
        self._states.step_rows._new.clear()
        honest(self)

    monkeypatch.setattr(Step, "abandon", abandon)


def a_solo_model_reads_keys_backwards(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    honest = LayerHistory.in_order
    monkeypatch.setattr(
        LayerHistory, "in_order", lambda self: tuple(torch.cat([x[:-1].flip(0), x[-1:]]) for x in honest(self))
    )


MUTATIONS: list[tuple[str, Mutation, set[str]]] = [
    ("mistral", windows_are_one_too_wide, NAMES - {"resumption"}),
    ("llama", keys_go_to_the_row_before, NAMES - {"sliding", "resumption"}),
    ("llama", all_of_a_draft_is_accepted, {"rollback"}),
    ("gemma3", keys_turn_one_position_too_far, {"context shift"}),
    ("gpt2", cells_are_not_given_back, NAMES - {"sliding", "resumption", "context shift"}),
    ("lfm2", states_are_of_all_of_a_draft, {"rollback"}),
    ("lfm2", states_are_not_kept, {"resumption"}),
    ("mamba", forks_write_the_row_that_they_share, {"sharing", "forking", "rollback", "abandoning", "resumption"}),
    ("lfm2", convolutions_are_one_input_behind, NAMES - {"sliding", "context shift"}),
    ("qwen3-next", given_up_steps_keep_their_rows, {"abandoning"}),
    ("bloom", a_solo_model_reads_keys_backwards, NAMES - {"sliding", "resumption", "context shift"}),
]
MORE: list[tuple[str, Mutation, set[str]]] = [  # which the same checks find as one above
    ("llama", rows_are_positions, NAMES - {"sliding", "resumption", "context shift"}),
    ("mamba", states_are_of_all_of_a_draft, {"rollback"}),
    ("mamba", states_are_kept_from_before_the_step, {"resumption"}),
]


def broken_when_adopted(monkeypatch: pytest.MonkeyPatch, mutate: Mutation) -> None:
    """Injects the fault after the self-test, which would find it first."""
    honest = run.build_guest

    def build_guest(*args: Any) -> Guest:
        guest = honest(*args)
        mutate(monkeypatch, guest)
        return guest

    monkeypatch.setattr(run, "build_guest", build_guest)


@pytest.mark.parametrize(
    ("name", "mutate", "found"),
    [*MUTATIONS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda x: x.__name__ if callable(x) else None,
)
def test_every_fault_is_found_by_its_checks(
    name: str,
    mutate: Mutation,
    found: set[str],
    folder: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_when_adopted(monkeypatch, mutate)
    ran = verified(folder(name), "--json", "--tokens", "40")
    assert (ran.code, ran.err) == (1, "")
    report = json.loads(ran.out)
    assert not report["holds"]
    broken = {check["name"]: check for check in report["checks"] if check["outcome"] == "does not hold"}
    assert broken.keys() == found
    for check in broken.values():
        far = check["difference"] is not None and check["difference"] > 10 * check["bound"]
        assert far or check["note"], "there is no reason"
        assert not re.search("(Type|Attribute|Name)Error", check["note"]), "the mutation itself is wrong"


def test_a_fault_is_described_in_one_line(folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken_when_adopted(monkeypatch, states_are_of_all_of_a_draft)
    ran = verified(folder("lfm2"))
    assert ran.code == 1
    (line,) = [line for line in ran.out.splitlines() if line.startswith("  rollback (")]
    assert line.startswith("  rollback (causal, conv) does not hold; logits differ by ")
    assert "1e-04 is allowed, and " in line
    assert ran.out.splitlines()[-1] == "warm equals cold in 7 of 8 checks that apply"
