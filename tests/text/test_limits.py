"""How much text is tokenized at once, and the bound on its tokens by its length."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from kvcellar.errors import BadRequest, PromptTooLong
from kvcellar.models import embedded
from kvcellar.text.tokens import (
    RELEASE_ABOVE,
    SHORT,
    LengthBound,
    TextTokenizer,
    TokenizingLimit,
    bytes_for,
    length_bound,
    longest_text,
)
from tests.text.made import CONTROL, KINDS, byte_level, gemma_like, words

BOUNDED = ("byte_level", "llama_like", "gemma_like", "metaspace")
SHRINKING = {
    "composed": normalizers.NFC(),
    "composed by looks": normalizers.NFKC(),
    "three to one": normalizers.Replace("abc", "x"),
    "both": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("..", ".")]),
}
VANISHING = {
    "stripped": normalizers.Strip(),
    "without accents": normalizers.StripAccents(),
    "replaced by nothing": normalizers.Replace("a", ""),
    "replaced by a pattern": normalizers.Replace(Regex(" +"), " "),
    "of BERT": normalizers.BertNormalizer(),
}
ODD = st.sampled_from(
    [
        "a",
        " ",
        "\n",
        "\t",
        ".",
        "é",
        "\u03b1\u0313\u0300\u0345",
        "\u1100\u1161\u11a8",
        "好",
        "😀",
        "\u0301",
        "<s>",
        "abc",
    ]
)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.lists(st.tuples(ODD, st.integers(1, 60)), max_size=6).map(lambda runs: "".join(text * n for text, n in runs)),
    st.sampled_from([*CONTROL, "The cellar is cool and dark", "<|im", "\r\n \n"]).flatmap(
        lambda part: st.integers(1, 200).map(lambda n: part * n)
    ),
)


OWN = TextTokenizer(Tokenizer.from_file(str(embedded.path() / "tokenizer.json")))


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
@given(text=texts, special=st.booleans())
def test_no_text_has_fewer_tokens_than_the_bound_by_its_length(kind: str, text: str, special: bool) -> None:
    vocabulary = OWN if kind == "embedded" else words(kind)
    assert (vocabulary.bound.characters is not None) == (kind in (*BOUNDED, "strange", "embedded"))
    ids = vocabulary.encode(text, special=special)
    assert len(ids) >= vocabulary.bound.least_tokens(len(text))
    assert vocabulary.encode(text, special=special, limit=len(ids)) == ids
    if ids:
        with pytest.raises(PromptTooLong):
            vocabulary.encode(text, special=special, limit=len(ids) - 1)


@pytest.mark.parametrize("name", SHRINKING)
@given(text=texts)
def test_a_normalizer_that_shortens_is_allowed_for(name: str, text: str) -> None:
    for made in (byte_level(), gemma_like()):
        made.normalizer = SHRINKING[name]
        vocabulary = TextTokenizer(made)
        assert (
            len(vocabulary.encode(text, special=False))
            >= vocabulary.bound.least_tokens(len(text))
            >= (1 if text else 0)
        )


@pytest.mark.parametrize("name", VANISHING)
def test_there_is_no_bound_where_characters_can_vanish(name: str) -> None:
    made = byte_level()
    made.normalizer = VANISHING[name]
    assert length_bound(made) == LengthBound(None)
    assert len(TextTokenizer(made).encode("a" * 10_000, special=False, limit=10_000)) <= 10_000


def test_splitters_that_drop_what_they_split_at_have_no_reach() -> None:
    for splitter in (
        pre_tokenizers.Split(" ", "removed"),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Punctuation("removed"),
        pre_tokenizers.CharDelimiterSplit("a"),
    ):
        made = byte_level()
        made.pre_tokenizer = pre_tokenizers.Sequence([splitter, made.pre_tokenizer])
        assert length_bound(made) == LengthBound(None)
        assert len(TextTokenizer(made).encode("a" + " a." * 500, special=False)) >= 0


def test_a_control_token_that_swallows_blanks_leaves_no_reach() -> None:
    made = byte_level()
    assert length_bound(made).characters is not None
    made.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    assert length_bound(made) == LengthBound(None)
    assert len(TextTokenizer(made).encode("<|end|>" + "\n" * 10_000, special=False, limit=1)) == 1


class Untouched:
    """A tokenizer that must not be called."""

    def __init__(self, made: Tokenizer) -> None:
        self._made = made
        self.armed = False

    def __getattr__(self, name: str) -> object:
        assert not (self.armed and name.startswith("encode")), f"{name} was called"
        return getattr(self._made, name)


def untouched(**limits: int) -> tuple[TextTokenizer, Untouched]:
    fake = Untouched(byte_level())
    return TextTokenizer(fake, **limits), fake  # type: ignore[arg-type]


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized() -> None:
    vocabulary, fake = untouched()
    most = 100 * (vocabulary.bound.characters or 0)
    assert vocabulary.encode("a" * 40, limit=100)
    fake.armed = True
    for call in (
        lambda text: vocabulary.encode(text, limit=100),
        lambda text: vocabulary.encode_marked(text, [3], limit=100),
    ):
        with pytest.raises(PromptTooLong, match="at least 101 tokens") as refused:
            call("\n" * (most + 1))
        assert (refused.value.tokens, refused.value.limit, refused.value.at_least) == (101, 100, True)


def test_more_text_than_there_is_memory_for_is_refused_before_it_is_tokenized() -> None:
    vocabulary, fake = untouched(most_bytes=5000)
    assert vocabulary.encode("é" * 2500, special=False)
    fake.armed = True
    with pytest.raises(BadRequest, match="5002 bytes of text; at most 5000") as refused:
        vocabulary.encode("é" * 2501, param="messages")
    assert refused.value.param == "messages"


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, repeat=st.sampled_from([1, 50]))
def test_long_texts_have_the_tokens_that_the_tokenizer_gives_them(kind: str, text: str, repeat: int) -> None:
    text, vocabulary = text * repeat, words(kind)
    expected = vocabulary._tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary.encode(text, special=False) == vocabulary.encode_marked(text, []) == expected


@pytest.mark.parametrize("filler", ["", "a" * (RELEASE_ABOVE + 1)])
def test_marks_overrule_in_long_texts_as_in_short_ones(filler: str) -> None:
    text = "<s>hello<s>" + filler
    short = words("byte_level").encode_marked("<s>hello<s>", [1])
    assert words("byte_level").encode_marked(text, [1])[: len(short)] == short


@given(st.integers(0, 10**9))
def test_tokenizing_takes_no_more_memory_than_was_granted(memory: int) -> None:
    most = longest_text(memory)
    assert bytes_for(most) <= memory < bytes_for(most + 1)
    assert TokenizingLimit(most).bytes == bytes_for(most)


def test_long_texts_come_one_at_a_time_and_short_ones_beside_them() -> None:
    limit = TokenizingLimit(10 * SHORT)
    inside, entered = threading.Event(), threading.Event()

    def second() -> None:
        with limit.taken(SHORT + 1, "prompt"):
            entered.set()
            inside.wait(120)

    with limit.taken(SHORT + 1, "prompt"):
        other = threading.Thread(target=second)
        other.start()
        with limit.taken(SHORT, "prompt"), limit.taken(1, "prompt"):  # nothing long is waited for
            assert not entered.wait(0.05)
    assert entered.wait(120)
    inside.set()
    other.join()
