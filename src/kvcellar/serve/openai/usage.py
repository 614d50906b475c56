"""usage: the usage and the timings of a request, as OpenAI and llama.cpp name them."""

from collections.abc import Mapping
from types import MappingProxyType

from kvcellar.serve.chat_request import Json
from kvcellar.serve.replies import Replies, Reply
from kvcellar.serve.speculations import speculation_fields

TIMINGS: Mapping[str, str] = MappingProxyType(  # meaning of `timings` of a response, with the names of llama.cpp
    {
        "queued_ms": "milliseconds from submission to admission",
        "cache_n": "prompt tokens that came from memory",
        "prompt_n": "prompt tokens that were computed",
        "prompt_ms": "milliseconds from admission to the first token",
        "predicted_n": "generated tokens",
        "predicted_ms": "milliseconds from the first token to the last",
        "predicted_per_second": "generated tokens per second",
    }
)
DRAFT_TIMINGS: Mapping[str, str] = MappingProxyType(  # and of what they have where drafts were used
    {
        "draft_n": "drafts that were computed",
        "draft_n_accepted": "drafts that became tokens",
        "speculation": "for each prompt: what its drafts have done, described below; `null` without a round",
    }
)


def usage(replies: Replies) -> Json:
    prompt, completion = replies.prompt_tokens, replies.completion_tokens
    found: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies.cached_tokens},
    }
    details: Json = {}
    if reasoning := replies.reasoning_tokens:
        details["reasoning_tokens"] = reasoning
    if (counts := replies.drafts) is not None:
        drafted, accepted = counts
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return found | {"completion_tokens_details": details} if details else found


def usage_so_far(replies: Replies, reply: Reply) -> Json:
    """The usage of one choice, without `prompt_tokens_details`, which are known only at the end."""
    prompt = replies.prepared.prompt_tokens[replies.prompt_of(reply)]
    completion = reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def timings(replies: Replies) -> Json:
    """Of several prompts, which run at the same time, the longest times."""
    done = replies.done.values()
    completion, decoding = replies.completion_tokens, max(one.timings.decoding for one in done)
    values = (
        1e3 * max(one.timings.queued for one in done),
        replies.cached_tokens,
        replies.prompt_tokens - replies.cached_tokens,
        1e3 * max(one.timings.first_token - one.timings.queued for one in done),
        completion,
        1e3 * decoding,
        completion / decoding if decoding > 0 else 0.0,
    )
    return dict(zip(TIMINGS, values, strict=True)) | _draft_timings(replies)


def _draft_timings(replies: Replies) -> Json:
    if (counts := replies.drafts) is None:
        return {}
    records = [
        speculation_fields(one.speculation) if one.speculation is not None else None
        for _, one in sorted(replies.done.items())
    ]
    return dict(zip(DRAFT_TIMINGS, (*counts, records), strict=True))
