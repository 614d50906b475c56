"""matcher: where one completion is in the grammar of its constraint. No torch.

Always true:
  * the library's matcher has consumed the tokens of the completion, and after them `_tried`: the first of its drafts;
  * once `error` is set it stays, no token may be drawn, and the request fails: the library's own mask would then end
    the answer as if it were complete. So is a mask that took longer than `SLOWEST`: all requests wait;
  * so is a request whose completions have together used `GRANTED` seconds of CPU more than `PER_TOKEN` for each of
    their tokens: masks that are each a bit faster than `SLOWEST` would make all others wait without end.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

WORD_BITS = 32  # of a mask
SLOWEST = 0.5  # seconds of CPU of one mask: most take milliseconds, and the limits on a parser do not bound them

GRANTED, PER_TOKEN = 3.0, 0.02  # seconds of CPU of a request: at its beginning, and for each token


class _Budget:
    """Of all completions of a request."""

    def __init__(self) -> None:
        self.left = GRANTED

    def grant(self) -> None:
        """For one token. What is not used is not kept for later: it never is more than at the beginning."""
        self.left = min(GRANTED, self.left + PER_TOKEN)


class Matcher:
    """Used by one thread at a time. `ends` end a completion; those of them that are `loose` can be text as well."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], loose: frozenset[int]) -> None:
        self._matcher, self._ends, self._loose = matcher, ends, loose
        self._tried: list[int] = []
        self.at_start = True  # the completion has no token yet
        self.error: str | None = None
        self._budget = _Budget()

    def fork(self) -> "Matcher":
        """Where the completion is, for another one of the same request that begins with the same tokens."""
        other = self.copy()
        other._budget = self._budget
        return other

    def copy(self) -> "Matcher":
        """The same for a completion of another request."""
        self._try(())
        other = Matcher(self._matcher.deep_copy(), self._ends, self._loose)
        other.at_start, other.error = self.at_start, self.error
        return other

    def accept(self, token: int) -> None:
        """The completion has one token more. Costs the drafts that were tried and are not its text."""
        self.at_start = False
        self._budget.grant()
        if self._tried and self._tried[0] == token:
            del self._tried[0]
            return
        begun = time.thread_time()
        self._try(())
        if not (token in self._ends and self._matcher.is_stopped()):  # nothing else could follow: not even an end
            self._matcher.consume_token(token)
        self._look(begun)

    def allows(self, drafts: Sequence[int], token: int) -> bool:
        """May `token` follow the completion and these drafts?"""
        begun = time.thread_time()
        if not self._try(drafts):
            allowed = False
        elif token in self._ends:
            allowed = self._matcher.is_accepting()
        else:
            allowed = self._matcher.validate_tokens([token]) == 1
        self._look(begun)
        return allowed and self.error is None

    def fill(self, drafts: Sequence[int], mask: NDArray[np.int32]) -> None:
        """Write the tokens that may follow the completion and these drafts: a bit for each, the lowest first. After
        drafts that do not match any token may follow, as none of it becomes text; after an error none may."""
        begun = time.thread_time()
        if self.error is None and not self._try(drafts):
            mask.fill(-1)
        elif self.error is None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if time.thread_time() - begun > SLOWEST:
                self.error = f"it takes more than {SLOWEST} s to find which tokens may follow; make it less ambiguous"
            if self._loose and not self._matcher.is_accepting():
                for token in self._loose:
                    mask.view(np.uint32)[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        self._look(begun)
        if self.error is not None:
            mask.fill(0)

    def _try(self, drafts: Sequence[int]) -> bool:
        """Consume these drafts, and no others. False if they do not match: then those before are consumed."""
        same = 0
        while same < min(len(drafts), len(self._tried)) and drafts[same] == self._tried[same]:
            same += 1
        if len(self._tried) > same:
            self._matcher.rollback(len(self._tried) - same)
            del self._tried[same:]
        rest = list(drafts[same:])
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        self._tried += rest[:consumed]
        return consumed == len(rest)

    def _look(self, begun: float) -> None:
        """Look for an error after what has begun at this CPU time."""
        self._budget.left -= time.thread_time() - begun
        if self.error is None and self._matcher.is_error():
            self.error = one_line(self._matcher.get_error())
        if self.error is None and self._budget.left < 0.0:
            self.error = (
                f"it takes more than {PER_TOKEN} s of CPU for each token, and {GRANTED} s, to find which tokens may "
                f"follow; make it less ambiguous"
            )


def one_line(error: str) -> str:
    """The first part of an error of the library, without the source that it shows."""
    lines = [line.strip() for line in error.partition("\n<non-verbose/>")[0].splitlines()]
    found = " ".join(line for line in lines if line.strip("^ "))
    return found if len(found) <= 300 else f"{found[:300]}..."
