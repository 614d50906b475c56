"""policies: prompt tokens that rules of eviction compute on the traces of `replay`, of full attention, beside ours.

A trace is a tree of pieces: tokens that come together, up to 16 of them. A cache keeps as many tokens as it has cells,
those of the request that runs among them, and evicts a piece without others below it. Ours is the real prefix tree, on
claims that hold nothing, and counts what `replay` does. Counts are the same on every machine.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice, product
from typing import NamedTuple

from benchmarks.prefix import Spans
from benchmarks.replay import FIRST, QUICK, STEP_TOKENS, TRACES, Turn, Writer, chats, clairvoyant
from benchmarks.row import Given, Lines
from kvcellar.memory.prefix.node import TOKEN, key_of
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.spans import Span

SEEDS = (1, 2, 3)  # by which priors were chosen,
HELD_OUT = range(1000, 1010)  # and of mixtures that had no part in that
SHARES = (0.1, 0.5)  # of the cells that the whole trace takes
ROUNDS = (2, 3, 4)  # of eight chats, before much is learned
PIECE = 16  # tokens
PROTECTED = 0.8  # of the cells, of a segmented list
FORGET = 0.97  # what a request counts to the choice between two rules, for each one since

Worth = tuple[float, float]  # the lowest goes next


class Pieces:
    """The tokens of all texts of a trace, cut where texts part, where prompts end, and after `PIECE` tokens."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        numbers: dict[tuple[int, int], int] = {}
        texts = [_numbered(numbers, (*turn.prompt, *turn.answer[:-1])) for turn in turns]
        self.tokens = len(numbers)
        below = Counter(above for above, _ in numbers)
        ends = {text[-1] for text in texts} | {
            text[len(turn.prompt) - 2] for turn, text in zip(turns, texts, strict=True) if len(turn.prompt) > 1
        }
        self.paths = list[list[int]]()  # of each text
        self.prompts = list[int]()  # pieces of each that its prompt can find in memory
        self.lengths = [len(turn.prompt) for turn in turns]
        self.above, self.size = {0: 0}, {0: 0}
        self._uses: dict[int, list[int]] = {}
        for at, text in enumerate(texts):
            path, start, most = [0], 0, len(turns[at].prompt) - 1
            for end, token in enumerate(text, 1):
                if token in ends or below[token] != 1 or end % PIECE == 0:
                    self.above[token], self.size[token], start = path[-1], end - start, end
                    path.append(token)
                    if end <= most:
                        self._uses.setdefault(token, []).append(at)
            self.paths.append(path[1:])
            self.prompts.append(bisect_right(self.depths(path[1:]), most))

    def depths(self, path: Sequence[int]) -> list[int]:
        found, depth = list[int](), 0
        for one in path:
            depth += self.size[one]
            found.append(depth)
        return found

    def next_use(self, piece: int, after: int) -> float:
        uses = self._uses.get(piece, [])
        at = bisect_right(uses, after)
        return uses[at] if at < len(uses) else float("inf")


def _numbered(numbers: dict[tuple[int, int], int], text: Sequence[int]) -> list[int]:
    found, above = list[int](), 0
    for token in text:
        above = numbers.setdefault((above, token), len(numbers) + 1)
        found.append(above)
    return found


# -- rules -------------------------------------------------------------------------------------------------------------


class Rule:
    """By what was used last longest ago. The base of the others, which say what a piece is worth when it is used.

    First in, first out is the same: a piece has no others below it only until it is used again, or once these went."""

    def __init__(self, pieces: Pieces, cells: int) -> None:
        self.pieces, self.cells = pieces, cells

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        """At request `at`. `new`: the cache did not have it."""
        return at, 0

    def demoted(self) -> Iterator[tuple[int, Worth]]:
        """What is worth less after a request."""
        yield from ()

    def evicted(self, piece: int, worth: Worth) -> None:
        """A piece has gone."""

    def keeps(self, piece: int, other: int) -> bool:
        """Whether a piece that the last request has added stays, and `other` goes in its place."""
        return True


class Clairvoyant(Rule):
    """By what is needed again last."""

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        return -self.pieces.next_use(piece, at), 0


class MostRecent(Rule):
    """What was used last goes first."""

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        return -at, 0


class Frequency(Rule):
    """By the number of uses, of equal ones by the last use."""

    def __init__(self, pieces: Pieces, cells: int) -> None:
        super().__init__(pieces, cells)
        self._uses = Counter[int]()

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        self._uses[piece] = 1 if new else self._uses[piece] + 1
        return self._uses[piece], at


class Dual(Frequency):
    """GreedyDual-Size-Frequency: by the number of uses above what the last one that went was worth. All pieces cost as
    much for each of their tokens."""

    def __init__(self, pieces: Pieces, cells: int) -> None:
        super().__init__(pieces, cells)
        self._clock = 0.0

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        uses, last = super().worth(piece, at, new=new)
        return self._clock + uses, last

    def evicted(self, piece: int, worth: Worth) -> None:
        self._clock = max(self._clock, worth[0])


class Segmented(Rule):
    """A segmented list: what was used again goes behind all else, as far as that is `PROTECTED` of the cells."""

    def __init__(self, pieces: Pieces, cells: int) -> None:
        super().__init__(pieces, cells)
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._tokens, self._at = 0, 0

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        self._at = at
        if new:
            return 0, at
        if piece not in self._protected:
            self._tokens += self.pieces.size[piece]
            self._protected[piece] = None
        self._protected.move_to_end(piece)
        return 1, at

    def demoted(self) -> Iterator[tuple[int, Worth]]:
        while self._tokens > PROTECTED * self.cells:
            piece, _ = self._protected.popitem(last=False)
            self._tokens -= self.pieces.size[piece]
            yield piece, (0, self._at)

    def evicted(self, piece: int, worth: Worth) -> None:
        if piece in self._protected:
            del self._protected[piece]
            self._tokens -= self.pieces.size[piece]


class Admitted(Rule):
    """TinyLFU: by the last use, but a new piece stays only where it was asked for more often than the one that would
    go. Uses of pieces that went count, too, and all are worth half after ten times as many as a full cache has
    pieces."""

    def __init__(self, pieces: Pieces, cells: int) -> None:
        super().__init__(pieces, cells)
        self._asked, self._count = Counter[int](), 0

    def worth(self, piece: int, at: int, *, new: bool) -> Worth:
        self._asked[piece] += 1
        self._count += 1
        if self._count >= 10 * self.cells / PIECE:
            self._asked = Counter({one: many // 2 for one, many in self._asked.items() if many > 1})
            self._count = 0
        return at, 0

    def keeps(self, piece: int, other: int) -> bool:
        return self._asked[piece] > self._asked[other]


RULES: dict[str, Callable[[Pieces, int], Rule]] = {
    "last use": Rule, "frequency": Frequency, "most recent": MostRecent, "segmented": Segmented, "TinyLFU": Admitted,
    "GDSF": Dual,
}  # fmt: skip
PAIRS = (("last use", "most recent"), ("last use", "TinyLFU"), ("GDSF", "most recent"))  # to choose between


class Cache:
    """Keeps the pieces of at most `cells` tokens. It has the order of each of the rules, and follows one of them."""

    def __init__(self, pieces: Pieces, cells: int, *rules: Callable[[Pieces, int], Rule]) -> None:
        self._pieces, self._cells = pieces, cells
        self._rules = [rule(pieces, cells) for rule in rules]
        self._worths: list[dict[int, Worth]] = [{} for _ in rules]
        self._heaps: list[list[tuple[Worth, int]]] = [[] for _ in rules]
        self._below = Counter[int]()  # pieces below each, and the request that runs, if it ends there
        self._there = set[int]()
        self._added = list[int]()  # by the last request, as far as they are there
        self._tokens = 0

    def serve(self, at: int, by: int = 0) -> int:
        """A request; returns the tokens of its prompt that are computed. Evicts by the rule of this number."""
        path, size = self._pieces.paths[at], self._pieces.size
        known = next((n for n, one in enumerate(path) if one not in self._there), len(path))
        last = path[known - 1] if known else 0
        self._use(path[:known], at, new=False)
        self._below[last] += 1
        self._evict(self._cells - sum(size[one] for one in path[known:]), by)
        self._below[last] -= 1
        self._use(path[known:], at, new=True)
        for one in path[known:]:
            self._there.add(one)
            self._tokens += size[one]
            self._below[self._pieces.above[one]] += 1
        self._added = path[known:]
        self._enter(path[-1])
        self._demote()
        return self._pieces.lengths[at] - sum(size[one] for one in path[: min(known, self._pieces.prompts[at])])

    def _use(self, path: Sequence[int], at: int, *, new: bool) -> None:
        for rule, worths in zip(self._rules, self._worths, strict=True):
            worths.update({one: rule.worth(one, at, new=new) for one in path})

    def _demote(self) -> None:
        for rule, worths, heap in zip(self._rules, self._worths, self._heaps, strict=True):
            for piece, worth in rule.demoted():
                worths[piece] = worth
                heappush(heap, (worth, piece))

    def _evict(self, most: int, by: int) -> None:
        while self._tokens > most:
            worth, piece = heappop(self._heaps[by])
            if piece not in self._there or self._below[piece] or self._worths[by][piece] != worth:
                continue
            last = self._added[-1] if self._added else piece
            if piece != last and not self._below[last] and not self._rules[by].keeps(last, piece):
                heappush(self._heaps[by], (worth, piece))
                piece = last
            if piece == last and self._added:
                self._added.pop()
            self._drop(piece)

    def _drop(self, piece: int) -> None:
        above = self._pieces.above[piece]
        self._there.remove(piece)
        self._tokens -= self._pieces.size[piece]
        self._below[above] -= 1
        for rule, worths in zip(self._rules, self._worths, strict=True):
            rule.evicted(piece, worths[piece])
        if above and not self._below[above]:
            self._enter(above)

    def _enter(self, piece: int) -> None:
        for worths, heap in zip(self._worths, self._heaps, strict=True):
            heappush(heap, (worths[piece], piece))


def by_rule(pieces: Pieces, cells: int, rule: Callable[[Pieces, int], Rule]) -> int:
    """Prompt tokens that are computed by one rule."""
    cache = Cache(pieces, cells, rule)
    return sum(cache.serve(at) for at in range(len(pieces.paths)))


def by_choice(pieces: Pieces, cells: int, *rules: Callable[[Pieces, int], Rule]) -> int:
    """By the one of some rules by which a cache of its own would have computed least of late."""
    cache, shadows = Cache(pieces, cells, *rules), [Cache(pieces, cells, rule) for rule in rules]
    computed, lately = 0, [0.0 for _ in rules]
    for at in range(len(pieces.paths)):
        lately = [FORGET * before + shadow.serve(at) for before, shadow in zip(lately, shadows, strict=True)]
        computed += cache.serve(at, lately.index(min(lately)))
    return computed


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(turns: Sequence[Turn], cells: int) -> int:
    """By the prefix tree."""
    claims, computed = Spans(), 0
    tree = Tree(claims, anywhere=True)
    for turn in turns:
        text, root = key_of((*turn.prompt, *turn.answer[:-1])), tree.root("")
        match = tree.match(root, text, len(turn.prompt) - 1)
        own = tree.lock(root, match)
        last = tree.touch(own, text[: len(turn.prompt) * TOKEN], match.matched)
        computed += len(turn.prompt) - match.resume
        pos, prompt, end = match.resume, len(turn.prompt), len(text) // TOKEN
        while pos < end:
            new = min(STEP_TOKENS, prompt - pos) if pos < prompt else end - pos
            for held in (new,) if pos < prompt else range(1, new + 1):  # answers are computed token by token
                while (over := tree.total().tokens + held - cells) > 0 and tree.evict_leaf(over):
                    pass
            claim = claims.make(Span(pos, pos + new))
            own, _ = tree.insert(root, text[: (pos + new) * TOKEN], claim, pos, own, last=last)
            pos += new
        tree.unlock(own)
    return computed


# -- the row -----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Prompt tokens that are computed, on average over seeds."""

    cells: float
    clairvoyant: float  # by what is needed again last, also of the request that runs: that of `replay`
    best: float  # the same, but what runs is kept
    ours: float
    rules: dict[str, float]

    @property
    def simple(self) -> float:
        """By the rule that is best on this trace, of those that do not choose."""
        return min(self.rules[name] for name in RULES)


def compared(turns: Sequence[Turn], share: float) -> Found:
    """On a trace, with cells for this share of all its tokens."""
    pieces = Pieces(turns)
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    cells = max(int(share * (pieces.tokens + STEP_TOKENS)), longest + STEP_TOKENS)
    rules: dict[str, float] = {name: by_rule(pieces, cells, rule) for name, rule in RULES.items()}
    rules |= {f"{one} or {other}": by_choice(pieces, cells, RULES[one], RULES[other]) for one, other in PAIRS}
    best = by_rule(pieces, cells, Clairvoyant)
    return Found(cells, clairvoyant(turns, cells), best, ours(turns, cells), rules)


def averaged(found: Sequence[Found]) -> Found:
    cells, known, best, own = (sum(part) / len(found) for part in zip(*(one[:4] for one in found), strict=True))
    rules = {name: sum(one.rules[name] for one in found) / len(found) for name in found[0].rules}
    return Found(cells, known, best, own, rules)


def few(rounds: int) -> Callable[[Writer], Iterator[Turn]]:
    """The first of eight chats in turn."""
    return lambda writer: islice(chats(writer), 8 * rounds)


def row(given: Given) -> Lines:
    """As ratios to the clairvoyant cache of `replay`, on average over seeds; at last, of mixtures of other seeds."""
    scale = QUICK if given.quick else 1.0
    traces = {name: TRACES[name] for name in (FIRST if given.quick else TRACES)}
    traces |= {f"{rounds} rounds": few(rounds) for rounds in ROUNDS} | {"held out": TRACES["mixed"]}
    names = [*RULES, *(f"{one} or {other}" for one, other in PAIRS)]
    yield f"{'trace':10} in a  computed   ours   best simple  {', '.join(names)}"
    found = dict[str, dict[str, object]]()
    for (name, trace), share in product(traces.items(), SHARES):
        seeds = HELD_OUT if name == "held out" else SEEDS
        one = averaged(
            [compared(list(trace(Writer(seed, scale))), share) for seed in (seeds[:1] if given.quick else seeds)]
        )
        found[f"{name} {share}"] = one._asdict()
        ratios = " ".join(f"{part / one.clairvoyant:6.3f}" for part in (one.ours, one.best, one.simple))
        of_rules = " ".join(f"{one.rules[rule] / one.clairvoyant:5.2f}" for rule in names)
        yield f"{name:10} {share:4.0%} {one.ours:9.0f} {ratios}  {of_rules}"
    return found
