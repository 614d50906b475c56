"""turns: an engine that decodes on a thread of its own, held between two steps."""

import threading
from collections.abc import Sequence

TIMEOUT = 1800.0  # seconds of one step, or of all prompts


class Turns:
    """Counts the tokens of each sequence; the engine's thread waits in `on_tokens` when all have what is wanted."""

    def __init__(self, sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self._given = [0] * sequences  # tokens returned so far
        self._wanted = [1] * sequences
        self._ready, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self._error: BaseException | None = None

    def on_tokens(self, sequence: int, ids: Sequence[int]) -> None:
        """Called on the engine's thread."""
        self.tokens[sequence].extend(ids)
        if not self.ended and all(map(lambda got, wanted: len(got) >= wanted, self.tokens, self._wanted)):
            self._ready.release()
            if not self._go.acquire(timeout=TIMEOUT):
                raise TimeoutError("no further step was wanted")

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.release()

    def step(self) -> list[list[int]]:
        self._wanted = [given + 1 for given in self._given]
        self._go.release()
        return self.first()

    def first(self) -> list[list[int]]:
        """Wait until each sequence has what is wanted, at first a token; returns what is new."""
        if not self._ready.acquire(timeout=TIMEOUT):
            raise TimeoutError("the engine did not finish a step")
        if self._error is not None:
            raise self._error
        new = [ids[given:] for ids, given in zip(self.tokens, self._given, strict=True)]
        self._given = [given + len(ids) for given, ids in zip(self._given, new, strict=True)]
        return new

    def end(self) -> None:
        """Let the engine's thread go on without waiting."""
        self.ended = True
        self._go.release()
