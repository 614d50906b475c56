"""What writers make of texts: chunks, events and lines that have each of them once."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.events import Delta, TokenLogprob
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve.anthropic.message_writer import BlockDeltaEvent, MessageWriter, TextDelta, ThinkingDelta
from kvcellar.serve.generation.replies import Replies, ReplyPart
from kvcellar.serve.generation.writer import Writer, json_line, named_event
from kvcellar.serve.ollama import writer as ollama_writer
from kvcellar.serve.ollama.writer import OllamaWriter
from kvcellar.serve.openai.formats import ChatFormat, TextFormat
from kvcellar.serve.openai.response_writer import ResponseWriter
from kvcellar.serve.responses.output import TextDeltaEvent
from kvcellar.serve.responses.response_writer import Echo, RequestFields, ResponsesWriter
from kvcellar.text.pieces import Content, Reasoning

ENGINE: Any = SimpleNamespace(model=SimpleNamespace(name='a "name" of 100 %s', has_text=True), decode=lambda ids: "t")
TEXTS = st.text(min_size=1) | st.sampled_from(['"', "\u2028", "\x7f", "\u4f60\u597d"])
PIECES = st.lists(st.builds(Content, TEXTS) | st.builds(Reasoning, TEXTS), min_size=1, max_size=6)


def replies(params: SamplingParams | None = None) -> Replies:
    prepared: Any = SimpleNamespace(choices=2, params=params or SamplingParams(), prompt_tokens=[1], prompts=())
    return Replies(prepared)


def options(**wanted: bool) -> Any:
    names = ("tokens_as_ids", "token_ids", "token_times", "include_usage", "continuous_usage", "recall")
    return SimpleNamespace(prompt_logprobs=None, model="m", **dict.fromkeys(names, False) | wanted)


def part(of: Replies, piece: Content | Reasoning, index: int = 0) -> ReplyPart:
    return ReplyPart(of.replies[index], [piece], delta=Delta(0, piece.text, (1,)))


def values(stream: bytes) -> list[Any]:
    """The JSON of lines and of events."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


@given(
    pieces=PIECES, usage=st.booleans(), names=st.sampled_from([(), ("reasoning",), ("reasoning", "reasoning_content")])
)
def test_chunks_of_chats_and_completions(pieces, usage, names):
    of = replies()
    for form in (ChatFormat(names), TextFormat()):
        writer = ResponseWriter(ENGINE, options(include_usage=usage), form, of)
        for number, piece in enumerate(pieces):
            written = writer.chunk(part(of, piece, number % 2))
            assert written == writer._chunks(part(of, piece, number % 2))
            found = values(written)
            told = isinstance(piece, Content) or (names and isinstance(form, ChatFormat))
            assert len(found) == bool(told)
            for chunk in found:
                (choice,) = chunk["choices"]
                common = {"index": number % 2, "logprobs": None, "finish_reason": None}
                delta = dict.fromkeys(names, piece.text) if isinstance(piece, Reasoning) else {"content": piece.text}
                own = {"delta": delta} if isinstance(form, ChatFormat) else {"text": piece.text}
                assert choice == common | own
                assert chunk.get("usage", "absent") == (None if usage else "absent")


@pytest.mark.parametrize("wanted", [{"token_ids": True}, {"include_usage": True, "continuous_usage": True}])
def test_chunks_that_have_more_of_each_token(wanted):
    of = replies()
    writer = ResponseWriter(ENGINE, options(**wanted), ChatFormat(()), of)
    found = []
    for number in (1, 2):
        of.replies[0].completion_tokens = number
        one = ReplyPart(of.replies[0], [Content("a")], delta=Delta(0, "a", (number,)))
        found += values(writer.chunk(one))
    if "token_ids" in wanted:
        assert [one["choices"][0]["token_ids"] for one in found] == [[1], [2]]
    else:
        assert [one["usage"]["completion_tokens"] for one in found] == [1, 2]


def texts(stream: bytes, kind: str) -> str:
    return "".join(one["delta"][kind] for one in values(stream) if kind in one.get("delta", ()))


@given(pieces=PIECES)
def test_deltas_of_messages(pieces):
    of = replies()
    writer = MessageWriter("m", of)
    writer._begun = True
    stream = b"".join(writer.chunk(part(of, piece)) for piece in pieces)
    deltas = [one for one in values(stream) if one.get("delta", {}).get("type") in ("text_delta", "thinking_delta")]
    for piece, event in zip(pieces, deltas, strict=True):
        delta = TextDelta(text=piece.text) if isinstance(piece, Content) else ThinkingDelta(thinking=piece.text)
        assert named_event(event["type"], BlockDeltaEvent(index=event["index"], delta=delta)) in stream
    assert texts(stream, "text") == "".join(one.text for one in pieces if isinstance(one, Content))
    assert texts(stream, "thinking") == "".join(one.text for one in pieces if isinstance(one, Reasoning))
    opened = None
    for event in values(stream):  # each delta is of the block that is open
        if event["type"] == "content_block_start":
            opened = event["index"]
        assert event["index"] == opened


@given(pieces=PIECES)
def test_lines_of_ollama(pieces):
    for form in (ollama_writer.ChatFormat, ollama_writer.GenerateFormat):
        of = replies()
        writer = OllamaWriter(ENGINE, "m", 0.0, form, of)
        stream = b"".join(writer.chunk(part(of, piece)) for piece in pieces)
        lines = values(stream)
        for piece, line in zip(pieces, lines, strict=True):
            thinking = isinstance(piece, Reasoning)
            fields = form.fields(thinking=piece.text) if thinking else form.fields(piece.text)
            assert json_line(form.line(model="m", created_at=line["created_at"], **fields)) in stream
            text = line["response"] if "response" in line else line["message"]["content"]
            found = line.get("message", line)["thinking"] if thinking else text
            assert (found, line["done"]) == (piece.text, False)
        assert [line["created_at"] for line in lines] == sorted(line["created_at"] for line in lines)


def echo(logprobs: bool) -> Echo:
    fields: Any = dict.fromkeys(RequestFields.__struct_fields__)
    return Echo("m", RequestFields(**fields), None, "", b"[]", None, 0, logprobs)


def responses(of: Replies, *, logprobs: bool = False) -> Writer:
    return ResponsesWriter(ENGINE, echo(logprobs), of)


@given(pieces=PIECES)
def test_events_of_responses_are_numbered_and_have_their_texts(pieces):
    of = replies()
    writer = responses(of)
    stream = b"".join(writer.chunk(part(of, piece)) for piece in pieces)
    events = values(stream)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    deltas = [one for one in events if one["type"].endswith(".delta")]
    assert [one["delta"] for one in deltas] == [piece.text for piece in pieces]
    for piece, delta in zip(pieces, deltas, strict=True):
        kind = "output_text" if isinstance(piece, Content) else "reasoning_text"
        assert delta["type"] == f"response.{kind}.delta"
        assert delta.get("logprobs", []) == []
        assert named_event(delta["type"], TextDeltaEvent(**delta)) in stream


def test_log_probabilities_of_a_response_are_the_same_in_all_places_and_encoded_once(monkeypatch):
    encoded = list[object]()
    from kvcellar.serve.responses import response_writer

    real = response_writer.to_json
    monkeypatch.setattr(response_writer, "to_json", lambda value: encoded.append(value) or real(value))
    of = replies(SamplingParams(logprobs=2))
    writer = ResponsesWriter(ENGINE, echo(True), of)
    deltas = list[Any]()
    for number in range(50):
        entry = TokenLogprob(number, -float(number), ((number, -float(number)), (7, -9.0)))
        delta = Delta(0, "a", (number,), (entry,))
        events = values(writer.chunk(ReplyPart(of.replies[0], [Content("a")], delta=delta)))
        deltas += [one for event in events if event["type"].endswith(".delta") for one in event["logprobs"]]
        assert all(not event["part"]["logprobs"] for event in events if event["type"].endswith("part.added"))
    ends = values(b"".join(map(writer._event, writer._output.end(complete=True))))
    assert [one["logprob"] for one in deltas] == [-float(number) for number in range(50)]
    places = [ends[0]["logprobs"], ends[1]["part"]["logprobs"], ends[2]["item"]["content"][0]["logprobs"]]
    assert places == [deltas] * 3
    assert len(encoded) == 50
