"""marks: finds fixed texts (`<tool_call>`, `</think>`) in a text that arrives in parts."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Found(NamedTuple):
    """`settled`: the text before this place has no mark and is no part of one. `end`: where `mark` ends, which begins
    at `settled`; without a mark, both are the same place."""

    settled: int
    end: int
    mark: str


class Marks:
    """Texts to find, none of them empty. Of those that occur, the first is met; of those at one place, the longest.
    That does not depend on how the text is divided. Never changes."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = sorted(dict.fromkeys(texts), key=len, reverse=True)
        self._longest = len(self.texts[0]) if self.texts else 0
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._firsts = frozenset(text[0] for text in self.texts)

    def find(self, text: str, *, ended: bool) -> Found:
        """The first mark of a text. Unless it is `ended`, a mark that may still become another one is not met yet."""
        if self._firsts.isdisjoint(text):
            return Found(len(text), len(text), "")  # no mark begins
        held = len(text) if ended else self._held(text)
        found = self._pattern.search(text)
        if found is not None and found.start() < held:
            return Found(found.start(), found.end(), found[0])
        return Found(held, held, "")

    def at(self, text: str, *, ended: bool) -> str | None:
        """The longest mark that a text begins with; "": none; None: more of the text has to be known."""
        if not ended and any(len(one) > len(text) and one.startswith(text) for one in self.texts):
            return None
        return next((one for one in self.texts if text.startswith(one)), "")

    def _held(self, text: str) -> int:
        """Where the longest end of a text begins that a mark may begin with; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                rest = text[start:]
                if any(len(one) > len(rest) and one.startswith(rest) for one in self.texts):
                    return start
        return len(text)
