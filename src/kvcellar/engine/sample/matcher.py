"""matcher: where one completion is in the grammar of its constraint. No torch.

The library is called by threads of `mask_threads` only, when the engine's thread has asked for a mask.

Always true:
  * the library's matcher has consumed the tokens of the completion but `_pending`, and after them `_tried`: the first
    of some drafts;
  * `_masks` are those of the completion as it is, by the drafts behind it;
  * once `error` is set it stays, no token may be drawn, and the request fails: the library's own mask would then end
    the answer as if it were complete. So is a mask that took longer than `SLOWEST`;
  * so is a request whose completions have together used `GRANTED` seconds of CPU more than `PER_TOKEN` for each of
    their tokens, which is known before a mask is begun: masks that are each a bit faster than `SLOWEST` would hold
    threads without end.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from kvcellar.engine.sample.mask_threads import Lane, MaskThreads

WORD_BITS = 32  # of a mask
SLOWEST = 0.5  # seconds of CPU of one mask: most take milliseconds, and the limits on a parser do not bound them

GRANTED, PER_TOKEN = 3.0, 0.02  # seconds of CPU of a request: at its beginning, and for each token


class Grammar(NamedTuple):
    """What the completions of a grammar share. `start` never consumes a token. `ends` end a completion; those of them
    that are `loose` can be text as well. Masks have so many `words`."""

    start: LLMatcher
    tokenizer: LLTokenizer
    ends: frozenset[int]
    loose: frozenset[int]
    words: int
    threads: MaskThreads
    executor: LLExecutor


class _Budget(Lane):
    """Of all completions of a request, whose masks are computed one after the other."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.left = GRANTED

    def grant(self) -> None:
        """For one token. What is not used is not kept for later: it never is more than at the beginning."""
        self.left = min(GRANTED, self.left + PER_TOKEN)


class _Mask(NamedTuple):
    """`matched`: the drafts are text of the grammar; after others any token may follow, as none becomes text."""

    bits: NDArray[np.int32]
    matched: bool

    def has(self, token: int) -> bool:
        return bool(self.bits.view(np.uint32)[token // WORD_BITS] >> np.uint32(token % WORD_BITS) & 1)


class Matcher:
    """Used by the engine's thread, but for what threads call."""

    def __init__(self, grammar: Grammar, *, owner: str = "") -> None:
        """At its start. `first` is to be called once for a grammar, and others made of it by `copy`."""
        self._grammar, self._threads = grammar, grammar.threads
        self._library: LLMatcher | None = None  # a copy of the start, made when the first token is consumed
        self._idle = LLMatcher(grammar.tokenizer, "", log_level=0)  # of no grammar: it does nothing
        self._pending: list[int] = []
        self._tried: list[int] = []
        self._masks: dict[tuple[int, ...], _Mask] = {}
        self._asked: set[tuple[int, ...]] = set()
        self._accepted = 0
        self._missed = False  # a step has begun in which the mask was late
        self.error: str | None = None
        self._budget = _Budget(owner)

    def first(self) -> None:
        """Compute the first mask, on the thread that compiles."""
        begun = time.thread_time()
        bits = np.empty(self._grammar.words, np.int32)
        self._fill(self._grammar.start, bits)
        self._look(self._grammar.start, begun)
        self._masks[()] = _Mask(bits, matched=True)

    def fork(self) -> "Matcher":
        """For another completion of the same request. Only before the first token."""
        other = self.copy()
        other._budget = self._budget
        return other

    def copy(self, owner: str = "") -> "Matcher":
        """For a completion of another request. Only before the first token."""
        assert self.at_start, "a matcher that has accepted a token cannot be copied"
        other = Matcher(self._grammar, owner=owner)
        other._masks, other.error = {(): self._masks[()]}, self.error
        return other

    @property
    def at_start(self) -> bool:
        """The completion has no token yet."""
        return self._accepted == 0

    @property
    def late(self) -> bool:
        """Whether a step was skipped for want of the mask, and another one would be."""
        return self._missed and not self._known(())

    def wait(self, seconds: float) -> None:
        """Wait for the next mask."""
        with self._threads.changed:
            self._threads.changed.wait_for(lambda: self._known(()), seconds)

    def close(self) -> None:
        """The request is over: what is asked for it is not computed."""
        with self._threads.changed:
            self._budget.asked.clear()

    def accept(self, token: int) -> None:
        """The completion has one token more, which is no end of it. Its mask is asked for."""
        with self._threads.changed:
            self._accepted += 1
            self._missed = False
            self._pending.append(token)
            self._masks = {drafts[1:]: mask for drafts, mask in self._masks.items() if drafts[:1] == (token,)}
            self._asked = set()
            self._budget.grant()
            self._ask(())

    def resume(self, tokens: Sequence[int]) -> str | None:
        """The completion had these tokens before, and goes on. Only before the first token. Waits for the next mask;
        returns None, or why the tokens are not allowed. Not on the engine's thread."""
        assert self.at_start, "a matcher that has accepted a token goes on already"
        with self._threads.changed:
            self._accepted, self._pending, self._masks = len(tokens), list(tokens), {}
            self._ask(())
            self._threads.changed.wait_for(lambda: self._known(()))
        return self.error

    def allows(self, drafts: Sequence[int], token: int) -> bool:
        """May `token` follow the completion and these drafts? Not if that is not known in time."""
        found = self._mask(tuple(drafts))
        return found is not None and self.error is None and found.matched and found.has(token)

    def fill(self, drafts: Sequence[int], mask: NDArray[np.int32]) -> bool:
        """Write the tokens that may follow the completion and these drafts: a bit for each, the lowest first. After
        drafts that do not match any token may follow, as none of it becomes text; after an error none may. False, and
        none, if that is not known in time."""
        found = self._mask(tuple(drafts))
        if self.error is not None or found is None:
            mask.fill(0)
        else:
            mask[:] = found.bits
        self._missed |= not drafts and not self._known(())
        return self.error is not None or found is not None

    def _known(self, drafts: tuple[int, ...]) -> bool:
        return self.error is not None or drafts in self._masks

    def _mask(self, drafts: tuple[int, ...]) -> _Mask | None:
        with self._threads.changed:
            self._ask(drafts)
            self._threads.wait(self._budget, lambda: self._known(drafts))
            return self._masks.get(drafts)

    # -- on the thread of the lane ------------------------------------------------------------------------------------

    def _ask(self, drafts: tuple[int, ...]) -> None:
        if not self._known(drafts) and drafts not in self._asked:
            self._asked.add(drafts)
            self._threads.ask(self._budget, lambda: self._work(drafts))

    def _work(self, drafts: tuple[int, ...]) -> None:
        """Consume what is pending, and compute the mask after these drafts, unless they are not wanted any more."""
        with self._threads.changed:
            pending, accepted, wanted = self._pending[:], self._accepted, drafts in self._asked
            if self.error is None and self._budget.left < 0.0:
                self.error = _OVER
            if self._known(drafts) or not wanted:
                return
        begun = time.thread_time()
        try:
            mask = self._computed(pending, drafts)
        except BaseException as error:  # noqa: BLE001 - a panic of the library, for one
            self.error, mask = f"the library failed with {type(error).__name__}: {one_line(str(error))}", None
        with self._threads.changed:
            del self._pending[: len(pending)]
            self._look(self._library, begun)
            if mask is not None and accepted == self._accepted:
                self._masks[drafts] = mask

    def _computed(self, pending: Sequence[int], drafts: tuple[int, ...]) -> _Mask:
        """Consume these tokens of the completion, and compute the mask behind these drafts."""
        if self._library is None:
            self._library = self._grammar.start.deep_copy()
        for token in pending:
            if self._tried and self._tried[0] == token:
                del self._tried[0]
                continue
            self._keep(())
            self._consume(token)
        for count, token in enumerate(drafts):
            before = self._after(drafts[:count])
            if not (before.matched and before.has(token)):
                return _Mask(np.full(self._grammar.words, -1, np.int32), matched=False)
        return self._after(drafts)

    def _after(self, drafts: tuple[int, ...]) -> _Mask:
        """The mask behind drafts of which each may follow the others."""
        if (known := self._masks.get(drafts)) is not None:
            return known
        self._keep(drafts)
        for token in drafts[len(self._tried) :]:
            self._consume(token)
            self._tried.append(token)
        bits = np.empty(self._grammar.words, np.int32)
        self._fill(self._grammar.start if self._library is None else self._library, bits)
        return _Mask(bits, matched=True)

    def _keep(self, drafts: tuple[int, ...]) -> None:
        """Of the drafts that were tried, keep those with which these begin."""
        same = 0
        while same < min(len(drafts), len(self._tried)) and drafts[same] == self._tried[same]:
            same += 1
        if self._library is not None and len(self._tried) > same:
            self._library.rollback(len(self._tried) - same)
            del self._tried[same:]

    def _consume(self, token: int) -> None:
        """Of two matchers at once: for one the library would keep the interpreter's lock, for as long as it takes."""
        assert self._library is not None
        self._grammar.executor.consume_token_par([(self._library, token), (self._idle, token)])

    def _fill(self, library: LLMatcher, bits: NDArray[np.int32]) -> None:
        begun = time.thread_time()
        library.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if time.thread_time() - begun > SLOWEST:
            self.error = f"it takes more than {SLOWEST} s to find which tokens may follow; make it less ambiguous"
        if self._grammar.loose and not library.is_accepting():
            for token in self._grammar.loose:
                bits.view(np.uint32)[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)

    def _look(self, library: LLMatcher | None, begun: float) -> None:
        """Look for an error after what has begun at this CPU time."""
        self._budget.left -= time.thread_time() - begun
        if self.error is None and library is not None and library.is_error():
            self.error = one_line(library.get_error())
        if self.error is None and self._budget.left < 0.0:
            self.error = _OVER


_OVER = (
    f"it takes more than {PER_TOKEN} s of CPU for each token, and {GRANTED} s, to find which tokens may follow; make "
    f"it less ambiguous"
)


def one_line(error: str) -> str:
    """The first part of an error of the library, without the source that it shows."""
    lines = [line.strip() for line in error.partition("\n<non-verbose/>")[0].splitlines()]
    found = " ".join(line for line in lines if line.strip("^ "))
    return found if len(found) <= 300 else f"{found[:300]}..."
