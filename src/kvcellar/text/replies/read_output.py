"""read_output: the text of a completion that is read as it is generated: its pieces, and stop strings in its content.

Always true:
  * no control token is in a piece, as far as tokens are known to be that: `WholeStream` has only their text;
  * a stop string is found in the content alone: reasoning and calls are no part of it, and end a content;
  * after a stop string, and after the last call that is wanted, nothing is read.
"""

from collections.abc import Sequence

from kvcellar.text.output import Output, StopFinder, Stops, WholeStream, open_stream
from kvcellar.text.pieces import Content, Piece
from kvcellar.text.replies.machine import Machine, joined
from kvcellar.text.replies.marks import Marks
from kvcellar.text.tokens import TextTokenizer


class ReadOutput(Output):
    """An `Output` whose text is the content."""

    def __init__(self, tokenizer: TextTokenizer, stops: Stops, after: Sequence[int], machine: Machine) -> None:
        super().__init__(None, stops)
        self._read = open_stream(tokenizer, skip_special=False, after=after)
        self._tokenizer, self._machine, self._texts = tokenizer, machine, stops
        self._pieces: list[Piece] = []
        self._reasoning = 0  # tokens of it that were not told

    @property
    def over(self) -> bool:
        return self.met is not None or self._machine.over

    def told(self) -> tuple[tuple[Piece, ...] | None, int]:
        pieces, count = tuple(joined(self._pieces)), self._reasoning
        self._pieces, self._reasoning = [], 0
        return pieces, count

    def push(self, token: int, *, may_stop: bool) -> str:
        reasoned = self._machine.reasons
        text = self._read.push(token)
        mark = self._tokenizer.control.get(token, "") if token in self._tokenizer.special_ids else ""
        if mark and text.endswith(mark):
            pieces = [*self._machine.push(text[: -len(mark)]), *self._machine.push(mark, special=True)]
        else:
            pieces = self._machine.push(text)
        self._reasoning += reasoned or self._machine.reasons
        return self._shown(pieces, may_stop=may_stop)

    def flush(self) -> str:
        if self.met is not None:
            return ""
        pieces = [*self._last(self._read.flush()), *self._machine.end()]
        text = self._shown(pieces, may_stop=True)
        return text if self.met is not None else text + self._withheld()

    def _last(self, text: str) -> list[Piece]:
        """The pieces of the text that a stream held back."""
        if not isinstance(self._read, WholeStream):
            return self._machine.push(text)
        control = Marks(self._tokenizer.control[token] for token in self._tokenizer.special_ids)
        pieces: list[Piece] = []
        while text:
            settled, end, mark = control.find(text, ended=True)
            pieces += self._machine.push(text[:settled])
            pieces += self._machine.push(mark, special=True)
            text = text[end:]
        return pieces

    def _shown(self, pieces: Sequence[Piece], *, may_stop: bool) -> str:
        """Add pieces up to a stop string; returns the content in them."""
        shown: list[str] = []
        for piece in pieces:
            if self.met is not None:
                break
            if not isinstance(piece, Content):
                shown.append(self._withheld())
                self._pieces.append(piece)
                continue
            text = piece.text
            if may_stop:
                text, self.met = self._stops.push(text)
            shown.append(text)
            if text:
                self._pieces.append(piece if text == piece.text else Content(text))
        return "".join(shown)

    def _withheld(self) -> str:
        """The content that may have been a stop string: it ends here."""
        text, self._stops = self._stops.flush(), StopFinder(self._texts)
        self._pieces += [Content(text)] if text else []
        return text
