"""A draft model fits a target if ids are the same tokens in both; each reason why not is found, and all at once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvcellar.engine.models.heads.draft_fit import DraftFit, draft_fit
from kvcellar.engine.models.load import Loaded, load
from kvcellar.errors import DraftRefused, ModelRefused
from kvcellar.text.tokens import TextAssets
from tests.text import made
from tests.zoo import ARCHS

BIG, SMALL = 4, 1


@cache
def network(layers: int, vocab: int = 512, context: int = 256) -> Loaded:
    config = {"num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": context}
    return replace(load(ARCHS["llama"].build(**config)), name="big" if layers == BIG else "small")


def side(layers: int, tokenizer: Tokenizer | None, *, vocab: int = 512, ends: tuple[int, ...] = (2,)) -> Loaded:
    text = TextAssets(tokenizer, {}, None) if tokenizer is not None else None
    return replace(network(layers, vocab), text=text, end_ids=frozenset(ends), without_text="" if text else "no files")


def fit(
    draft: Tokenizer | None = None,
    *,
    target: Tokenizer | None = None,
    vocab: int = 512,
    ends: tuple[int, ...] = (2,),
    layers: int = SMALL,
) -> DraftFit:
    return draft_fit(side(BIG, target or made.byte_level()), side(layers, draft, vocab=vocab, ends=ends))


def tokens(*words: str, first: str = "<unk>") -> Tokenizer:
    """Ids in the order of the words, of which the first is for everything else."""
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate((first, *words))}, first))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return built


def swapped() -> Tokenizer:
    return tokens("a", "d", "bc")


def lowered() -> Tokenizer:
    built = made.byte_level()
    built.normalizer = normalizers.Lowercase()
    return built


def digits() -> Tokenizer:
    built = made.byte_level()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return built


def prefixed() -> Tokenizer:
    built = made.gemma_like()
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built


def test_the_same_tokenizer_fits() -> None:
    found = fit(made.byte_level())
    found.require()
    assert found.refused == {}
    assert list(found.found) == ["tokenizer", "vocabulary", "end tokens", "size", "context", "device"]
    assert found.found["tokenizer"] == "the same tokens"
    assert found.found["vocabulary"] == "512 ids in both"


def test_another_order_of_the_same_tokens_is_refused_with_the_first() -> None:
    found = fit(swapped(), target=made.undecoded())
    assert "2 of the 4 tokens" in found.refused["tokenizer"]
    assert "token 2 is 'bc' in the target and 'd' in the draft" in found.refused["tokenizer"]


def test_a_draft_that_lacks_a_word_is_refused() -> None:
    assert (
        "target that the draft lacks: 1, the first 'd' (id 3)"
        in fit(tokens("a", "bc"), target=made.undecoded()).refused["tokenizer"]
    )


def test_a_draft_that_lacks_only_added_tokens_fits_and_that_is_noted() -> None:
    target = made.byte_level()
    target.add_tokens([AddedToken("<only here>")])
    found = fit(made.byte_level(), target=target)
    assert not found.refused
    assert "added tokens of the target (1)" in found.found["tokenizer"]


@pytest.mark.parametrize("other", [lowered, digits])
def test_a_tokenizer_that_divides_texts_in_another_way_is_refused(other: Callable[[], Tokenizer]) -> None:
    assert "divide texts into others" in fit(other()).refused["tokenizer"]


def test_a_space_before_each_text_is_no_difference() -> None:
    assert prefixed().encode("a b").ids != made.gemma_like().encode("a b").ids
    assert not fit(prefixed(), target=made.gemma_like()).refused


def test_truncation_and_padding_of_a_tokenizer_are_no_difference() -> None:
    cut = made.byte_level()
    cut.enable_truncation(3)
    cut.enable_padding(length=100)
    assert not fit(cut).refused


@pytest.mark.parametrize("vocab", [500, 600])
def test_padded_rows_of_a_vocabulary_are_allowed(vocab: int) -> None:
    found = fit(made.byte_level(), vocab=vocab)
    assert not found.refused
    assert f"512 ids in the target and {vocab} in the draft" in found.found["vocabulary"]
    assert "padding" in found.found["vocabulary"]


def test_a_draft_that_cannot_read_every_token_is_refused() -> None:
    last = made.byte_level().get_vocab_size() - 1
    found = fit(made.byte_level(), vocab=last)
    assert f"ids up to {last}, and the draft reads ids up to {last - 1}" in found.refused["vocabulary"]


def test_without_tokenizers_the_vocabularies_have_to_be_equal() -> None:
    assert not fit(None).refused
    assert "not compared: small has none (no files)" in fit(None).found["tokenizer"]
    assert "512 token ids and the draft 500" in fit(None, vocab=500).refused["vocabulary"]


@pytest.mark.parametrize(("ends", "fits"), [((2,), True), ((2, 3), True), ((), True), ((3,), False)])
def test_end_tokens_have_to_overlap(ends: tuple[int, ...], fits: bool) -> None:
    found = fit(made.byte_level(), ends=ends)
    assert ("end tokens" not in found.refused) is fits
    if not fits:
        name = made.byte_level().id_to_token
        assert found.refused["end tokens"].startswith(
            f"the target ends texts with 2 {name(2)!r}, and the draft with 3 {name(3)!r}"
        )


@pytest.mark.parametrize("layers", [BIG, BIG + 1])
def test_a_draft_that_is_not_smaller_is_refused(layers: int) -> None:
    found = fit(made.byte_level(), layers=layers)
    assert set(found.refused) == {"size"}


def test_a_shorter_context_is_noted() -> None:
    draft = replace(network(SMALL, 512, 64), end_ids=frozenset({2}))
    assert "64 tokens, fewer than the 256" in draft_fit(side(BIG, None), draft).found["context"]


def test_another_device_is_refused_and_another_dtype_noted() -> None:
    target, half, there = side(BIG, None), side(SMALL, None), side(SMALL, None)
    half = replace(half, model=ARCHS["llama"].build(num_hidden_layers=1, vocab_size=512).to(torch.bfloat16))
    there = replace(there, model=ARCHS["llama"].build(num_hidden_layers=1, vocab_size=512).to("meta"))
    assert draft_fit(target, half).found["device"] == "bfloat16 on cpu; the target is in float32"
    assert "the target is on cpu and the draft on meta" in draft_fit(target, there).refused["device"]


def test_all_reasons_are_in_one_error() -> None:
    found = fit(lowered(), vocab=100, ends=(3,), layers=BIG)
    with pytest.raises(ModelRefused) as raised:
        found.require()
    assert isinstance(raised.value, DraftRefused)
    assert list(raised.value.refused) == list(found.refused) == ["tokenizer", "vocabulary", "end tokens"]
    for name, reason in found.refused.items():
        assert f"{name}: {reason}" in str(raised.value)
