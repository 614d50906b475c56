"""chat_format: what is of a chat completion in its responses: a message with its reasoning and its calls."""

from collections.abc import Sequence
from itertools import groupby

from kvcellar.events import TokenLogprob
from kvcellar.serve.chat_request import Json
from kvcellar.serve.openai.logprobs import TokenText, finite
from kvcellar.serve.replies import ReplyPart, WholeReply
from kvcellar.text.pieces import CallArguments, CallOpened, Content, Piece, Reasoning


class ChatFormat:
    """`reasoning`: the names under which responses have what the model wrote before its answer; none: it is left
    out."""

    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    prompts_in_choices = False

    def __init__(self, reasoning: Sequence[str]) -> None:
        self._reasoning = reasoning

    def first_chunk(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def deltas(self, part: ReplyPart) -> list[Json]:
        """One for each kind of pieces in a row."""
        found: list[Json] = []
        for kind, pieces in groupby(part.pieces, key=type):
            if delta := self._delta(kind, list(pieces)):
                found.append({"delta": delta})
        return found

    def _delta(self, kind: type[Piece], pieces: Sequence[Piece]) -> Json:
        if kind is Content:
            return {"content": _joined(pieces)}
        if kind is Reasoning:
            return dict.fromkeys(self._reasoning, _joined(pieces))
        calls = [_call_delta(piece) for piece in pieces]
        return {"tool_calls": [call for call in calls if call]} if any(calls) else {}

    def empty(self) -> Json:
        return {"delta": {}}

    def message(self, reply: WholeReply) -> Json:
        message: Json = {
            "role": "assistant",
            "content": reply.content or (None if reply.calls else ""),
            "refusal": None,
        }
        if reply.reasoning:
            message |= dict.fromkeys(self._reasoning, reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [call.as_call() for call in reply.calls]
        return {"message": message}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        def one(token: int, logprob: float) -> Json:
            return {"token": tokens.text(token), "logprob": finite(logprob), "bytes": tokens.utf8(token)}

        content = (one(e.token_id, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries)
        return {"content": content, "refusal": None}


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))


def _call_delta(piece: Piece) -> Json:
    """The id and the name are sent once; clients find the call by its index."""
    match piece:
        case CallOpened(call=call, id=id, name=name):
            return {"index": call, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        case CallArguments(call=call, text=text):
            return {"index": call, "function": {"arguments": text}}
        case _:
            return {}
