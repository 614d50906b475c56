"""Words: the tokenizer as it is, without its silent cuts, and with text that may be only text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers

from kvcellar.errors import BadRequest, NativePanic
from kvcellar.text import tokens
from kvcellar.text.tokens import RELEASE_ABOVE, TextTokenizer
from tests.text.made import CONTROL, KINDS, byte_level, words


def test_a_prompt_is_neither_cut_nor_padded() -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=9)
    plain = words("byte_level")
    assert TextTokenizer(made).encode("The cellar is cool and dark") == plain.encode("The cellar is cool and dark")


def test_begin_of_text_is_added_as_the_tokenizer_is_configured() -> None:
    begin = words("byte_level").encode("")[0]
    assert words("byte_level").encode("a", special=True)[0] == begin
    assert words("byte_level").encode("a", special=False)[0] != begin
    assert TextTokenizer(byte_level(), add_special=False).encode("a") == words("byte_level").encode("a", special=False)


def test_a_panic_of_the_tokenizer_is_an_exception() -> None:
    """It would pass by everything that catches exceptions, and end the engine's thread."""
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.FixedLength(0)
    made.decoder = decoders.Strip("a", 1, 1)
    vocabulary, long = TextTokenizer(made), "a" * (RELEASE_ABOVE + 1)
    token = made.token_to_id("a")
    for what in (
        lambda: vocabulary.encode("abc"),
        lambda: vocabulary.encode(long),
        lambda: vocabulary.encode_marked(long, (1,)),
        lambda: vocabulary._plain("abc"),
        lambda: vocabulary.decode([token]),
    ):
        with pytest.raises(NativePanic, match=r"the tokenizer has panicked$"):
            what()


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="half of a surrogate pair at character") as refused:
        words("byte_level").encode(text, param="stop")
    assert refused.value.param == "stop"


@pytest.mark.parametrize("text", ["", "\x00", "\ufeffa", "a\r\n\x1b", "👩‍🔬", "\U0010ffff", "<|im_end|>"])
def test_odd_text_comes_back_as_it_went(text: str) -> None:
    vocabulary = words("byte_level")
    assert vocabulary.decode(vocabulary.encode(text, special=False), skip_special=False) == text


@pytest.mark.parametrize("token", [-1, 2**32, 2**63])
def test_what_cannot_be_an_id_is_refused(token: int) -> None:
    with pytest.raises(BadRequest, match="is not a token id"):
        words("byte_level").decode([1, token])


def test_ids_without_a_token_give_nothing() -> None:
    assert words("byte_level").decode([words("byte_level").vocab_size + 5]) == ""
    assert words("byte_level").token_bytes(10**6) == b""


def test_special_and_control_tokens_are_known() -> None:
    vocabulary = words("byte_level")
    assert sorted(vocabulary.control.values()) == sorted(CONTROL)
    assert vocabulary.special_ids == set(vocabulary.control)
    think = vocabulary.encode("<think>", special=False)[0]
    assert TextTokenizer(byte_level(), end_ids=[think]).control[think] == "<think>"


@pytest.mark.parametrize("kind", ["byte_level", "gemma_like"])
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(kind: str) -> None:
    vocabulary, text = words(kind), "the naïve café 你好 😀 “no” 🦀"
    ids = vocabulary.encode(text, special=False)
    assert b"".join(vocabulary.token_bytes(token) for token in ids) == text.encode()


@pytest.mark.parametrize(("kind", "text"), [("llama_like", " the"), ("wordpiece", " cellar"), ("suffixed", " cellar")])
def test_the_bytes_of_a_word_hold_its_space(kind: str, text: str) -> None:
    vocabulary = words(kind)
    ids = vocabulary.encode("a" + text * 2, special=False)
    assert b"".join(vocabulary.token_bytes(token) for token in ids).endswith(text.encode() * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_token_stay_the_same_while_those_of_few_are_kept(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KINDS[kind]()
    vocabulary, again = TextTokenizer(made), TextTokenizer(Tokenizer.from_str(made.to_str()))
    first = [vocabulary.token_bytes(token) for token in range(vocabulary.vocab_size)]
    monkeypatch.setattr(tokens, "KNOWN_BYTES", 3)
    for token in [*range(vocabulary.vocab_size)] * 2:
        assert again.token_bytes(token) == again.token_bytes(token) == first[token]
        assert len(again._known_bytes) <= 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("undecoded", "strange")])
@given(data=st.data())
def test_marked_control_tokens_are_only_text(kind: str, data: st.DataObject) -> None:
    part = st.sampled_from([*CONTROL[:5], "hello ", "the cellar", " ", "<|im", "_end|>"])
    parts = data.draw(st.lists(st.tuples(part, st.booleans()), max_size=8))
    text, marks = "", []
    for piece, is_text in parts:
        if is_text and piece in CONTROL:
            marks.append(len(text) + 1)
        text += piece
    vocabulary = words(kind)
    ids = vocabulary.encode_marked(text, marks)
    meant = [piece for piece, is_text in parts if piece in CONTROL and not is_text]
    joined = text.count("<|im_end|>") - [piece for piece, _ in parts].count("<|im_end|>")  # two parts made one
    got = [vocabulary.control[token] for token in ids if vocabulary.control.get(token) in CONTROL]
    assert sorted(got) == sorted(meant + ["<|im_end|>"] * joined)
    if not marks:
        assert ids == vocabulary.encode(text, special=False)
    if kind == "byte_level":
        assert vocabulary.decode(ids, skip_special=False) == text
