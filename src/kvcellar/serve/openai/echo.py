"""echo: prompts in front of their completions, and the log-probabilities of prompts.

Lists as long as a prompt are iterators, which are encoded in chunks: they are made on the event loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from kvcellar.events import PromptScored, TokenLogprob
from kvcellar.frontend.served_engine import ServedEngine
from kvcellar.serve.openai.formats import PromptScore, TextChoice, TextChunkChoice, TextLogprobs
from kvcellar.serve.openai.logprobs import Places, TokenText, finite, top_by_text


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

    def opening(
        self, index: int, prompt: int, scored: PromptScored | None, most: int | None, tokens: TokenText
    ) -> TextChunkChoice:
        """What is in front of the completion `index` of a prompt. `most`: the `logprobs` of the request."""
        opening = TextChunkChoice(index=index, text=self._texts[prompt])
        if scored is not None and most is not None:
            length = len(self._texts[prompt])
            opening.logprobs = TextLogprobs(
                tokens=(tokens.name(token) for token in scored.token_ids),
                token_logprobs=(None if one is None else finite(one.logprob) for one in scored.logprobs),
                top_logprobs=(None if one is None else _top(one, most, tokens) for one in scored.logprobs),
                text_offset=(min(at, length) for at in self._offsets(scored.token_ids, tokens)),
            )
        return opening

    def _offsets(self, ids: Sequence[int], tokens: TokenText) -> Iterator[int]:
        """Where each token of a prompt begins."""
        lost = 0  # the space in front of the first word, which some tokenizers drop
        if (first := next(filter(tokens.raw, ids), None)) is not None:
            lost = len((tokens.raw(first) or b"").decode(errors="replace")) - len(self._engine.decode([first]))
        places = Places(tokens, -lost)
        return (max(0, places.add(token)) for token in ids)


def join(opening: TextChunkChoice, choice: TextChoice) -> None:
    """Put the opening in front of a choice: of its text, and of the lists of `logprobs`."""
    choice.text = opening.text + choice.text
    before, after = opening.logprobs, choice.logprobs
    if before is not None and after is not None:
        for name in TextLogprobs.__struct_fields__:
            setattr(after, name, chain(getattr(before, name), getattr(after, name)))


def prompt_logprobs(scored: PromptScored, most: int, tokens: TokenText) -> Iterator[dict[str, PromptScore] | None]:
    """`prompt_logprobs` as vLLM writes them: of each token an object by token id."""
    for entry in scored.logprobs:
        if entry is None:
            yield None
            continue
        found = {
            str(token): PromptScore(finite(value), rank, tokens.text(token))
            for rank, (token, value) in enumerate(entry.top[:most], start=1)
        }
        own = PromptScore(finite(entry.logprob), entry.rank, tokens.text(entry.token_id))
        yield {str(entry.token_id): own} | found


def _top(entry: TokenLogprob, most: int, tokens: TokenText) -> dict[str, float]:
    return top_by_text(replace(entry, top=entry.top[:most]), tokens)


def _decoded(engine: ServedEngine, ids: list[int]) -> str:
    model = engine.model
    known = len(ids) <= model.context and all(0 <= token < model.vocab_size for token in ids)
    return engine.decode(ids) if known and model.has_text else ""
