"""`verify`: checks that hold are reported so, those that do not apply have a reason, and the seed decides the texts.

That it fails when something is broken is shown where its exit code is: `tests/cli/test_verify.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.mixers import StateView
from kvcellar.engine.models.selftest import worst
from kvcellar.errors import BadRequest
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.cells.layouts import Causal, Sliding
from kvcellar.memory.shapes import StoredAs
from kvcellar.verify import run
from kvcellar.verify.checks import CHECKS
from kvcellar.verify.harness import Harness, gap_of, other_text
from kvcellar.verify.run import BITS, WAYS, verify
from tests.short_bits import short_bits  # noqa: F401  # pytest finds it by name
from tests.zoo import ARCHS, WINDOW, reference_logits

NOT_APPLICABLE = {  # and a word of why
    "llama": {"sliding": "none of its layers", "resumption": "no recurrent layers"},
    "gemma3": {"resumption": "no recurrent layers"},
    "llama4": {"resumption": "no recurrent layers", "context shift": "logits change"},
    "bloom": {"sliding": "solo", "resumption": "no recurrent layers", "context shift": "solo"},
    "mamba": {"sliding": "none of its layers", "context shift": "recurrent"},
    "lfm3": {"context shift": "recurrent"},
}
LAYERS = {
    "llama": ("causal",),
    "gemma3": (f"sliding {WINDOW}", "causal"),
    "llama4": (f"chunked {WINDOW}", "causal"),
    "bloom": ("solo",),
    "mamba": ("conv", "recurrent"),
    "lfm3": (f"sliding {WINDOW}", "causal", "conv"),
}
NAMES = [check.name for check in CHECKS]


def guest_of(name: str) -> Guest:
    return build_guest(ARCHS[name].build(), backends())


@pytest.mark.parametrize("name", NOT_APPLICABLE)
def test_checks_hold_and_those_that_do_not_apply_have_a_reason(name: str) -> None:
    report = verify(guest_of(name), quality=False)
    assert report.holds, report.broken
    assert [check.name for check in report.checks] == NAMES
    left = {check.name: check.note for check in report.checks if check.outcome == "not applicable"}
    assert left.keys() == NOT_APPLICABLE[name].keys()
    for check, why in NOT_APPLICABLE[name].items():
        assert why in left[check]
    assert report.layers == LAYERS[name]
    for check in report.applied:
        assert check.outcome == "holds"
        assert check.rows > 10
        assert 0 < check.difference == check.largest <= check.bound == 1e-4
        assert set(check.layers) <= set(report.layers)
        assert not check.other_text


def test_the_seed_decides_everything() -> None:
    guest = guest_of("gemma3")
    one, again, other = (verify(guest, tokens=24, seed=seed, quality=False) for seed in (1, 1, 2))
    assert one == again
    assert [check.largest for check in one.checks] != [check.largest for check in other.checks]


def test_every_check_is_announced_before_it_runs() -> None:
    names: list[str] = []
    verify(guest_of("llama"), tokens=16, quality=False, watch=names.append)
    assert names == [*NAMES, BITS]


@pytest.mark.parametrize("tokens", [8, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (9, 10, 13))])
@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_short_texts_are_checked_too(name: str, tokens: int) -> None:
    report = verify(guest_of(name), tokens=tokens, quality=False)
    assert report.holds, report.broken
    assert report.tokens == tokens


def test_a_model_of_the_shortest_context_is_checked() -> None:
    report = verify(ARCHS["gpt2"].build(n_positions=8), quality=False)
    assert report.holds, report.broken
    assert report.tokens == 8


def test_a_window_that_texts_do_not_leave_behind_is_not_said_to_hold() -> None:
    guest = guest_of("mistral")
    sliding = {
        tokens: verify(guest, tokens=tokens, quality=False).checks[NAMES.index("sliding")] for tokens in (15, 16)
    }
    assert sliding[15].outcome == "not applicable"
    assert sliding[15].note == "a text of 15 tokens is not beyond 8 positions; longer ones may be"
    assert sliding[16].outcome == "holds"


def test_of_two_windows_the_one_that_is_too_large_is_named() -> None:
    """None of the zoo has two; a window that no text leaves behind shows all, as no window does."""
    guest = guest_of("gemma3")
    groups = [
        replace(group, layout=Sliding(200)) if group.layout == Causal() else group for group in guest.shape.groups
    ]
    guest.shape = replace(guest.shape, groups=tuple(groups))
    sliding = verify(guest, tokens=100, quality=False).checks[NAMES.index("sliding")]
    assert (sliding.outcome, sliding.layers) == ("holds", (f"sliding {WINDOW}", "sliding 200"))
    assert sliding.note == "texts of 100 tokens are not beyond 200 positions"


def test_where_no_part_of_a_draft_can_be_kept_all_and_nothing_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a solo model whose state is known only after another forward."""
    model = ARCHS["lfm2"].build()
    model._can_set_attn_implementation = lambda: False
    monkeypatch.setattr(StateView, "_at", lambda self, layer, again: lambda rows, n: again(rows, n).states(layer))
    guest = build_guest(model, backends())
    assert guest.mode == "solo"
    report = verify(guest, quality=False)
    assert report.holds, report.broken
    rollback = report.checks[NAMES.index("rollback")]
    assert rollback.outcome == "holds"
    assert rollback.note == f"only whole drafts can be accepted: {guest.no_partial_commit}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_half_precision_is_reported_with_its_own_bound(dtype: torch.dtype) -> None:
    report = verify(ARCHS["gemma3"].build().to(dtype), tokens=40, quality=False)
    assert report.holds
    assert not report.promised
    for check in report.applied:
        assert check.difference is not None
        assert check.largest is not None
        assert 1e-4 < check.difference <= check.largest
        assert check.bound > 1e-3


def test_in_half_precision_the_middle_row_of_a_feed_counts_and_short_feeds_count_together() -> None:
    long = torch.tensor([0.1, 0.1, 9.0, 0.2, 0.2])
    short = [torch.tensor([0.3, 7.0]), torch.tensor([0.1])]
    assert worst([long, *short], torch.bfloat16) == pytest.approx(0.3)
    assert worst([long], torch.float16) == pytest.approx(0.2)
    assert worst([long, *short], torch.float32) == 9.0
    assert worst(short, torch.float64) == 7.0


@pytest.mark.parametrize(
    ("dtype", "wrong", "holds", "tries"),
    [
        (torch.bfloat16, 0, True, 1),
        (torch.bfloat16, 2, True, 3),
        (torch.bfloat16, 9, False, 3),
        (torch.float32, 1, False, 1),
    ],
)
def test_in_half_precision_a_difference_counts_if_other_tokens_show_it_too(
    dtype: torch.dtype, wrong: int, holds: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first `wrong` tries of the first check differ."""
    tried: list[tuple[int, ...]] = []
    honest = Harness.gaps

    def gaps_of_try(self: Harness, bound: float) -> tuple[list[torch.Tensor], int]:
        gaps, other = honest(self, bound)
        tried.append(self._seen[0].text)
        return ([torch.full((5,), 0.5)], 0) if len(tried) <= wrong else (gaps, other)

    monkeypatch.setattr(Harness, "gaps", gaps_of_try)
    monkeypatch.setattr(run, "CHECKS", CHECKS[:1])
    (check,) = verify(ARCHS["llama"].build().to(dtype), tokens=12, quality=False).checks
    assert (check.outcome == "holds") == holds
    assert len(tried) == len(set(tried)) == tries
    assert check.note.startswith("the first texts differed by 5.0e-01") == (holds and wrong > 0)
    assert (check.largest == 0.5) == (not holds)


def test_text_is_other_text_only_where_there_is_no_doubt() -> None:
    theirs = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.9, 0.0], [1.0, 0.9999, 0.0]])
    ours = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.9999, 1.0, 0.0]])
    assert other_text(ours, theirs, 1e-3) == 1
    assert other_text(ours, theirs, 1e-5) == 2
    assert other_text(ours, 1000 * theirs, 1e-1) == 0  # of the largest logit
    assert gap_of(ours, theirs).tolist() == pytest.approx([0, 0.1, 1e-4], abs=1e-6)
    assert gap_of(10 * ours, 10 * theirs).tolist() == pytest.approx([0, 0.1, 1e-4], abs=1e-6)
    assert gap_of(ours / 10, theirs / 10).tolist() == pytest.approx([0, 0.01, 1e-5], abs=1e-6)


def test_the_guest_serves_afterwards_as_before() -> None:
    guest = guest_of("gemma3")
    tokens = list(range(3, 40))
    wanted = reference_logits(ARCHS["gemma3"].build(), tokens)
    before = guest.model.config._attn_implementation
    verify(guest, tokens=24, quality=False)
    assert guest.model.config._attn_implementation == before
    assert verify(guest, tokens=24, quality=False).holds
    assert torch.equal(reference_logits(guest.model, tokens), wanted)


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_the_report_contains_the_quality_of_quantised_kv(name: str) -> None:
    report = verify(guest_of(name), tokens=8)
    assert [one.stored for one in report.kv_quality] == list(WAYS)
    for one in report.kv_quality:
        assert one.kl is not None
        assert one.kl > 0


def test_a_model_that_stores_no_keys_has_nothing_to_store_in_fewer_bits() -> None:
    assert verify(guest_of("mamba"), tokens=8, quality=True).kv_quality == ()


def test_too_few_tokens_and_quantised_guests_are_refused() -> None:
    guest = guest_of("llama")
    with pytest.raises(BadRequest, match="at least 8"):
        verify(guest, tokens=7)
    with pytest.raises(BadRequest, match="quantised"):
        verify(guest.storing(StoredAs.parse("int8"), backends()))


def test_a_report_is_json() -> None:
    report = verify(guest_of("lfm2"), tokens=8, quality=False)
    decoded = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert decoded["holds"] is True
    assert [check["name"] for check in decoded["checks"]] == NAMES


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_parameters_are_those_of_the_files_whatever_layers_became_at_load(name: str, tmp_path: Path) -> None:
    """Tied ones count once; those that were packed are in no parameter of the network any more."""
    model = ARCHS[name].build()
    model.save_pretrained(tmp_path)
    assert verify(tmp_path, tokens=8, quality=False).parameters == sum(one.numel() for one in model.parameters())
