"""What log-probabilities say of single tokens, with tokenizers of several kinds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.events import Delta, PromptScored, TokenLogprob
from kvcellar.serve.openai.logprobs import Tokens, TokenText
from kvcellar.serve.openai.response_writer import Echo
from kvcellar.text.output import open_stream
from kvcellar.text.tokens import TextTokenizer
from tests.serve.fake_engine import FakeModel
from tests.text.made import words

KINDS = ("byte_level", "llama_like", "gemma_like", "metaspace")
TEXTS = st.text(st.sampled_from("abe T\n.<é你😀🍇"), min_size=1, max_size=20).filter(lambda text: text.strip() == text)


class Words:
    """Of an engine, what the texts of tokens need."""

    model = FakeModel()

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: Any) -> str:
        return self.tokenizer.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, ())


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    tokenizer = words(kind)
    tokens = TokenText(Words(tokenizer), as_ids=False)  # type: ignore[arg-type]
    raw = b"".join((tokens.raw(token) or b"") for token in tokenizer.encode(text, special=False))
    assert raw.decode().removeprefix(" ") == tokenizer.decode(tokenizer.encode(text, special=False))


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_tokens_of_a_prompt_begin_where_their_characters_do(kind: str, text: str) -> None:
    tokenizer = words(kind)
    engine, ids = Words(tokenizer), tokenizer.encode(text, special=False)
    text = tokenizer.decode(ids)
    tokens = TokenText(engine, as_ids=False)  # type: ignore[arg-type]
    about = PromptScored(tuple(ids), tuple(map(scored, ids)))
    opening: Any = Echo(engine, [text]).opening(0, 0, about, 0, tokens)  # type: ignore[arg-type]
    offsets = [*opening.logprobs.text_offset]
    check(text, offsets, [tokens.raw(token) or b"" for token in ids])


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, before=st.sampled_from(["", "a prompt"]))
def test_tokens_of_a_completion_begin_where_their_characters_do(kind: str, text: str, before: str) -> None:
    """In its text, which comes in parts."""
    tokenizer = words(kind)
    ids, stream = tokenizer.encode(text, special=False), open_stream(tokenizer, after=tokenizer.encode("a"))
    tokens = TokenText(Words(tokenizer), as_ids=False)  # type: ignore[arg-type]
    found, whole = Tokens(tokens, before), before
    for token in ids:
        whole += (new := stream.push(token))
        found.add(Delta(0, new, (token,), (scored(token),)))
    whole += stream.flush()
    check(whole, found.offsets, [tokens.raw(token) or b"" for token in ids], len(before))


@given(data=st.lists(st.integers(0, 255), min_size=1, max_size=12), kind=st.sampled_from(KINDS))
def test_offsets_of_what_is_no_text_never_go_back(data: list[int], kind: str) -> None:
    tokenizer = words(kind)
    alphabet = [token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) == 1]
    ids, stream = [alphabet[one % len(alphabet)] for one in data], open_stream(tokenizer)
    found, whole = Tokens(TokenText(Words(tokenizer), as_ids=False)), ""  # type: ignore[arg-type]
    for token in ids:
        assert found.offsets == sorted(found.offsets)
        whole += (new := stream.push(token))
        found.add(Delta(0, new, (token,), (scored(token),)))
    assert found.offsets[-1] <= len(whole + stream.flush())


def check(text: str, offsets: list[int], raw: list[bytes], start: int = 0) -> None:
    """Each token begins at the character that has its first byte."""
    assert offsets == sorted(offsets)
    assert offsets[0] == start
    joined = b"".join(raw)
    lost = len(joined) - len(text[start:].encode())
    at = 0
    for offset, one in zip(offsets, raw, strict=True):
        expected = len(text[start:].encode()[: max(0, at - lost)].decode(errors="ignore"))
        assert offset == start + expected
        at += len(one)
