"""compare: the same work on several engines, each in a process of its own, interleaved, by CPU time.

Always true:
  * in each round every side does the same work on the same token ids, one after the other, while the others wait;
  * the first round of a work is not counted; there are more than an extent says, up to `MORE` times as many, while the
    spread of a ratio is larger than the gap that it claims;
  * a side that fails takes part no longer; the reason is in `Compared.failed`, and the other sides go on. Where ours
    fails, `PeerFailed` is raised.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcellar import progress
from kvcellar.bench.peer import Peer, PeerFailed, Side, ours_like, running
from kvcellar.bench.processes import PROC, cpu_seconds

MOST_IDS = 500  # ids of prompts are below
NEAR = 0.5  # lead in log-probability that rounding of 16-bit logits turns over; a random token is 20 behind
MORE = 3
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}  # llama.cpp's defaults
GIB = 1 << 30
BUSY = (0, 1, 2, 5, 6, 7)  # columns of `/proc/stat`: user, nice, system, interrupts, soft interrupts, stolen
IDLE = 0.05  # of the CPU time may be others': cores count as idle

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: with `steps`, decoding after the prompts, per step; else the prompts, per round.

    `reused` tokens are computed once, before the rounds; each prompt then begins with them. `lengths` are those of the
    tokens that each round computes.
    """

    name: str
    lengths: tuple[int, ...]
    decoding: bool = True
    reused: int = 0
    sampled: bool = False

    @property
    def what(self) -> str:
        if self.reused:
            return f"{self.lengths[0]} new tokens after {self.reused} that are in memory"
        if not self.decoding:
            return f"{self.lengths[0]} tokens to the first new one"
        if len(self.lengths) == 1:
            how = f", {', '.join(f'{name} {one}' for name, one in SAMPLED.items())}" if self.sampled else ""
            return f"a step of 1 sequence at {self.lengths[0]} tokens{how}"
        return f"a step of {len(self.lengths)} sequences of {self.lengths[0]} to {self.lengths[-1]} tokens"

    @property
    def tokens(self) -> int:
        """Of a step or a round, for rates."""
        return len(self.lengths) if self.decoding else sum(self.lengths)

    def prefix(self) -> list[int]:
        return _drawn(f"{self.name} prefix", self.reused)

    def prompts(self, round: int) -> Prompts:
        """Those of no two rounds or works begin alike, so that nothing of them is in memory."""
        return [
            self.prefix() + _drawn(f"{self.name} {round} {sequence}", length)
            for sequence, length in enumerate(self.lengths)
        ]


def _drawn(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, MOST_IDS) for _ in range(count)]


def _spread(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    return tuple(shortest + round(i * (longest - shortest) / (count - 1)) for i in range(count))


WORKS: Mapping[str, Work] = MappingProxyType(
    {
        work.name: work
        for work in (
            Work("decode-512", (512,)),
            Work("sampled-512", (512,), sampled=True),
            Work("decode-4096", (4096,)),
            Work("ragged-8", _spread(8, 128, 4096)),
            Work("ragged-32", _spread(32, 64, 1024)),
            Work("prefill-512", (512,), decoding=False),
            Work("prefill-2048", (2048,), decoding=False),
            Work("reuse-4096", (32,), decoding=False, reused=4096),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. Lengths of prompts are divided by `shorter`."""

    shorter: int = 1
    bursts: int = 12  # rounds of decoding
    burst: int = 4  # steps of one side in a round
    repeats: int = 5  # rounds of prompts

    def of(self, work: Work) -> Work:
        def less(length: int) -> int:
            return max(2, length // self.shorter) if length else 0

        return replace(work, lengths=tuple(map(less, work.lengths)), reused=less(work.reused))


QUICK = Extent(shorter=64, bursts=2, burst=2, repeats=1)


@dataclass(slots=True)
class Measured:
    """Of one side in one work: seconds of each step or round, and its tokens by sequence."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # CPU seconds: the median of each
    ids: list[list[int]] = field(default_factory=list)
    bytes: int = 0  # of the process in memory, afterwards

    @property
    def median(self) -> float:
        return statistics.median(self.cpu)

    def over(self, ours: "Measured") -> tuple[float, float]:
        """How many times as long as ours it took: the median of the rounds, and the distance of their quartiles."""
        ratios = [one / other for one, other in zip(self.rounds, ours.rounds, strict=True)]
        low, middle, high = statistics.quantiles(ratios * 2, n=4, method="inclusive")
        return middle, high - low


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens of a side that are our first choice after what it had before, of so many; else by how much ours led."""

    equal: int
    of: int
    lead: float | None = None  # the largest of all tokens; None: all are equal


@dataclass(slots=True)
class Compared:
    """By name of the work and label of the side."""

    measured: dict[str, dict[str, Measured]] = field(default_factory=dict)
    agreements: dict[str, dict[str, Agreement]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # by label: what the side said when it had loaded
    failed: dict[str, str] = field(default_factory=dict)  # by label
    # by name of the work: the part of the machine's CPU time that other processes had; None: the system does not say
    others: dict[str, float | None] = field(default_factory=dict)


class Others:
    """The CPU time of the machine that other processes than those measured have had, from when it is made.

    Wall time says how fast something is only where cores were idle. Linux counts the time of all CPUs in `/proc/stat`,
    with what a hypervisor took.
    """

    def __init__(self, pids: Sequence[int], *, root: Path = PROC) -> None:
        """`pids` are of the processes that are measured, beside this one. `root` is where the kernel's files are."""
        self._pids, self._root = (*pids, os.getpid()), root
        self._began, self._before = time.perf_counter(), self._clocks()

    def share(self) -> float | None:
        """The part of all CPU time so far that other processes had; None where the system does not count it."""
        after, seconds = self._clocks(), time.perf_counter() - self._began
        if self._before is None or after is None:
            return None
        busy, measured = after[0] - self._before[0], after[1] - self._before[1]
        return max(0.0, busy - measured) / (seconds * (os.cpu_count() or 1))

    def _clocks(self) -> tuple[float, float] | None:
        """CPU seconds of all processes, and of those measured."""
        try:
            columns = (self._root / "stat").read_text().partition("\n")[0].split()[1:]
        except OSError:
            return None
        busy = sum(int(columns[at]) for at in BUSY) / os.sysconf("SC_CLK_TCK")
        return busy, cpu_seconds(self._pids, self._root)


class Comparison:
    """Runs works on sides that are running."""

    def __init__(self, peers: Sequence[Peer], extent: Extent) -> None:
        self._peers, self._extent = list(peers), extent
        self.found = Compared(about={peer.side.label: peer.about for peer in peers})

    @property
    def reference(self) -> Peer:
        """Our side with the weights as they are stored."""
        return self._peers[0]

    def run(self, work: Work) -> None:
        """Measure a work on every side."""
        measured = {peer.side.label: Measured() for peer in self._peers}
        self.found.measured[work.name] = measured
        others = Others([peer.pid for peer in self._peers])
        if work.decoding:
            self._decode(work, measured)
        else:
            self._compute(work, measured)
        self.found.others[work.name] = others.share()
        for label in self.found.failed:
            measured.pop(label, None)
        self.found.agreements[work.name] = self._agreements(work, measured)

    def _decode(self, work: Work, measured: Mapping[str, Measured]) -> None:
        prompts, burst = work.prompts(0), self._extent.burst
        for peer, reply in self._each(work, do="open", prompts=prompts):
            measured[peer.side.label].ids = reply["ids"]
        for round in self._rounds(self._extent.bursts, measured):
            for peer, reply in self._each(work, do="steps", count=burst):
                one = measured[peer.side.label]
                for step in reply["ids"]:
                    for ids, new in zip(one.ids, step, strict=True):
                        ids.extend(new)
                if round:
                    one.cpu += reply["cpu"]
                    one.wall += reply["wall"]
                    one.rounds.append(statistics.median(reply["cpu"]))
        self._close(work, measured)

    def _compute(self, work: Work, measured: Mapping[str, Measured]) -> None:
        if work.reused:
            for _ in self._each(work, do="open", prompts=[work.prefix()]):
                pass
            self._close(work, measured)
        for round in self._rounds(self._extent.repeats, measured):
            for peer, reply in self._each(work, do="open", prompts=work.prompts(round)):
                one = measured[peer.side.label]
                one.ids += [ids[:1] for ids in reply["ids"]]
                if round:
                    one.cpu.append(reply["cpu"])
                    one.wall.append(reply["wall"])
                    one.rounds.append(reply["cpu"])
            self._close(work, measured)

    def _rounds(self, least: int, measured: Mapping[str, Measured]) -> Iterator[int]:
        for number in range(MORE * least + 1):
            if number > least and all(self._settled(peer.side, measured) for peer in self._peers):
                return
            yield number

    def _settled(self, side: Side, measured: Mapping[str, Measured]) -> bool:
        """Whether the gap to ours is larger than the spread of its rounds."""
        ours = ours_like(side, [peer.side for peer in self._peers])
        ratio, spread = measured[side.label].over(measured[ours.label])
        return side is ours or spread < abs(ratio - 1)

    def _close(self, work: Work, measured: Mapping[str, Measured]) -> None:
        for peer, reply in self._each(work, do="close"):
            measured[peer.side.label].bytes = reply["bytes"]

    def _each(self, work: Work, **request: Any) -> Iterator[tuple[Peer, dict[str, Any]]]:
        """The replies of all sides, in turn. A side that fails is left out from then on."""
        for peer in list(self._peers):
            try:
                yield peer, peer.ask(f"in {work.name}", **request, sampled=SAMPLED if work.sampled else None)
            except PeerFailed as error:
                if peer is self.reference:
                    raise
                self.found.failed[peer.side.label] = str(error)
                self._peers.remove(peer)

    def _agreements(self, work: Work, measured: Mapping[str, Measured]) -> dict[str, Agreement]:
        if work.sampled:
            return {}
        ours = measured[self.reference.side.label].ids
        prompts = self._prompts_of(work, len(ours))
        found = dict[str, Agreement]()
        for label, one in measured.items():
            if label != self.reference.side.label:
                found[label] = self._agreement(work, prompts, ours, one.ids)
        return found

    def _prompts_of(self, work: Work, count: int) -> Prompts:
        """The prompt of each of so many lists of ids."""
        if work.decoding:
            return work.prompts(0)
        return [prompt for round in range(count // len(work.lengths)) for prompt in work.prompts(round)]

    def _agreement(self, work: Work, prompts: Prompts, ours: Prompts, theirs: Prompts) -> Agreement:
        of, leads = 0, list[float]()
        for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
            of += len(other)
            for at in range(len(other)):
                if mine[: at + 1] == other[: at + 1]:
                    continue
                tokens = [*prompt, *other[:at]]
                leads.append(self.reference.ask(f"in {work.name}", do="lead", tokens=tokens, over=other[at])["lead"])
        wrong = [lead for lead in leads if lead > 0]
        return Agreement(of - len(wrong), of, max(wrong) if wrong else None)


def compared(
    directory: Path,
    sides: Sequence[Side],
    works: Sequence[Work],
    extent: Extent,
    *,
    threads: int = 1,
    cache_bytes: int = GIB // 4,
    report: Callable[[Compared, Work], None] = lambda found, work: None,
) -> Compared:
    """Measure works on the model in this directory. The first side is ours, with the weights as stored. `report` is
    called after each work."""
    works = [extent.of(work) for work in works]
    options = {**_options(directory, works, extent, threads), "cache_bytes": cache_bytes}
    failed = dict[str, str]()
    with ExitStack() as stack:
        peers = list[Peer]()
        for side in sides:
            progress.report(f"starting {side.label}")
            try:
                peers.append(stack.enter_context(running(side, options)))
            except PeerFailed as error:
                if not peers:
                    raise
                failed[side.label] = str(error)
        comparison = Comparison(peers, extent)
        comparison.found.failed |= failed
        for work in works:
            progress.report(f"measuring {work.name}")
            comparison.run(work)
            report(comparison.found, work)
    return comparison.found


def _options(directory: Path, works: Sequence[Work], extent: Extent, threads: int) -> dict[str, Any]:
    return {
        "model": str(directory),
        "threads": threads,
        "sequences": max(len(work.lengths) for work in works),
        "reuses": any(work.reused for work in works),
        "longest": max(work.reused + max(work.lengths) for work in works),
        "new": extent.burst * (MORE * extent.bursts + 1) + 8,
    }


def same_work(side: Side, agreement: Agreement) -> bool:
    """False where tokens differ from ours by more than rounding explains. Quantised weights are others."""
    return side.bits < 16 or agreement.lead is None or agreement.lead <= NEAR
