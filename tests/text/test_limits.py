"""How much text is tokenized at once, and the bound on its tokens by its length."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from kvcellar.engine.models import embedded
from kvcellar.errors import BadRequest, Overloaded, PromptTooLong, TextTooSlow, TokenizerFailed
from kvcellar.text.tokens import (
    SHORT,
    SHORTS,
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


def least_tokens(vocabulary: TextTokenizer, text: str) -> int:
    return 0 if vocabulary.longest is None else -(-len(text) // vocabulary.longest)


@pytest.mark.parametrize("kind", [*KINDS, "embedded"])
@given(text=texts, special=st.booleans())
def test_no_text_has_fewer_tokens_than_the_bound_by_its_length(kind: str, text: str, special: bool) -> None:
    vocabulary = OWN if kind == "embedded" else words(kind)
    assert (vocabulary.longest is not None) == (kind in (*BOUNDED, "strange", "embedded"))
    ids = vocabulary.encode(text, special=special)
    assert len(ids) >= least_tokens(vocabulary, text)
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
        assert len(vocabulary.encode(text, special=False)) >= least_tokens(vocabulary, text) >= (1 if text else 0)


@pytest.mark.parametrize("name", VANISHING)
def test_there_is_no_bound_where_characters_can_vanish(name: str) -> None:
    made = byte_level()
    made.normalizer = VANISHING[name]
    assert length_bound(made) is None
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
        assert length_bound(made) is None
        assert len(TextTokenizer(made).encode("a" + " a." * 500, special=False)) >= 0


def test_a_control_token_that_swallows_blanks_leaves_no_reach() -> None:
    made = byte_level()
    assert length_bound(made) is not None
    made.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    assert length_bound(made) is None
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
    most = 100 * (vocabulary.longest or 0)
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


@pytest.mark.parametrize("filler", ["", "a" * (SHORT + 1)])
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
        with limit.result(SHORT + 1, "prompt", entered.set):
            inside.wait(120)

    with limit.result(SHORT + 1, "prompt", int):
        other = threading.Thread(target=second)
        other.start()
        with limit.result(SHORT, "prompt", int), limit.result(1, "prompt", int):  # nothing long is waited for
            assert not entered.is_set()
    assert entered.wait(120)
    inside.set()
    other.join()


class Watched:
    """A tokenizer of which each attribute that is read is handed out by `give`, if that has one of its name."""

    def __init__(self, made: Tokenizer, **give: Callable[..., object]) -> None:
        self._made, self._give = made, give

    def __getattr__(self, name: str) -> Any:
        return self._give.get(name) or getattr(self._made, name)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_any_length_are_tokenized_without_the_interpreter_lock(kind: str) -> None:
    def holds_the_lock(*_args: object, **_options: object) -> object:
        raise AssertionError("tokenizers releases the interpreter lock for batches only")

    made = KINDS[kind]()
    vocabulary = TextTokenizer(Watched(made, encode=holds_the_lock))  # type: ignore[arg-type]
    for text in ("", "a", "a" * SHORT, "a" * (SHORT + 1)):
        assert vocabulary.encode(text, special=False) == made.encode(text, add_special_tokens=False).ids
        assert vocabulary.encode_marked(text, [0]) == made.encode(text, add_special_tokens=False).ids


def test_the_text_of_a_control_token_is_spelled_without_the_interpreter_lock() -> None:
    made = byte_level()
    expected = words("byte_level").encode_marked("a<s>b", [2])

    class Locked(pre_tokenizers.PreTokenizer):  # type: ignore[misc]
        def pre_tokenize_str(self, s: str) -> Any:
            raise AssertionError("tokenizers holds the interpreter lock in this call")

    assert isinstance(made.pre_tokenizer, pre_tokenizers.PreTokenizer)
    vocabulary = TextTokenizer(made)
    vocabulary._tokenizer = Watched(made, pre_tokenizer=Locked)  # type: ignore[assignment]
    assert vocabulary.encode_marked("a<s>b", [2]) == expected


class Hanging:
    """A tokenizer that hangs on texts with an "x" until `end` is set."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.hangs = 0
        made = byte_level()

        def encode(texts: list[str], **options: bool) -> object:
            if "x" in texts[0]:
                self.hangs += 1
                self.end.wait(300)
            return made.encode_batch_fast(texts, **options)

        self.vocabulary = TextTokenizer(Watched(made, encode_batch_fast=encode))  # type: ignore[arg-type]
        self._encode = encode

    def encoded(self, text: str, patience: float) -> object:
        """Within so many seconds."""
        with self.vocabulary.limit.result(len(text), "prompt", lambda: self._encode([text]), patience) as found:
            return found


def test_a_text_that_takes_too_long_is_given_up_and_others_are_tokenized() -> None:
    hanging = Hanging()
    try:
        for _ in range(SHORTS - 1):
            with pytest.raises(TextTooSlow, match="prompt has a text of 1 bytes that"):
                hanging.encoded("x", 0.0)
        assert hanging.vocabulary.encode("a", special=False) == words("byte_level").encode("a", special=False)
    finally:
        hanging.end.set()


def test_while_all_threads_have_texts_that_were_given_up_others_fail_at_once() -> None:
    hanging = Hanging()
    try:
        for _ in range(SHORTS):
            with pytest.raises(TextTooSlow):
                hanging.encoded("x", 0.0)
        for _ in range(3):
            with pytest.raises(Overloaded, match="busy with texts"):
                hanging.encoded("a", 1000.0)
        while hanging.hangs < SHORTS:  # the last thread may not have begun
            time.sleep(0.001)
        assert hanging.vocabulary.encode("a" * (SHORT + 1), special=False)  # long texts have a thread of their own
    finally:
        hanging.end.set()
    ended = threading.Event()
    while not ended.is_set():
        try:
            assert hanging.encoded("x", 300.0)
            ended.set()
        except Overloaded:
            continue
    lane = hanging.vocabulary.limit._short
    with lane._changed:
        assert lane._changed.wait_for(lambda: lane._taken == lane._stuck == 0, 300)


def test_what_a_tokenizer_raises_is_an_error_of_its_own_and_no_thread_is_lost() -> None:
    def fails(_texts: list[str], **_options: bool) -> object:
        raise Boom("at 3")

    class Boom(BaseException):
        """As a panic of a library in Rust, it is no `Exception`."""

    vocabulary = TextTokenizer(Watched(byte_level(), encode_batch_fast=fails))  # type: ignore[arg-type]
    for _ in range(3 * SHORTS):
        with pytest.raises(TokenizerFailed, match=r"the tokenizer of the model failed with Boom$"):
            vocabulary.encode("a")


def test_the_threads_of_a_tokenizer_end_with_it() -> None:
    before = {*threading.enumerate()}
    vocabulary = TextTokenizer(byte_level())
    vocabulary.encode("a")
    own = {*threading.enumerate()} - before
    assert own
    del vocabulary
    for thread in own:
        thread.join(120)
        assert not thread.is_alive()
