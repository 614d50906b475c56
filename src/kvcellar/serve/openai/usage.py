"""usage: the usage and the timings of a request, as OpenAI and llama.cpp name them."""

from msgspec import UNSET, UnsetType

from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.records import RecallFields, SpeculationFields
from kvcellar.serve.generation.replies import Replies, Reply


class PromptTokensDetails(Answer):
    cached_tokens: int  # prompt tokens that came from memory


class CompletionTokensDetails(Answer):
    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET  # drafts that became tokens
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageSoFar(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(UsageSoFar):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    recall: list[RecallFields] | UnsetType = UNSET  # if `return_recall` is set: of each prompt


class TimingsFields(Answer):
    """With the names of llama.cpp. Where drafts were used, there are counts of them."""

    queued_ms: float  # milliseconds from submission to admission
    cache_n: int  # prompt tokens that came from memory
    prompt_n: int  # prompt tokens that were computed
    prompt_ms: float  # milliseconds from admission to the first token
    predicted_n: int  # generated tokens
    predicted_ms: float  # milliseconds from the first token to the last
    predicted_per_second: float  # generated tokens per second
    draft_n: int | UnsetType = UNSET  # drafts that were computed
    draft_n_accepted: int | UnsetType = UNSET  # drafts that became tokens
    # for each prompt: what its drafts have done, described below; `null` without a round
    speculation: list[SpeculationFields | None] | UnsetType = UNSET


def usage(replies: Replies) -> Usage:
    prompt, completion = replies.prompt_tokens, replies.completion_tokens
    details = CompletionTokensDetails()
    if reasoning := replies.reasoning_tokens:
        details.reasoning_tokens = reasoning
    if (counts := replies.drafts) is not None:
        drafted, accepted = counts
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, drafted - accepted
    found = Usage(prompt, completion, prompt + completion, PromptTokensDetails(replies.cached_tokens))
    if details != CompletionTokensDetails():
        found.completion_tokens_details = details
    return found


def usage_so_far(replies: Replies, reply: Reply) -> UsageSoFar:
    """The usage of one choice, without `prompt_tokens_details`, which are known only at the end."""
    prompt = replies.prepared.prompt_tokens[replies.prompt_of(reply)]
    completion = reply.completion_tokens
    return UsageSoFar(prompt, completion, prompt + completion)


def timings(replies: Replies) -> TimingsFields:
    """Of several prompts, which run at the same time, the longest times."""
    done = [one for _, one in sorted(replies.done.items())]
    completion, decoding = replies.completion_tokens, max(one.timings.decoding for one in done)
    found = TimingsFields(
        queued_ms=1e3 * max(one.timings.queued for one in done),
        cache_n=replies.cached_tokens,
        prompt_n=replies.prompt_tokens - replies.cached_tokens,
        prompt_ms=1e3 * max(one.timings.first_token - one.timings.queued for one in done),
        predicted_n=completion,
        predicted_ms=1e3 * decoding,
        predicted_per_second=completion / decoding if decoding > 0 else 0.0,
    )
    if (counts := replies.drafts) is not None:
        found.draft_n, found.draft_n_accepted = counts
        found.speculation = [one.speculation and SpeculationFields.of(one.speculation) for one in done]
    return found
