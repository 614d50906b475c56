"""Claims that hold the tokens themselves instead of their memory, so that a wrong cut or join shows.

Their tails begin where they do, if they have any.
"""

from kvcellar.memory.spans import Span


class TokenClaims:
    """By number the tokens of a claim, where they and its tail begin, and its checkpoints: for each the tokens before
    it.

    Token 0 and the two behind it look ahead: no claim is cut between them.
    """

    def __init__(self, *, tails: bool = False) -> None:
        """`tails`: new claims have all of their span as their tail."""
        self._tails = tails
        self.tails: dict[int, int] = {}
        self.spans: dict[int, Span] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.points: dict[int, dict[int, tuple[int, ...]]] = {}
        self._last = 0

    def make(self, tokens: list[int], start: int, checkpoints: set[int]) -> int:
        """A claim on `tokens[start:]`."""
        points = {pos: tuple(tokens[:pos]) for pos in checkpoints if pos > start}
        tail = start if self._tails else len(tokens)
        return self._enter(Span(start, len(tokens)), tuple(tokens[start:]), points, tail)

    def _enter(self, span: Span, tokens: tuple[int, ...], points: dict[int, tuple[int, ...]], tail: int) -> int:
        assert len(span) == len(tokens) > 0
        assert all(span.start < pos <= span.end for pos in points)
        self._last += 1
        self.spans[self._last], self.tokens[self._last], self.points[self._last] = span, tokens, points
        self.tails[self._last] = tail
        return self._last

    def split(self, claim: int, pos: int) -> int:
        span, tokens, points = self.spans[claim], self.tokens[claim], self.points[claim]
        assert span.start < pos < span.end
        assert self.of(claim).whole(pos) == pos
        self.spans[claim], self.tokens[claim] = Span(span.start, pos), tokens[: pos - span.start]
        self.points[claim] = {at: before for at, before in points.items() if at <= pos}
        rest = {at: before for at, before in points.items() if at > pos}
        tail = self.tails[claim]
        self.tails[claim] = min(tail, pos)
        return self._enter(Span(pos, span.end), tokens[pos - span.start :], rest, max(tail, pos))

    def join(self, claim: int, following: int) -> None:
        assert self.spans[claim].end == self.spans[following].start
        if self.tails[following] > self.spans[following].start:
            assert self.tails[claim] == self.spans[claim].end, "a tail is lost"
            self.tails[claim] = self.tails[following]
        self.spans[claim] = Span(self.spans[claim].start, self.spans[following].end)
        self.tokens[claim] += self.tokens[following]
        self.points[claim] |= self.points[following]
        self.drop(following)

    def drop(self, claim: int) -> None:
        del self.spans[claim], self.tokens[claim], self.points[claim], self.tails[claim]

    def forget(self, claim: int, tokens: int) -> None:
        assert tokens > 0
        self.tails[claim] = min(self.tails[claim] + tokens, self.spans[claim].end)

    def drop_checkpoint(self, claim: int, pos: int) -> None:
        del self.points[claim][pos]

    def move_checkpoint(self, claim: int, pos: int, to: int) -> None:
        assert self.spans[to].start < pos <= self.spans[to].end
        assert pos not in self.points[to]
        self.points[to][pos] = self.points[claim].pop(pos)

    def of(self, claim: int) -> "View":
        return View(self, claim)


class View:
    def __init__(self, claims: TokenClaims, claim: int) -> None:
        self._claims, self._claim = claims, claim

    @property
    def positions(self) -> list[int]:
        return sorted(self._claims.points[self._claim])

    @property
    def tail(self) -> int:
        return self._claims.tails[self._claim]

    def whole(self, pos: int) -> int:
        span, tokens = self._claims.spans[self._claim], self._claims.tokens[self._claim]
        within = [at for at in range(max(span.start, pos - 2), pos) if tokens[at - span.start] == 0]
        return within[0] if within else pos
