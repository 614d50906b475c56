"""completion_format: what is of a text completion in its responses."""

from collections.abc import Sequence

from kvcellar.events import TokenLogprob
from kvcellar.serve.chat_request import Json
from kvcellar.serve.openai.logprobs import TokenText, finite, top_by_text
from kvcellar.serve.replies import ReplyPart, WholeReply


class CompletionFormat:
    id_prefix = "cmpl-"
    object_type = "text_completion"
    chunk_type = "text_completion"
    prompts_in_choices = True

    def first_chunk(self) -> Json | None:
        return None

    def deltas(self, part: ReplyPart) -> list[Json]:
        return [{"text": text}] if (text := part.text) else []

    def empty(self) -> Json:
        return {"text": ""}

    def message(self, reply: WholeReply) -> Json:
        return {"text": reply.content}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int], tokens: TokenText) -> Json:
        return {
            "tokens": (tokens.name(entry.token_id) for entry in entries),
            "token_logprobs": (finite(entry.logprob) for entry in entries),
            "top_logprobs": (top_by_text(entry, tokens) for entry in entries),
            "text_offset": iter(offsets),
        }
