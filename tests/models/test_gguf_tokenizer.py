"""The tokenizer of a GGUF file gives the tokens of the tokenizer that was converted, with its template and its ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvcellar.engine.models.gguf.gguf_file import Header, read_header
from kvcellar.engine.models.gguf.gguf_import import import_gguf, write_tokenizer
from kvcellar.engine.models.load import Loaded, load
from kvcellar.errors import ModelRefused
from tests.models import gguf_files as gguf
from tests.zoo import ARCHS

TEXTS = ["def main(): return 1234", "  two  spaces\n\n\tand a tab", "naïve café 🦙 it's", "<|end|>x<|end|>", ""]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
    "gpt-2": [pre_tokenizers.ByteLevel(False)],
}
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def trained(split: str) -> Tokenizer:
    """A byte-level tokenizer of 400 tokens, the last one a control token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=399, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3 + [Path(__file__).read_text()], trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def fields_of(tokenizer: Tokenizer, split: str, **more: Any) -> dict[str, Any]:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.chat_template": TEMPLATE, **{f"tokenizer.ggml.{key}": one for key, one in more.items()},
    }  # fmt: skip


def imported(fields: dict[str, Any], tmp_path: Path, name: str = "llama") -> Loaded:
    model = ARCHS[name].build(vocab_size=len(fields["tokenizer.ggml.tokens"]))
    file = gguf.convert(model, tmp_path / "m.gguf", extra=fields)
    (tmp_path / "model").mkdir()
    import_gguf(file, tmp_path / "model")
    return load(tmp_path / "model")


@pytest.mark.parametrize("split", SPLITS)
def test_texts_have_the_same_tokens(split: str, tmp_path: Path) -> None:
    tokenizer = trained(split)
    found = imported(fields_of(tokenizer, split), tmp_path)
    assert found.text is not None
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert found.text.tokenizer.encode(text).ids == ids
        assert found.text.tokenizer.decode(ids) == tokenizer.decode(ids)
    assert found.text.chat_template == TEMPLATE
    assert found.text.special["eos_token"] == "<|end|>"
    assert found.end_ids == {tokenizer.token_to_id("<|end|>")}


def test_a_first_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = trained("gpt-2")
    bos = tokenizer.token_to_id("<|end|>")
    found = imported(fields_of(tokenizer, "gpt-2", bos_token_id=bos, add_bos_token=True), tmp_path)
    assert found.text is not None
    assert found.text.tokenizer.encode("def x").ids == [bos, *tokenizer.encode("def x").ids]


@pytest.mark.parametrize("split", ["llama-bpe", "llama3", "falcon3", "lfm2", "tekken"])
def test_splits_of_llama_3_take_words_whole_and_start_a_text(split: str, tmp_path: Path) -> None:
    """The word abc is a token that no merge makes."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "<|end|>"]
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3], "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    for more, first in (({"bos_token_id": 258}, [258]), ({}, []), ({"bos_token_id": 258, "add_bos_token": False}, [])):
        given = fields | {f"tokenizer.ggml.{key}": one for key, one in more.items()}
        file = gguf.write(tmp_path / "m.gguf", {"general.architecture": "llama", **given}, {})
        write_tokenizer(read_header(file), tmp_path)
        found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert found.encode("abc").ids == [*first, tokens.index("abc")]
    given = {"general.architecture": "llama", **fields, "tokenizer.ggml.pre": "gpt-2"}
    write_tokenizer(read_header(gguf.write(tmp_path / "m.gguf", given, {})), tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.encode("abc").tokens == ["ab", "c"]


def test_a_sentencepiece_vocabulary_is_merged_by_its_scores(tmp_path: Path) -> None:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
        "ba",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 262 + [-1.0, -3.0, -2.0, -4.0]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    found = imported(fields, tmp_path)
    assert found.text is not None
    encoded = found.text.tokenizer.encode("ab ba")
    assert encoded.tokens == ["<s>", "▁ab", "▁", "ba"]
    assert found.text.tokenizer.encode("c").ids[-1] == tokens.index("<0x63>")
    assert found.text.tokenizer.decode(encoded.ids) == "ab ba"


@pytest.mark.parametrize("kind", [None, "none", "no_vocab"])
def test_a_file_without_a_tokenizer_is_served_with_token_ids(kind: str | None, tmp_path: Path) -> None:
    extra = {} if kind is None else {"tokenizer.ggml.model": kind}
    file = gguf.convert(ARCHS["llama"].build(), tmp_path / "m.gguf", extra=extra)
    (tmp_path / "model").mkdir()
    import_gguf(file, tmp_path / "model")
    assert load(tmp_path / "model").text is None


def test_merges_are_not_recovered_from_long_tokens(tmp_path: Path) -> None:
    """The time of that grows with the square of their lengths."""
    fields = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"{n:04}" * 1024 for n in range(5)], "tokenizer.ggml.scores": [0.5] * 5,
    }  # fmt: skip
    with pytest.raises(ModelRefused, match="too long to recover merges"):
        write_tokenizer(Header("m.gguf", fields, {}), tmp_path)
