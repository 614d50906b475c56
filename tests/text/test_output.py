"""Streams: the pieces are exactly the whole text, for any ids, and no piece shows half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.output import LONG_RUN, UNREADABLE, DecoderKind, LocalStream, decoder_kind, open_stream
from tests.text.made import KINDS, TEXT, words

EXPECTED = {"byte_level": DecoderKind.BYTES, "strange": DecoderKind.WHOLE}


def pieces(kind: str, ids: list[int], *, skip_special: bool = True, after: tuple[int, ...] = ()) -> list[str]:
    stream = open_stream(words(kind), skip_special=skip_special, after=after)
    out: list[str] = []
    for token in ids:
        out.append(stream.push(token))
        stream.check()
    return [*out, stream.flush()]


def byte_ids(kind: str, data: bytes) -> list[int]:
    vocabulary = words(kind)
    return [next(t for t in range(vocabulary.vocab_size) if vocabulary.byte_of(t) == byte) for byte in data]


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_are_distinguished(kind: str) -> None:
    assert decoder_kind(words(kind).decoder_steps) is EXPECTED.get(kind, DecoderKind.LOCAL)


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_make_up_the_text_of_any_ids(kind: str, skip_special: bool, data: st.DataObject) -> None:
    any_id = st.integers(0, words(kind).vocab_size + 3)  # a padded model has ids that no token has
    ids = data.draw(st.lists(any_id, max_size=40))
    whole = words(kind).decode(ids, skip_special=skip_special)
    assert "".join(pieces(kind, ids, skip_special=skip_special)) == whole


@pytest.mark.parametrize("kind", ["llama_like", "gemma_like", "metaspace"])
@given(data=st.data())
def test_runs_of_bytes_are_read_as_their_decoder_reads_them(kind: str, data: st.DataObject) -> None:
    char = st.sampled_from(
        [b"a", b" ", "é".encode(), "你".encode(), "😀".encode(), b"\xff", b"\xe2\x82", b"\xed\xa0\x80"]
    )
    parts = data.draw(st.lists(st.one_of(char.map(lambda c: byte_ids(kind, c)), st.just([270]), st.just([1]))))
    ids = [token for part in parts for token in part]
    assert "".join(pieces(kind, ids)) == words(kind).decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "gemma_like", "metaspace"])
def test_real_text_is_never_shown_by_halves(kind: str) -> None:
    text = " ".join(TEXT[:3])
    ids = words(kind).encode(text, special=False)
    got = pieces(kind, ids)
    assert "".join(got) == text
    assert not any(UNREADABLE in piece for piece in got)
    assert len([piece for piece in got if piece]) > len(ids) / 3


def test_characters_come_as_soon_as_they_are_complete() -> None:
    vocabulary = words("byte_level")
    stream = open_stream(vocabulary)
    crab = vocabulary.encode("🦀", special=False)
    assert len(crab) > 1
    assert [stream.push(token) for token in crab] == [""] * (len(crab) - 1) + ["🦀"]
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_bytes_that_never_become_text_come_out_and_are_not_kept(kind: str) -> None:
    vocabulary = words(kind)
    lead = next(t for t in range(vocabulary.vocab_size) if vocabulary.token_bytes(t) == b"\xf0")
    got = pieces(kind, [lead] * 1000)
    assert "".join(got) == UNREADABLE * 1000 == vocabulary.decode([lead] * 1000)
    assert len([piece for piece in got if piece]) > 990


def test_a_long_run_of_valid_bytes_is_returned_and_the_buffer_stays_bounded() -> None:
    ids = byte_ids("llama_like", "你好世界".encode() * 50)
    stream = LocalStream(words("llama_like"), True, ())
    held, longest, text = 0, 0, ""
    for token in ids:
        piece = stream.push(token)
        stream.check()
        text += piece
        held = 0 if piece else held + 1
        longest = max(longest, held)
    assert longest < LONG_RUN + 3
    assert text + stream.flush() == "你好世界" * 50


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "gemma_like", "metaspace", "wordpiece", "suffixed"])
@given(data=st.data())
def test_a_completion_can_continue_the_text_before_it(kind: str, data: st.DataObject) -> None:
    vocabulary = words(kind)
    ordinary = [t for t in range(vocabulary.vocab_size) if t not in vocabulary.special_ids]
    whole_text = [t for t in ordinary if vocabulary.byte_of(t) is None and UNREADABLE not in vocabulary.decode([t])]
    before = data.draw(st.lists(st.sampled_from(whole_text), min_size=1, max_size=5))
    ids = data.draw(st.lists(st.sampled_from(ordinary), max_size=12))
    got = "".join(pieces(kind, ids, after=(*before, 1, 1)))  # special tokens are no text to continue
    assert vocabulary.decode(before) + got == vocabulary.decode(before + ids)


def test_a_first_word_keeps_its_space_only_behind_something() -> None:
    vocabulary = words("llama_like")
    word = next(t for t in range(vocabulary.vocab_size) if (vocabulary.written(t) or "").startswith("▁t"))
    alone = vocabulary.decode([word])
    assert alone.startswith("t")
    assert pieces("llama_like", [word])[0] == alone
    assert pieces("llama_like", [word], after=(word,))[0] == " " + alone
