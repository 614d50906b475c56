"""name_patterns: patterns of names in files that are not trusted, and the process in which they are matched: `python -m
kvcellar.engine.models.name_patterns SOCKET`. See `worker`. No torch.

Python's matcher can take time exponential in the length of a name, and cannot be stopped. So patterns in which it may
try again are matched in a process of their own.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import closing

from msgspec import Raw, Struct

from kvcellar.errors import ModelRefused, shown
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker, serve

MOST = 10_000  # characters of a pattern
SECONDS = 2.0  # of CPU time for all patterns of a field
STACK, MEMORY = 2**23, 2**28  # bytes
_BRANCHES = frozenset("*+?{|")  # where the matcher may try again


class Asked(Struct, frozen=True, array_like=True):
    """Which names does each pattern match? `ends`: all of a name, or what follows one of its dots; else all of it."""

    patterns: tuple[str, ...]
    names: tuple[str, ...]
    ends: bool

    def compiled(self, pattern: str) -> re.Pattern[str]:
        plain = re.compile(pattern)
        return re.compile(rf"(?:.*\.)?(?:{pattern})") if self.ends else plain

    def found(self) -> list[list[int]]:
        """The places of the names, by pattern."""
        patterns = map(self.compiled, self.patterns)
        return [[at for at, name in enumerate(self.names) if one.fullmatch(name)] for one in patterns]


def matched(patterns: Sequence[str], names: Sequence[str], what: str, *, ends: bool = False) -> list[frozenset[str]]:
    """The names that each pattern matches, as `Asked` says it. `what` has the patterns. Raises `ModelRefused`."""
    asked = Asked(tuple(patterns), tuple(names), ends)
    for pattern in patterns:
        if len(pattern) > MOST:
            raise ModelRefused(f"{what} has a pattern of {len(pattern)} characters; {MOST} are allowed")
        try:
            asked.compiled(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelRefused(f"{what}: {shown(pattern)} is not a regular expression: {error}") from error
    found = asked.found() if _BRANCHES.isdisjoint("".join(patterns)) else _tried(asked, what)
    return [frozenset(names[at] for at in places) for places in found]


def _tried(asked: Asked, what: str) -> list[list[int]]:
    with closing(Worker(__name__, lambda: None)) as worker:
        try:
            return decode(worker.run(asked, SECONDS), list[list[int]])
        except JobEnded:
            raise ModelRefused(f"{what} takes too long to match, or too much memory. Simplify it") from None


# -- in the process ---------------------------------------------------------------------------------------------------


def opened(_: None) -> Callable[[Raw], list[list[int]]]:
    return lambda what: decode(what, Asked).found()


if __name__ == "__main__":
    serve(None, opened, stack=STACK, memory=MEMORY)
