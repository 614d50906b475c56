"""matcher: where one completion is in the grammar of its constraint. No torch.

Always true:
  * the library's matcher has consumed the tokens of the completion, and after them `_tried`: the first of its drafts;
  * once `error` is set it stays, no token may be drawn, and the request fails: the library's own mask would then end
    the answer as if it were complete. So is a mask that took longer than `SLOWEST`: all requests wait.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

WORD_BITS = 32  # of a mask
SLOWEST = 0.5  # seconds of CPU of one mask: most take milliseconds, and the limits on a parser do not bound them


class Matcher:
    """Used by one thread at a time. `ends` end a completion; those of them that are `loose` can be text as well."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], loose: frozenset[int]) -> None:
        self._matcher, self._ends, self._loose = matcher, ends, loose
        self._tried: list[int] = []
        self.at_start = True  # the completion has no token yet
        self.error: str | None = None

    def copy(self) -> "Matcher":
        """Where the completion is, for another that begins with the same tokens."""
        self._try(())
        other = Matcher(self._matcher.deep_copy(), self._ends, self._loose)
        other.at_start, other.error = self.at_start, self.error
        return other

    def accept(self, token: int) -> None:
        """The completion has one token more. Costs the drafts that were tried and are not its text."""
        self.at_start = False
        if self._tried and self._tried[0] == token:
            del self._tried[0]
            return
        self._try(())
        if not (token in self._ends and self._matcher.is_stopped()):  # nothing else could follow: not even an end
            self._matcher.consume_token(token)
        self._look()

    def allows(self, drafts: Sequence[int], token: int) -> bool:
        """May `token` follow the completion and these drafts?"""
        if not self._try(drafts):
            allowed = False
        elif token in self._ends:
            allowed = self._matcher.is_accepting()
        else:
            allowed = self._matcher.validate_tokens([token]) == 1
        self._look()
        return allowed and self.error is None

    def fill(self, drafts: Sequence[int], mask: NDArray[np.int32]) -> None:
        """Write the tokens that may follow the completion and these drafts: a bit for each, the lowest first. After
        drafts that do not match any token may follow, as none of it becomes text; after an error none may."""
        if self.error is None and not self._try(drafts):
            mask.fill(-1)
        elif self.error is None:
            begun = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if time.thread_time() - begun > SLOWEST:
                self.error = f"it takes more than {SLOWEST} s to find which tokens may follow; make it less ambiguous"
            if self._loose and not self._matcher.is_accepting():
                for token in self._loose:
                    mask.view(np.uint32)[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        self._look()
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

    def _look(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = one_line(self._matcher.get_error())


def one_line(error: str) -> str:
    """The first part of an error of the library, without the source that it shows."""
    lines = [line.strip() for line in error.partition("\n<non-verbose/>")[0].splitlines()]
    found = " ".join(line for line in lines if line.strip("^ "))
    return found if len(found) <= 300 else f"{found[:300]}..."
