"""docs/models.md agrees with a sample of its types, and its totals with its rows."""

import re

import pytest
import torch

from scripts.images_section import HEADING
from scripts.models_page import PAGE, TYPES, Row, check, render
from tests.own_layers import need_own_layers
from tests.zoo_test_support.sweep import NO_MODEL

TEXT = PAGE.read_text().partition(HEADING)[0]
ROWS = dict(re.findall(r"^\| (\S+) \| (flat|solo|refused|wrong|not tested) \|", TEXT, re.M))
SAMPLE = ("bloom", "gemma3n", "llama", "recurrent_gemma")
MORE = ("camembert", "gpt2", "lfm2", "llama4_text")


@pytest.mark.parametrize("model_type", [*SAMPLE, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_sampled_type_is_served_as_on_the_page(model_type: str) -> None:
    need_own_layers(torch.bfloat16)
    assert f"\n{check(model_type)}\n" in TEXT, "run `make docs`"


def test_why_steps_are_run_by_modules_and_where_bits_differ_is_on_the_page() -> None:
    rows = [
        Row("one", "flat"),
        Row("two", "flat", modules="it has hooks", differs="mixer"),
        Row("three", "flat", modules="it has hooks"),
        Row("four", "solo", why="its own attention", modules="it runs alone", differs="attention"),
        Row("five", "refused", why="no cache"),
    ]
    page = render(rows)
    assert "## Flat, and steps run by modules, because\n\n- it has hooks (2): two, three\n" in page
    assert "## Where bits differ, of those that are flat\n\n- mixer (1): two\n" in page
    lines = {
        "| one | flat | recorded | yes |  |",
        "| two | flat | modules | no |  |",
        "| five | refused | | | no cache |",
    }
    assert set(page.splitlines()).issuperset(lines)


def test_every_type_has_a_row() -> None:
    assert list(ROWS) == list(TYPES)


def test_the_totals_match_the_rows() -> None:
    counts = {how: list(ROWS.values()).count(how) for how in ("flat", "solo", "refused", "wrong", "not tested")}
    for how, line in zip(counts, re.findall(r"^\| .* \| (\d+) \|$", TEXT, re.M), strict=False):
        assert int(line) == counts[how], how
    flat = re.findall(r"^\| \S+ \| flat \| (\w+) \| (\w+) \|", TEXT, re.M)
    recorded, same = (sum(row[place] == word for row in flat) for place, word in ((0, "recorded"), (1, "yes")))
    assert f"| flat, and steps are recorded | {recorded} |\n" in TEXT
    assert f"| flat, and a row has the same bits in any batch | {same} |\n" in TEXT
    works, built = counts["flat"] + counts["solo"], len(TYPES) - len(NO_MODEL)
    assert f"**{works} of the {built} types that can be built work: {works / built:.1%}.**" in TEXT


def test_the_page_has_no_numbers_that_vary_between_runs() -> None:
    """No times, and no numbers that depend on rounding."""
    assert not re.search(r"\d\.?\d*e[+-]\d", TEXT)
    assert not re.search(r"\b\d+(\.\d+)? (s|ms|seconds)\b", TEXT)


def test_the_page_of_no_rows_counts_none() -> None:
    assert "**0 of the 0 types" in render([])
