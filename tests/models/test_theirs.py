"""docs/transformers.md says what comes out when a sample is tried again, and its scripts print what it says they do."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from scripts import theirs
from scripts.theirs import BOUND, CHECKS, PAGE, TEXTS, TYPES, Subject, look
from scripts.theirs_page import FOLDER, REPORTS, Claim, Found, Row, render, script, sorted_out, torch_minor, words
from tests.zoo_test_support.sweep import of_type

TEXT = PAGE.read_text()
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
MADE_WITH = re.search(r"with transformers (\S+) and torch (\S+)\. Tests", TEXT).groups()
LISTED = dict.fromkeys(found for line in re.findall(r"^- ([^:]+): ", TEXT, re.M) for found in line.split(", "))
DRAWN = "log probabilities of what it said"


def section(name: str) -> str:
    return SECTIONS[words(name)[0].rstrip(".")]


def steady(printed: str) -> list[str]:
    """Its lines without what hangs on drawn tokens: two that are almost as likely may change places on another CPU."""
    return [
        f"{said} {len(gaps.split())} gaps, any: {any(map(float, gaps.split()))}" if said == DRAWN else line
        for line in printed.splitlines()
        for said, _, gaps in [line.partition(", off by ")]
    ]


def test_of_a_healthy_model_there_is_nothing_to_say() -> None:
    assert look("llama").found == ()
    assert "llama" not in LISTED


@pytest.mark.parametrize(
    ("model_type", "reports"),
    [
        ("mamba", {"mamba_two_pieces", "cache_params_turn", "no_crop", "stateful_drafts"}),
        ("roberta", {"roberta_generate"}),
        ("bamba", {"bamba_positions", "batch_layers"}),
        ("lfm2", {"bare_cache"}),
    ],
)
def test_a_type_that_is_tried_again_has_the_faults_that_the_page_says(model_type: str, reports: set[str]) -> None:
    reported, rest = sorted_out([look(model_type)])
    assert not rest
    of_page = {name for name in REPORTS if re.search(rf"^- .*\b{model_type}\b.*: ", section(name), re.M)}
    assert {name for name, types in reported.items() if types} == of_page, "run `make docs`"
    assert reports <= of_page


@pytest.mark.parametrize("name", REPORTS)
def test_a_script_prints_what_the_page_says_and_stands_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, prints = re.search(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", section(name), re.S).groups()
    assert code == script(name), "run `make docs`"
    if MADE_WITH != (transformers.__version__, torch_minor()):
        pytest.skip(f"the page was made with transformers {MADE_WITH[0]} and torch {MADE_WITH[1]}")
    exec(compile(code, name, "exec"), {"__name__": "__report__"})
    assert steady(capsys.readouterr().out) == steady(prints)


def test_every_script_is_reported_and_knows_nothing_of_ours() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(REPORTS)
    for name in REPORTS:
        assert set(re.findall(r"^(?:from|import) (\w+)", script(name), re.M)) <= {"torch", "transformers"}


def test_the_counts_add_up() -> None:
    equal, all_types = map(int, re.search(r"\*\*(\d+) of (\d+) types are equal in all", TEXT).groups())
    assert all_types == len(TYPES)
    assert equal == all_types - len(LISTED.keys() & set(TYPES))


def test_nothing_on_the_page_changes_from_run_to_run() -> None:
    assert not re.search(r"\d\.?\d*e[+-]\d", TEXT)
    assert not re.search(r"\b\d+(\.\d+)? (s|ms|seconds)\b", TEXT)


def test_a_cache_that_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every cached key but the last, the first is made zero; a forward without a cache does not notice."""
    honest = DynamicLayer.update

    def forgetful(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = honest(self, *args, **kwargs)
        keys = keys.clone()
        keys[:, :, 0] = 0
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    tried = ("a beginning", "a batch", "generate with a cache", "generate without a cache", "two pieces", "crop")
    monkeypatch.setattr(theirs, "CHECKS", {name: CHECKS[name] for name in tried})
    found = {found.check: found for found in look("llama").found}
    assert found.keys() == {"generate with a cache", "two pieces", "crop"}
    assert found["two pieces"].gap > 100 * BOUND


@torch.no_grad()
def test_a_table_of_sines_stays_one_in_a_tiny_model_so_that_padding_moves_nothing() -> None:
    assert theirs.padding(Subject(of_type("roformer"), 0)) <= BOUND


def test_what_is_raised_is_a_finding_with_its_place() -> None:
    raised = next(found for found in look("lfm2").found if found.check == "DynamicCache()")
    assert raised.gap is None
    assert raised.said == "IndexError: list index out of range"
    assert raised.where == "cache_utils.py, Cache.get_conv_state"


def test_a_type_that_cannot_be_built_does_not_stop_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(model_type: str) -> Row:
        if model_type == "mamba":
            raise AttributeError("no such config field")
        return Row(model_type, ())

    monkeypatch.setattr(theirs, "look", looked)
    assert theirs.main(["mamba", "llama"]) == 0
    out, progress = capsys.readouterr()
    assert "mamba: building it: AttributeError: no such config field" in out
    assert out.endswith(f"1 of 2 types are equal in all {len(CHECKS)} checks\n")
    assert progress == "1/2 mamba\n2/2 llama\n"


def test_the_page_groups_by_fault_and_says_what_nobody_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = tmp_path / "models.md"
    served.write_text("| jamba | flat |  |\n| mamba | flat |  |\n| minimax | refused | why |\n")
    monkeypatch.setattr("scripts.theirs_page.SERVED", served)
    monkeypatch.setattr("scripts.theirs_page.prints", lambda name: f"{name} was run\n")
    page = render(
        [
            Row("jamba", (Found("two pieces", 0.5),)),
            Row("llama", ()),
            Row("mamba", (Found("two pieces", 0.5), Found("beams", None, "OSError: no", "a.py, f"))),
            Row("minimax", (Found("beams", float("inf")),)),
        ],
        {"two pieces": "In two, and in one.", "beams": "Three, and none."},
        BOUND,
        TEXTS,
    )
    assert "**1 of 4 types are equal in all 2 checks.**" in page
    assert "| wrong, and nobody is told | 3 |" in page
    assert "| not looked into | 1 |" in page
    assert "- jamba, mamba: two pieces: off by 50%" in page
    assert "- minimax: beams: not the same" in page
    assert "*kvcellar:* flat jamba, mamba. It hands" in page
    assert "*kvcellar:* refused minimax." in page
    assert "```text\nmamba_two_pieces was run\n```" in page
    assert page.endswith("## Not looked into\n\n- mamba: beams: OSError: no (a.py, f)\n")
    assert "- *beams* Three, and none." in page
    assert words("bart_padding")[0] not in page


def test_a_claim_is_about_what_is_unequal_or_about_what_was_raised() -> None:
    unequal, raised = Found("crop", 0.5), Found("crop", None, "RuntimeError: no")
    assert Claim("crop", "").speaks_of("mamba", unequal)
    assert not Claim("crop", "").speaks_of("mamba", raised)
    assert not Claim("crop", "RuntimeError").speaks_of("mamba", unequal)
    assert Claim("crop", "RuntimeError").speaks_of("mamba", raised)
    assert not Claim("two pieces, a crop", "RuntimeError").speaks_of("mamba", raised)
    assert not Claim(None, None, "mamba2 jamba").speaks_of("mamba", raised)
