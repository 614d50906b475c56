"""usage: the tokens of a request as Anthropic counts them: `input_tokens` are those of the prompt that were neither
read from memory nor lie before a breakpoint."""

from kvcellar.serve.chat_request import Json
from kvcellar.serve.replies import Replies


def usage(replies: Replies, cached: int | None = None) -> Json:
    """`cached`: tokens that came from memory, before it is known from the end of the request.

    Computed tokens before the last breakpoint are `cache_creation_input_tokens`; without breakpoints there are none,
    although later requests may find those tokens, too.
    """
    prepared = replies.prepared
    (prompt,) = prepared.prompt_tokens
    read = replies.cached_tokens if cached is None else cached
    marked = max(prepared.breakpoints, default=0)
    created = max(0, marked - read)
    hour = created if prepared.retention.ttl == 3600.0 else 0
    return {
        "input_tokens": prompt - read - created,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "cache_creation": {"ephemeral_5m_input_tokens": created - hour, "ephemeral_1h_input_tokens": hour},
        # at the end with the token that ended the answer, which no delta has
        "output_tokens": replies.completion_tokens if cached is None else replies.replies[0].completion_tokens,
        "service_tier": "standard",
    }
