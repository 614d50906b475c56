"""docs/models.md says what comes out when a sample of its types is tried again, and adds up."""

import re

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from scripts.models_page import FACTS, PAGE, TYPES, Row, look, render
from tests.zoo import ARCHS
from tests.zoo_test_support.sweep import NO_MODEL, of_type

TEXT = PAGE.read_text()
ROWS = dict(re.findall(r"^\| (\S+) \| (flat|solo|refused|wrong|not tried) \|", TEXT, re.M))
SAMPLE = (
    "axk2", "bloom", "camembert", "deepseek_v3", "gemma3_text", "gemma3n", "gpt2", "lfm2", "llama", "llama4_text",
    "mamba", "qwen3_next", "recurrent_gemma",
)  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_that_is_tried_again_does_what_the_page_says(model_type: str) -> None:
    assert f"\n{look(model_type)}\n" in TEXT, "run `make docs`"


def test_every_type_has_a_row() -> None:
    assert list(ROWS) == list(TYPES)


def test_the_totals_are_those_of_the_rows() -> None:
    counts = {how: list(ROWS.values()).count(how) for how in ("flat", "solo", "refused", "wrong", "not tried")}
    for how, line in zip(counts, re.findall(r"^\| .* \| (\d+) \|$", TEXT, re.M), strict=False):
        assert int(line) == counts[how], how
    works, built = counts["flat"] + counts["solo"], len(TYPES) - len(NO_MODEL)
    assert f"**{works} of the {built} types that can be built work: {works / built:.1%}.**" in TEXT


def test_nothing_on_the_page_changes_from_run_to_run() -> None:
    """No time, and no small number that rounding decides."""
    assert not re.search(r"\d\.?\d*e[+-]\d", TEXT)
    assert not re.search(r"\b\d+(\.\d+)? (s|ms|seconds)\b", TEXT)


def test_of_no_rows_the_page_says_that_there_are_none() -> None:
    assert "**0 of the 0 types" in render([])


# -- what the page says of transformers -------------------------------------------------------------------------------

IDS = torch.randint(3, 101, (1, 32), generator=torch.Generator().manual_seed(0))


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-2 * b.abs().max())


def returns_no_cache(model: PreTrainedModel) -> bool:
    return model(IDS, use_cache=True).keys() == {"logits"}


def keeps_another_object(model: PreTrainedModel) -> bool:
    (memory,) = (value for name, value in model(IDS, use_cache=True).items() if name != "logits")
    return memory is not None and not isinstance(memory, Cache)


def looks_at_later_tokens(model: PreTrainedModel) -> bool:
    return differ(model(IDS[:, :20], use_cache=False).logits, model(IDS, use_cache=False).logits[:, :20])


def forgets_between_forwards(model: PreTrainedModel) -> bool:
    whole, cache = model(IDS, use_cache=False).logits, DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in IDS.split(16, 1)]
    return not differ(pieces[0], whole[:, :16]) and differ(pieces[1], whole[:, 16:])


def cannot_make_its_cache(model: PreTrainedModel) -> bool:
    model(IDS, use_cache=False)
    with pytest.raises(AttributeError, match="num_hidden_layers"):
        model(IDS, use_cache=True)
    return True


TRIED = (
    ("returns no cache", returns_no_cache),
    ("object of its own", keeps_another_object),
    ("tokens after it", looks_at_later_tokens),
    ("in its modules", forgets_between_forwards),
    ("raises", cannot_make_its_cache),
)


@torch.no_grad()
@pytest.mark.parametrize(("fact", "model_type"), [(fact, of) for fact, types in FACTS.items() for of in types])
def test_transformers_does_what_the_page_says(fact: str, model_type: str) -> None:
    known = [arch for arch in ARCHS.values() if arch.model_type == model_type]
    model = known[0].build() if known else of_type(model_type)
    (holds,) = [check for words, check in TRIED if words in fact]
    assert holds(model)


def test_a_fact_is_on_the_page_as_long_as_its_types_are_refused() -> None:
    assert all(f"\n- {fact} (" in TEXT for fact in FACTS)
    assert "transformers does" not in render([Row("blt", "flat")])
