"""echo: prompts in front of their completions, and the log-probabilities of prompts.

Lists as long as a prompt are iterators, which are encoded in chunks: they are made on the event loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from kvcellar.events import PromptScored, TokenLogprob
from kvcellar.serve.chat_request import Json
from kvcellar.serve.openai.logprobs import TokenText, finite, top_by_text
from kvcellar.serve.protocols import ServedEngine

BACK = 8  # tokens that are decoded again before each one, so that it is written as in the middle of a text
LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Echo:
    """The prompts of a text completion as it was sent: texts or token ids."""

    def __init__(self, engine: ServedEngine, prompts: Sequence[str | list[int]]) -> None:
        """Decodes ids: call it in a thread. Ids that the engine will refuse have no text."""
        self._engine = engine
        self._texts = [one if isinstance(one, str) else _decoded(engine, one) for one in prompts]

    @property
    def size(self) -> int:
        """Characters."""
        return sum(map(len, self._texts))

    def text(self, prompt: int) -> str:
        return self._texts[prompt]

    def body(self, prompt: int, scored: PromptScored | None, most: int | None, tokens: TokenText) -> Json:
        """What is in front of the completion of a prompt, as a chunk has it. `most`: the `logprobs` of the request."""
        body: Json = {"text": self._texts[prompt]}
        if scored is not None and most is not None:
            length = len(self._texts[prompt])
            body["logprobs"] = {
                "tokens": (tokens.text(token) for token in scored.token_ids),
                "token_logprobs": (None if one is None else finite(one.logprob) for one in scored.logprobs),
                "top_logprobs": (None if one is None else _top(one, most, tokens) for one in scored.logprobs),
                "text_offset": (min(at, length) for at in offsets(self._engine, scored.token_ids)),
            }
        return body

    def joined(self, opening: Json, choice: Json) -> Json:
        """A choice, with its opening in front of the text and the lists of `logprobs`."""
        found = choice | {"text": f"{opening['text']}{choice['text']}"}
        before, after = opening.get("logprobs"), choice["logprobs"]
        if isinstance(before, dict) and isinstance(after, dict):
            found["logprobs"] = {name: chain(before[name], after[name]) for name in LOGPROBS}
        return found


def prompt_logprobs(scored: PromptScored, most: int, tokens: TokenText) -> Iterator[Json | None]:
    """`prompt_logprobs` as vLLM writes them: of each token an object by token id."""
    for entry in scored.logprobs:
        if entry is None:
            yield None
            continue
        found: Json = {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": tokens.text(token)}
            for rank, (token, value) in enumerate(entry.top[:most], start=1)
        }
        own = {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": tokens.text(entry.token_id)}
        yield {str(entry.token_id): own} | found


def _top(entry: TokenLogprob, most: int, tokens: TokenText) -> dict[str, float]:
    return top_by_text(replace(entry, top=entry.top[:most]), tokens)


def offsets(engine: ServedEngine, ids: Sequence[int]) -> Iterator[int]:
    """Where each token begins, in characters of the text of all of them. A token that is a part of a character begins
    where the character does."""
    if not engine.model.has_text:
        yield from (0 for _ in ids)
        return
    length, done = 0, 0  # characters of the first `done` tokens
    for at in range(len(ids)):
        yield length
        first = max(0, done - BACK)
        before, now = engine.decode(ids[first:done]), engine.decode(ids[first : at + 1])
        if not now.endswith("\ufffd") or at - done > BACK:  # else a character is not complete
            length, done = length + max(0, len(now) - len(before)), at + 1


def _decoded(engine: ServedEngine, ids: list[int]) -> str:
    model = engine.model
    known = len(ids) <= model.context and all(0 <= token < model.vocab_size for token in ids)
    return engine.decode(ids) if known and model.has_text else ""
