"""prefixes: what running sequences take from the prefix tree of a memory, and what they give it.

Always true:
  * a sequence has locked the node of the tree that its published tokens end in, for as long as it has a `Prefix`;
  * the tree has no tokens behind the start of what a sequence has derived from text that was removed.
"""

import time
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from math import inf
from typing import NamedTuple

from kvcellar.events import Recall
from kvcellar.memory.memory import Memory
from kvcellar.memory.policy import EVERY, NEAREST
from kvcellar.memory.prefix.node import TOKEN, Kept, Match, Node, Reuse, Use, Watch, everyone, key_of
from kvcellar.memory.prefix.order import UNLIMITED, Part
from kvcellar.memory.prefix.tree import Tree
from kvcellar.memory.prefix.why import Elsewhere, Losses, ReadBack, Sightings, explained
from kvcellar.memory.retention import DEFAULT, NO_OPTIONS, Retention, RetentionOptions
from kvcellar.memory.spans import Span

LAST = (9, 17, 25, 33)  # spare checkpoints so many tokens before the end of a prompt, whose last lines may be others
DECODE = 4  # times as far apart are those of answers, each of which takes a step time, unless rows are small
NAMESPACES = 256  # for which it is known where prompts part
BRANCHES, LIKELY = 64, 8  # places where prompts part that are known, and that one prompt has checkpoints for
NEAR = 16  # tokens whose prefill takes about as long as the overhead of one more step
SLICE = 256  # nodes, at most, that are listed, removed or looked at between two steps
AT_ONCE = 64  # leaves that have expired which are removed at once
_FAR = 1 << 40  # a position behind every window


class Shares(NamedTuple):
    """`pins` of the cache may be pinned; what a tenant has beyond `tenant` of it is evicted first."""

    pins: float = 0.5
    tenant: float = 1.0


USUAL = Shares()


@dataclass(eq=False, slots=True)
class Prefix:
    """The place of the running sequence `seq` in the tree. `matched` tokens of its prompt were there, `restored` are in
    memory because of that; the tree has the first `published` of its tokens. `wanted` are positions where it will leave
    checkpoints, in order. `options` state how its tokens are kept."""

    seq: int
    root: Node
    key: bytes
    node: Node
    matched: int
    restored: int
    published: int
    wanted: list[int]
    options: RetentionOptions = NO_OPTIONS
    last: Use | None = None  # that of what it goes on with, if that was in the tree before


@dataclass(eq=False, slots=True)
class Totals:
    """What requests found in memory, and what memory lost, since the start of an engine."""

    asked: int = 0
    matched: int = 0
    restored: int = 0
    sources: Counter[str] = field(default_factory=Counter[str])  # restored tokens, by tier
    missed: Counter[str] = field(default_factory=Counter[str])  # the rest of what was asked for, by reason
    forks: int = 0
    lost: int = 0  # tokens of earlier trees
    lost_checkpoints: int = 0

    def count(self, recall: Recall) -> None:
        """A request begins to run."""
        self.asked += recall.asked
        self.matched += recall.matched
        self.restored += recall.restored
        self.sources.update(dict(recall.sources))
        if recall.asked > recall.restored:
            self.missed[recall.reason] += recall.asked - recall.restored


class Branches:
    """Where prompts of a namespace have parted from what was known, such as before a date, by the number of marks
    before and the tokens since the last one: there, prompts of the same form with other texts part, too.

    Always true: at most `BRANCHES` places are known. Where there would be more, those that were seen least often are
    forgotten, and others count half.
    """

    def __init__(self) -> None:
        self._seen = Counter[tuple[int, int]]()

    def note(self, marks: Sequence[int], pos: int) -> None:
        """A prompt with these marks, in order, has parted at `pos`."""
        number = bisect_right(marks, pos)
        if behind := pos - (marks[number - 1] if number else 0):
            self._seen[number, behind] += 1
        if len(self._seen) > BRANCHES:
            self._seen = Counter({place: times // 2 for place, times in self._seen.most_common(BRANCHES // 2)})

    def expected(self, marks: Sequence[int], length: int) -> list[int]:
        """The places in a prompt of so many tokens that were seen several times, at most `LIKELY`."""
        starts, ends = [0, *marks], [*marks, length]
        often = [place for place, times in self._seen.most_common(LIKELY) if times > 1 and place[0] <= len(marks)]
        return [starts[number] + behind for number, behind in often if starts[number] + behind < ends[number]]


class Prefixes:
    """The prefix tree of one memory."""

    def __init__(
        self,
        memory: Memory,
        *,
        every: int = EVERY,
        spare: int = 0,
        shares: Shares = USUAL,
        clock: Callable[[], float] = time.time,
        watch: Watch | None = None,
        totals: Totals | None = None,
    ) -> None:
        """`spare`: tokens between spare checkpoints, which are also before the end of a prompt; 0: there are none.
        `clock` is that of retention: seconds of the wall clock. `totals` are continued."""
        self.totals = totals if totals is not None else Totals()
        self._memory, self._every, self._spare, self._clock = memory, every, spare, clock
        groups = memory.storage.groups
        self._bounded = {group.name for group in groups if group.bounded}
        self.anywhere = not self._bounded and memory.rows.capacity is None
        self.losses = Losses(time.monotonic)
        self._branches: OrderedDict[str, Branches] = OrderedDict()  # of the namespaces that were used last
        self._elsewhere = Elsewhere(Sightings(), Sightings())
        self.tree = Tree(
            memory.claims,
            anywhere=self.anywhere,
            evicted=self.losses.evicted,
            pins=part(memory, shares.pins),
            quota=part(memory, shares.tenant),
            clock=clock,
            watch=watch,
            lowest=memory.claims.lowest if memory.rows.capacity is None else None,
        )
        self._windows = windows(memory)
        tails = self._windows and memory.rows.capacity is None
        self._part = max(1, min(every, *(cells // 2 for cells in self._windows.values()))) if tails else 0
        recurrent = ("recurrent",) if memory.rows.capacity is not None else ()
        self._kinds = " and ".join([*sorted(self._bounded), *recurrent])

    # -- a sequence ---------------------------------------------------------------------------------------------

    def restorable(self, namespace: str, key: bytes) -> int:
        """How many tokens of a key `restore` would find in memory now. Changes nothing."""
        most = len(key) // TOKEN - 1
        own = self.tree.match(self.tree.peek(namespace), key, most)
        return max(own.resume, self._for_everyone(namespace, key, most).resume)

    def reuse(self, namespace: str, key: bytes, most: int) -> Reuse:
        """Where a sequence could begin with what is in memory of up to `most` tokens of a key, and how many of these
        are in use. Changes nothing."""
        most = min(most, len(key) // TOKEN - 1)
        own = self.tree.match(self.tree.peek(namespace), key, most)
        match = max(self._for_everyone(namespace, key, most), own, key=lambda one: one.resume)
        used = max((node.end for node in match.path if node.users), default=0)
        return Reuse(match.resume, min(used, match.resume))

    def _for_everyone(self, namespace: str, key: bytes, most: int) -> Match:
        return self.tree.match(self.tree.peek(everyone(namespace)), key, most)

    def restore(
        self,
        seq: int,
        namespace: str,
        key: bytes,
        marks: Iterable[int] = (),
        options: RetentionOptions = NO_OPTIONS,
        *,
        most: int | None = None,
    ) -> Prefix:
        """Begin the new sequence `seq` with what the tree has of a key, up to `most` tokens; at least one token is left
        to compute.

        `marks` are positions that later requests may resume at, such as the borders of messages. What was restored
        counts as used once `use` is called.
        """
        self.expire()
        length, root = len(key) // TOKEN, self.tree.root(namespace)
        most = length - 1 if most is None else min(most, length - 1)
        match, pinned = self.tree.match(root, key, most), self._for_everyone(namespace, key, most)
        if pinned.resume > match.resume:
            self._adopt(seq, root, key, pinned)
            match = self.tree.match(root, key, most)._replace(matched=max(match.matched, pinned.matched))
        if match.resume:
            self._memory.claims.assemble(seq, [node.claim for node in match.path], match.resume)
        node = self.tree.lock(root, match)
        wanted = [] if self.anywhere else self._wanted(namespace, length, match.matched, sorted({*marks}))
        del wanted[: bisect_right(wanted, match.resume)]
        return Prefix(seq, root, key, node, match.matched, match.resume, match.resume, wanted, options)

    def _adopt(self, seq: int, root: Node, key: bytes, found: Match) -> None:
        """Let a namespace have what all of them find: the same cells, which count for no owner. `seq` is free."""
        self._memory.claims.assemble(seq, [node.claim for node in found.path], found.resume)
        claim = self._memory.claims.make(seq, Span(0, found.resume), () if self.anywhere else (found.resume,))
        self._memory.drop(seq)
        self.tree.share(root)
        node, _ = self.tree.insert(root, key[: found.resume * TOKEN], claim, 0, root)
        self.tree.unlock(node)

    def begin(self, seq: int, namespace: str, key: bytes, options: RetentionOptions = NO_OPTIONS) -> Prefix:
        """The place of a sequence of which the tree has nothing yet."""
        root = self.tree.root(namespace)
        self.tree.share(root)
        return Prefix(seq, root, key, root, 0, 0, 0, [], options)

    def use(self, prefix: Prefix) -> None:
        """The sequence begins to run: what was restored is of the value that it has now, and is kept as it states."""
        recurring = prefix.options.recurring
        prefix.last = self.tree.touch(prefix.node, prefix.key, prefix.matched, recurring=recurring)
        self.tree.strengthen(prefix.node, self.retention(prefix))
        if prefix.restored and not self.anywhere:  # where one has parted from what was known, others may
            self._add_checkpoint(prefix, prefix.restored)

    def retention(self, prefix: Prefix) -> Retention:
        """How what a sequence computed is kept from now on. Pins are those of a request, not of a sequence."""
        if (options := prefix.options) is NO_OPTIONS:
            return DEFAULT
        return replace(options.at(self._clock()), pinned=False)

    def explain(
        self,
        prefix: Prefix,
        *,
        read: ReadBack,
        owner: str,
        most: int | None = None,
        whole: str = "",
        images: Sequence[tuple[int, str]] = (),
    ) -> Recall:
        """Why no more of the prompt of a sequence was restored. `read` is what was read back for it, `most` how many
        tokens it could use, `whole` why none, whatever is in memory; "": it could. `images` as for `explained`."""
        namespace = prefix.root.namespace
        recall = explained(
            self.tree,
            self.losses,
            namespace,
            prefix.key,
            matched=0 if whole else prefix.matched if most is None else self._matched(prefix),
            restored=prefix.restored,
            read=read,
            kinds=self._kinds,
            elsewhere=self._elsewhere._replace(owner=owner),
            images=images,
        )
        self._elsewhere.owners.note(owner, namespace, prefix.key)
        if whole:
            recall = replace(_because(recall, "no checkpoint", whole), salted=0)
        elif most is not None and most < recall.asked:
            detail = f"from token {most} on, the prompt is computed because what it gives is read"
            recall = _because(recall, "prompt read", detail)
        self.totals.count(recall)
        return recall

    def _matched(self, prefix: Prefix) -> int:
        """How many tokens of its key are there, whether it uses them or not."""
        found = self.tree.match(prefix.root, prefix.key, len(prefix.key) // TOKEN - 1)
        return max(prefix.matched, found.matched)

    def know_others(self, others: Sightings, identity: str) -> None:
        """What a store has of other weights, by namespace; `identity` is that of this memory."""
        self._elsewhere = self._elsewhere._replace(namespaces=others, identity=identity)

    def fork(self, prefix: Prefix, seq: int) -> Prefix:
        """The place of `seq`, a fork of the sequence, whose tokens are all published."""
        self.tree.share(prefix.node)
        self.totals.forks += 1
        return replace(prefix, seq=seq, wanted=[])

    def _wanted(self, namespace: str, length: int, matched: int, marks: Sequence[int]) -> list[int]:
        """Where a prompt leaves checkpoints: where it diverges from what is known, and where others of its form have,
        at its marks, before its last token, where the same prompt resumes, and every so many tokens, unless one of
        these is near."""
        branches = self._branches_of(namespace)
        likely = branches.expected(marks, length)
        branches.note(marks, matched)
        wanted = sorted(pos for pos in {matched, *likely, *marks, length - 1} if 0 < pos < length)
        regular = range(self._every, length, self._every)
        return sorted({*wanted, *(pos for pos in regular if not _near(wanted, pos))})

    def _branches_of(self, namespace: str) -> Branches:
        """Of no other one: what one client sends must not decide where prompts of others leave checkpoints."""
        found = self._branches.setdefault(namespace, Branches())
        self._branches.move_to_end(namespace)
        if len(self._branches) > NAMESPACES:
            self._branches.popitem(last=False)
        return found

    def want(self, prefix: Prefix, pos: int) -> None:
        """Let the sequence leave a checkpoint at `pos`, not computed yet: another one diverges there."""
        if not self.anywhere and pos not in prefix.wanted:
            insort(prefix.wanted, pos)

    def checkpoints(self, prefix: Prefix, new: Span, *, spare: bool) -> tuple[int, ...]:
        """Where a step that computes the tokens `new` leaves checkpoints, also `spare` ones."""
        if self.anywhere:
            return ()
        wanted, prompt = prefix.wanted, len(prefix.key) // TOKEN
        found = wanted[bisect_right(wanted, new.start) : bisect_right(wanted, new.end)]
        found += _multiples(self._every, max(new.start, prompt), new.end)  # in decode
        if spare and self._spare:
            last = [prompt - n for n in LAST if new.start < prompt - n <= new.end]
            often = new.start < prompt or self._spare <= NEAREST
            apart = self._spare if often else min(EVERY, DECODE * self._spare)
            found = sorted({*found, *last, *_multiples(apart, new.start, new.end)})
        return tuple(found)

    def spare(self, prefix: Prefix, pos: int) -> bool:
        """Whether a checkpoint that a step of a sequence leaves at `pos` is spare."""
        return pos % self._every > 0 and pos not in prefix.wanted

    def claimed(self, prefix: Prefix, new: Span) -> bool:
        """Whether a step that computes the tokens `new` leaves a claim, for its tail: all of a prompt do, and in decode
        those that end a part of so many tokens that windows still have all of it."""
        if not self._part:
            return False
        return new.start < len(prefix.key) // TOKEN or new.start // self._part < new.end // self._part

    def next_wanted(self, prefix: Prefix, pos: int) -> int | None:
        """The next position behind `pos` where the sequence will leave a checkpoint."""
        at = bisect_right(prefix.wanted, pos)
        return prefix.wanted[at] if at < len(prefix.wanted) else None

    def publish(
        self,
        prefix: Prefix,
        tokens: Sequence[int],
        end: int,
        claim: int | None = None,
        *,
        at: Sequence[int] = (),
    ) -> None:
        """Give the tree the first `end` tokens of a sequence, which are all that are in memory. `claim` is what a step
        has left of the last of them. Without one, with checkpoints `at` these positions: `end`, and others at which the
        sequence can resume, as far as they are behind what was published before."""
        if len(prefix.key) < end * TOKEN:
            prefix.key += key_of(tokens[len(prefix.key) // TOKEN : end])
        start = self._memory.claims.of(claim).span.start if claim is not None else end
        if prefix.published < start:
            places = () if claim is not None or self.anywhere else [pos for pos in at if pos > prefix.published]
            rest = self._memory.claims.make(prefix.seq, Span(prefix.published, start), places)
            self._insert(prefix, rest, start)
        elif claim is None and end in at and not self.anywhere and end:
            self._add_checkpoint(prefix, end)
        if claim is not None:
            self._insert(prefix, claim, end, partial(self.spare, prefix))
        del prefix.wanted[: bisect_right(prefix.wanted, end)]

    def _add_checkpoint(self, prefix: Prefix, end: int) -> None:
        """Let the tree, which has all tokens of the sequence, resume at their end: by a claim on no more than the last
        one."""
        node = prefix.node
        if node.end == end and end not in node.checkpoints:
            start = self._memory.claims.of(node.claim).whole(end - 1) if node.start < end - 1 else node.start
            self._insert(prefix, self._memory.claims.make(prefix.seq, Span(start, end), (end,)), end)

    def _insert(self, prefix: Prefix, claim: int, end: int, spare: Callable[[int], bool] = lambda pos: False) -> None:
        start = self._memory.claims.of(claim).span.start
        key, retention = prefix.key[: end * TOKEN], self.retention(prefix)
        prefix.node, known = self.tree.insert(
            prefix.root, key, claim, start, prefix.node, retention, last=prefix.last, spare=spare
        )
        prefix.published = end
        if known > start:
            self._share(prefix.seq, prefix.node, Span(start, known))

    def _share(self, seq: int, node: Node, computed: Span) -> None:
        """What a sequence has computed that was in the tree: hold the tree's cells instead."""
        above: Node | None = node
        while above is not None and above.end > computed.start:
            if above.start < computed.end and above.parent is not None:
                self._memory.claims.share_with(seq, above.claim)
            above = above.parent

    def release(self, prefix: Prefix) -> None:
        """The sequence is over. Its tokens expire some time after their last use, which is now."""
        self.tree.strengthen(prefix.node, self.retention(prefix))
        self.tree.unlock(prefix.node)

    # -- retention ----------------------------------------------------------------------------------------------

    def pinned_cells(self) -> Mapping[str, int]:
        """The most cells of each group that are pinned and that no sequence uses."""
        pins = self.tree.pins
        return {
            group.name: pins.idle_checkpoints * self._windows[group.name] if group.bounded else pins.idle_tokens
            for group in self._memory.storage.groups
            if not group.of_input
        }

    def expire(self) -> bool:
        """Remove some of what has expired. False if there is nothing."""
        self.losses.cause = "its TTL has ended"
        return self.tree.expire(AT_ONCE)

    # -- memory -------------------------------------------------------------------------------------------------

    def evict(self, group: str, tokens: int = 1) -> bool:
        """Free cells of a group, of what no sequence uses; False if nothing is left that could free any. More or fewer
        than `tokens` may become free."""
        if self.expire():
            return True
        self.losses.cause = f"cells of {group} layers were needed"
        if group not in self._bounded:
            return self.tree.evict_leaf(max(tokens, 1)) > 0
        # Checkpoints may have the same window, which is free once all of them are gone.
        return self.tree.evict_window(lambda kept: self._frees(kept)[0][group] > 0, tokens)

    def evict_row(self, saves: int | None = None, *, spare: bool = False) -> bool:
        """Free a row of state that no sequence uses, or, with `saves`, only one that is of no more value than a new
        checkpoint which saves so many tokens. False if there is none."""
        if self.expire():
            return True
        self.losses.cause = "rows of recurrent state were needed"
        worth = inf if saves is None else self.tree.worth(saves, spare=spare)
        return self.tree.evict_checkpoint(lambda kept: self._frees(kept)[1] > 0, worth) is not None

    def _frees(self, kept: Kept) -> tuple[Mapping[str, int], int]:
        """Cells by group, and rows, that are free without a checkpoint."""
        return self._memory.claims.exclusive(kept.node.claim, kept.pos)

    def clear(self, cause: str, most: int | None = None) -> bool:
        """Evict what no sequence uses and is not pinned, for a `cause` in words: all of it, or `most` tails,
        checkpoints and leaves. False if there was nothing."""
        found, self.losses.cause = False, cause
        for _ in range(most) if most is not None else count():
            window = not self.anywhere and self.tree.evict_window(lambda kept: True, 1 << 40)
            if not window and not self.tree.evict_leaf(1 << 40):
                break
            found = True
        return found

    def ended(self) -> Totals:
        """The totals, which the next tree continues: all that this one has is lost."""
        found = self.tree.total()
        self.totals.lost += found.lost + found.tokens
        self.totals.lost_checkpoints += found.lost_checkpoints + found.checkpoints
        return self.totals

    def discard(self, removal: Iterator[int], most: int, cause: str) -> list[int]:
        """Go on with a removal from this tree (`Tree.discarding`) at up to `most` nodes, for a `cause` in words;
        returns the tokens that went at each, none at the end."""
        self.losses.cause = cause
        return list(islice(removal, most))

    def check(self, locked: Iterable[Node]) -> None:
        """Assert what is always true, where `locked` are the nodes that sequences and others have locked, each as often
        as it is."""
        self.tree.check()
        locks: dict[int, int] = {}
        for node in locked:
            above: Node | None = node
            while above is not None:
                locks[id(above)] = locks.get(id(above), 0) + 1
                above = above.parent
        assert all(node.users == locks.get(id(node), 0) for node in self.tree.nodes())
        claims = [node.claim for node in self.tree.nodes()]
        assert sorted(claims) == sorted(self._memory.claims), "a claim is in no node of the tree"


def _because(recall: Recall, reason: str, detail: str) -> Recall:
    """For another reason than that the prompt diverged."""
    return replace(recall, reason=reason, detail=detail, entry="", ours=(), theirs=(), image="")


def _near(ordered: Sequence[int], pos: int) -> bool:
    at = bisect_right(ordered, pos - NEAR)
    return at < len(ordered) and ordered[at] < pos + NEAR


def _multiples(of: int, start: int, end: int) -> range:
    """Those in (start, end]."""
    return range(start // of * of + of, end + 1, of)


def part(memory: Memory, share: float) -> Part:
    """A share of a memory as numbers: tokens, whose cells are those of the smallest unbounded group, and checkpoints,
    as many as have windows and rows. Half of the rows are for running sequences. 1: all of it."""
    if share >= 1:
        return UNLIMITED
    capacity, groups = memory.storage.capacity(), memory.storage.groups
    tokens = [capacity[group.name] for group in groups if not (group.bounded or group.of_input)]
    points = [capacity[name] // cells for name, cells in windows(memory).items()]
    if memory.rows.capacity is not None:
        points.append(memory.rows.capacity // 2)
    return Part(int(share * min(tokens)) if tokens else None, int(share * min(points)) if points else None)


def windows(memory: Memory) -> dict[str, int]:
    """The most cells that a checkpoint holds in each bounded group."""
    return {group.name: group.layout.most_cells(_FAR, 0) for group in memory.storage.groups if group.bounded}
