"""output: what is told of an answer, token by token: its text so far, without half characters and without stop strings.

Always true:
  * what was told is the beginning of the answer's text, cut where the stop string that was `met` begins.
"""

from kvcellar.text.stops import StopFinder, Stops
from kvcellar.text.stream import TextStream


class Output:
    """One answer's text. Without a stream (a model that has no tokenizer) there is none, only tokens."""

    def __init__(self, stream: TextStream | None, stops: Stops) -> None:
        self._stream, self._stops = stream, StopFinder(stops)
        self.met: str | None = None

    def push(self, token: int, *, may_stop: bool) -> str:
        """Text that may be told now. Where the answer may not stop yet, stop strings are text like any other."""
        text = self._stream.push(token) if self._stream is not None else ""
        if not may_stop:
            return text
        return self._past_stops(text)

    def flush(self) -> str:
        """The answer has ended: the rest of its text."""
        if self.met is not None:
            return ""
        text = self._past_stops(self._stream.flush() if self._stream is not None else "")
        return text if self.met is not None else text + self._stops.flush()

    def _past_stops(self, text: str) -> str:
        told, self.met = self._stops.push(text)
        return told
