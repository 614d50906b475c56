"""chat_format: what is of a chat completion in its responses: a message with its reasoning and its calls."""

from collections.abc import Sequence

from kvcellar.events import TokenLogprob
from kvcellar.serve.chat_request import Json
from kvcellar.serve.openai.logprobs import TokenText, finite
from kvcellar.serve.replies import ReplyPart, WholeReply


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def first_chunk(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def deltas(self, part: ReplyPart) -> list[Json]:
        return [{"delta": {"content": text}}] if (text := part.text) else []

    def empty(self) -> Json:
        return {"delta": {}}

    def message(self, reply: WholeReply) -> Json:
        return {"message": {"role": "assistant", "content": reply.content, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        def one(token: int, logprob: float) -> Json:
            return {"token": tokens.text(token), "logprob": finite(logprob), "bytes": tokens.utf8(token)}

        content = (one(e.token_id, e.logprob) | {"top_logprobs": [one(*top) for top in e.top]} for e in entries)
        return {"content": content, "refusal": None}
