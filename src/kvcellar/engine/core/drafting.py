"""drafting: the drafts of the completions that take part in a step.

Always true:
  * only completions in decode have drafts, and only between `propose` and the end of their step;
  * while the drafter is parked, rounds are plain and no chain is made for it;
  * of a text with images, a drafter sees the tokens of text only;
  * all accepted drafts of a completion, and the token that follows them, fit its context and its `max_tokens`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from typing import TypeVar

from kvcellar.engine.core.request import Completion
from kvcellar.engine.sample.draw import BY_TORCH, Draws
from kvcellar.engine.speculate.chain import Chain, Key, Verified
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.events import Speculation
from kvcellar.images.image import is_row

T = TypeVar("T")
log = logging.getLogger("kvcellar.engine")


class Drafting:
    """What the engine calls of its speculator. Without one, nothing is drafted."""

    def __init__(
        self,
        speculator: Speculator | None,
        *,
        context: int,
        memory: DraftMemory | None = None,
        sequences: dict[Key, int | None] | None = None,
        draws: Draws = BY_TORCH,
    ) -> None:
        """`memory`: that of the drafter, if it has one of its own. `sequences` has the target's of the completions that
        `propose` is called for, for drafters that read its memory."""
        self.speculator, self._context, self.memory, self.draws = speculator, context, memory, draws
        self._sequences = {} if sequences is None else sequences
        self._chains: dict[Completion, Chain] = {}
        self._texts: dict[Completion, list[int]] = {}  # of those with images, as `text` returns them
        self._resting: Sequence[Completion] = ()  # of a round for which the drafter is parked

    @property
    def reads_hidden(self) -> bool:
        """Whether `committed` needs the hidden states of every row."""
        return self.speculator is not None and self.speculator.reads_hidden

    def propose(self, completions: Sequence[Completion], most: int) -> list[int]:
        """Draft for completions in decode, up to `most` for each. Returns how many drafts each has."""
        self._chains.clear()
        self._resting = completions if self.speculator is not None and self.speculator.parked else ()
        if self.speculator is None or self._resting or not completions:
            return [0] * len(completions)
        chains = [self._chain(completion, min(most, self._room(completion))) for completion in completions]
        self._sequences.clear()
        self._sequences.update((completion.key, completion.seq) for completion in completions)
        self.speculator.draft(chains)
        self._chains = dict(zip(completions, chains, strict=True))
        return [len(chain.drafts) for chain in chains]

    def text(self, completion: Completion) -> list[int]:
        """The tokens of a completion without rows of images, which all are of its prompt. It grows as its text does."""
        if (images := completion.request.images) is None:
            return completion.tokens
        text = self._texts.setdefault(completion, [])
        if not text:
            text += filterfalse(is_row, completion.tokens[: images.end])
        text += completion.tokens[len(text) + images.count :]
        return text

    def _room(self, completion: Completion) -> int:
        left, produced = self._context - len(completion.tokens), completion.sampler.produced
        limit = completion.request.params.max_tokens
        return left if limit is None else min(left, limit - produced - 1)

    def _chain(self, completion: Completion, room: int) -> Chain:
        request = completion.request
        images, text = request.images, self.text(completion)
        return Chain(
            completion.key,
            text,
            completion.sampler,
            completion.pos,
            room,
            namespace=request.space,
            shared=request.cached if images is None else images.text_before(request.cached),
            rows_of_images=len(completion.tokens) - len(text),
            retention=request.retention,
            draws=self.draws,
        )

    def chain(self, completion: Completion, drafts: int = 0) -> Chain:
        """The chain that the next token of a completion is drawn with, and its first `drafts` drafts."""
        if (chain := self._chains.get(completion)) is None:
            return self._chain(completion, 0)
        chain.cut(drafts)
        return chain

    def committed(self, news: Sequence[Committed]) -> None:
        """These tokens have entered memory."""
        assert self.speculator is not None
        self.speculator.committed(news)

    def failed(self, error: Exception) -> None:
        """A step with drafts raised, and is run again without."""
        if self.speculator is not None:
            self.speculator.step_failed(error)

    def learn(self, verified: Mapping[Completion, Verified], *, alone: bool) -> None:
        """The step is over. `verified` are the completions of it that drew a token; unless those that were drafted for
        were `alone` in it, its time is not measured."""
        resting, self._resting = self._resting, ()
        if self.speculator is not None and resting:
            self.speculator.rest([completion.key for completion in resting if completion in verified])
        chains, self._chains = self._chains, {}
        kept = {completion: chain for completion, chain in chains.items() if completion in verified}
        if self.speculator is not None and kept:
            alone = alone and len(kept) == len(chains)
            self.speculator.learn([*kept.values()], [verified[completion] for completion in kept], alone=alone)

    def fork(self, completion: Completion, sibling: Completion) -> None:
        """A sibling begins with the text of a completion."""
        if self.speculator is not None:
            self.speculator.fork(completion.key, sibling.key)

    def close(self, completion: Completion) -> None:
        """A completion has ended, is preempted, or its text was changed."""
        self._chains.pop(completion, None)
        self._texts.pop(completion, None)
        if self.speculator is not None:
            self.speculator.close(completion.key)

    def report(self, completion: Completion) -> Speculation | None:
        """What drafts have done so far for the request of a completion."""
        return self.speculator.report(completion.request.number) if self.speculator is not None else None

    def conclude(self, request: int) -> None:
        """A request is done."""
        if self.speculator is not None:
            self.speculator.conclude(request)
        for one in [one for one in self._texts if one.request.number == request]:
            del self._texts[one]

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        """Drop what is kept of texts that have ended (see `Drafter`)."""
        if self.speculator is not None:
            self.speculator.forget(namespace, [*filterfalse(is_row, tokens)])

    # -- the memory of the drafter ------------------------------------------------------------------------------

    def expect(self, completion: Completion) -> None:
        """A completion waits: what tiers have of its text is read meanwhile."""
        space = completion.request.space
        self._try(lambda memory: memory.expect(completion.key, space, self.text(completion)))

    def pump(self) -> bool:
        """Read a bounded part of it for its store. False if there is nothing to read."""
        return bool(self._try(DraftMemory.pump))

    def _try(self, act: Callable[[DraftMemory], T]) -> T | None:
        """After an error all of it is dropped: drafts are not worth a failed request."""
        try:
            return act(self.memory) if self.memory is not None else None
        except Exception:
            log.exception("the memory of drafts is dropped")
            assert self.memory is not None
            self.memory.reset()
            return None

    def shut_down(self) -> None:
        """Free it, at the end."""
        if self.memory is not None:
            self.memory.shut_down()

    def check(self) -> None:
        """Assert what is always true of it."""
        if self.memory is not None:
            self.memory.check()
