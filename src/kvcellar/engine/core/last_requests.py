"""last_requests: the last requests that are done, for those who look at an engine."""

import time
from collections import deque
from collections.abc import Iterator

from kvcellar.engine.control_replies import EndedRequest
from kvcellar.engine.core.request import Request
from kvcellar.memory.prefix.node import TOKEN, key_of

KEPT_REQUESTS, KEPT_TOKENS = 64, 1 << 17  # of `LastRequests`


class LastRequests:
    """The last requests that are done, as values: nothing that a request holds stays because of them.

    Always true:
      * there are at most `KEPT_REQUESTS`, in order of their ends, and their texts have at most `KEPT_TOKENS` tokens
        together, those of the latest ones.
    """

    def __init__(self) -> None:
        self._all: deque[EndedRequest] = deque()
        self._tokens, self._texts, self.count = 0, 0, 0  # `_texts`: how many of the last ones have a text

    def __iter__(self) -> Iterator[EndedRequest]:
        """The last one first."""
        return reversed(self._all)

    def add(self, request: Request) -> None:
        """A request is done. Costs the tokens of its reply."""
        first = next((one for one in request.completions if not one.dropped), None)
        reply = tuple(first.tokens[len(request.prompt) :][: first.told]) if first is not None else ()
        self._all.append(
            EndedRequest(
                *(request.number, time.time(), request.outcome, request.usage(), request.timings()),
                *(request.recall, request.speculation, request.space, request.retention.owner),
                (request.key, key_of(reply)),
            )
        )
        self.count += 1
        self._texts += 1
        self._tokens += len(request.prompt) + len(reply)
        while self._tokens > KEPT_TOKENS or len(self._all) > KEPT_REQUESTS:
            self._forget()

    def _forget(self) -> None:
        """The oldest text, or the oldest request where that has none."""
        if self._tokens > KEPT_TOKENS or self._texts == len(self._all):
            at = len(self._all) - self._texts
            oldest = self._all[at]
            assert oldest.text is not None
            self._tokens -= sum(map(len, oldest.text)) // TOKEN
            self._texts -= 1
            self._all[at] = oldest._replace(text=None)
        if len(self._all) > KEPT_REQUESTS:
            self._all.popleft()

    def check(self) -> None:
        """Assert what is always true."""
        texts = [one.text for one in self._all]
        assert len(texts) <= KEPT_REQUESTS
        assert [text is None for text in texts] == [at < len(texts) - self._texts for at in range(len(texts))]
        kept = sum(len(part) // TOKEN for text in texts if text is not None for part in text)
        assert self._tokens == kept <= KEPT_TOKENS
