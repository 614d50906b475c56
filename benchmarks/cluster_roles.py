"""cluster_roles: what it brings to compute prompts at replicas of their own (`--roles`), by model and link. As in
`cluster_sim` it is simulated: the real router, and engines by measured costs.

A prompt is written to the store when it is computed, at the rate of the link of its replica, and read at that of the
other one; its stream is told nothing meanwhile. Whether a request begins at a replica for prompts is decided by the
rule of `cluster/client.py`, or all do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.cluster_sim import CPU, GPU, LATE, WIRE, Ask, Costs, Fleet, Ours, Session, sessions_of
from benchmarks.row import Given, Lines
from kvcellar.cluster.client import handed_over

HANDED = 0.9  # of the mean seconds of handing over, when one more was measured
LOOK = 0.25  # seconds between two looks into the store at most: half of it on the mean
BYTES = {GPU: 32_768, CPU: 6_144}  # of a token


class Load(NamedTuple):
    """`amount`: copies of a trace, or requests, for each replica; `rate`: requests a second, likewise."""

    name: str
    costs: Costs
    replicas: int
    amount: int
    rate: float
    links: tuple[float, ...] = (10e9, 1.25e9)  # bytes a second

    def sessions(self) -> list[tuple[float, Session]]:
        return sessions_of(self.name, self.replicas, self.amount, self.rate, self.costs.block)


class Roles(Ours):
    fleet: "Split"

    def choose(self, ask: Ask) -> int:
        split = self.fleet.prefill
        best = self.router.rank(ask.prompt, ask.turn.prompt, frozenset(map(str, range(split))))[0]
        if split and ask.number not in self.fleet.began:
            others = frozenset(map(str, range(split, len(self.fleet.engines))))
            begins = self.router.rank(ask.prompt, ask.turn.prompt, others)[0]
            if self.fleet.every or handed_over(best, begins, self.fleet.handing):
                best = begins
        self.fleet.fresh[ask.number] = ask.turn.prompt - best.have - best.restored
        self.router.sent(best.replica, ask.number, ask.prompt, ask.turn.prompt)
        return int(best.replica)


class Split(Fleet):
    """The first `prefill` replicas are for prompts."""

    def __init__(self, costs: Costs, replicas: int, *, prefill: int, write: float, every: bool) -> None:
        """`write`: seconds of a token. `every`: all prompts begin at these."""
        super().__init__(costs, replicas, Roles, gateways=2, store=True)
        self.roles = [one for one in self.rules if isinstance(one, Roles)]
        self.prefill, self.write, self.every = prefill, write, every
        self.began: dict[int, float] = {}  # requests with a first token
        self.fresh: dict[int, int] = {}  # tokens that its replica computes
        self.handing, self.handed = 0.0, 0
        self.each: list[float] = []  # seconds of a token behind the first, of each request
        self._written = [0.0] * replicas  # when the last write ends

    def _first(self, ask: Ask) -> None:
        now = self.world.now
        if (began := self.began.get(ask.number)) is not None:
            self.handing = HANDED * self.handing + (1 - HANDED) * (now - began) if self.handing else now - began
            self.world.after(WIRE, lambda: self.rules[ask.gateway].first(ask))
            return
        super()._first(ask)
        self.began[ask.number] = now
        if ask.replica < self.prefill and ask.turn.answer > 1:
            self.world.after(0.0, lambda: self._hand_over(ask))

    def _hand_over(self, ask: Ask) -> None:
        self.handed += 1
        self.engines[ask.replica].leave(ask)
        self.queues[ask.replica] -= 1
        self.roles[ask.gateway].router.ended(ask.number, decoded=False)
        done = max(self._written[ask.replica], self.world.now) + self.fresh[ask.number] * self.write
        self._written[ask.replica] = done
        self.world.after(done - self.world.now + LATE + LOOK / 2, lambda: self._go_on(ask))

    def _go_on(self, ask: Ask) -> None:
        ask.replica = self.rules[ask.gateway].choose(ask)
        self.queues[ask.replica] += 1
        self.world.after(WIRE, lambda: self.engines[ask.replica].take(ask))

    def _ended(self, ask: Ask) -> None:
        super()._ended(ask)
        if ask.turn.answer > 1:
            self.each.append((self.world.now - self.began[ask.number]) / (ask.turn.answer - 1))


LOADS = (
    *(Load("conversation", GPU, 4, 150, rate) for rate in (4, 7)),
    Load("tool and agent", GPU, 4, 150, 15),
    *(Load(name, CPU, 4, 1, rate, (1.25e9, 0.1e9)) for name, rate in (("users", 0.5), ("edits", 0.3))),
)
KINDS = ((0, False), (1, False), (2, False), (2, True))  # replicas for prompts, and whether all begin there
QUICK = (Load("tool and agent", GPU, 3, 40, 10, (10e9,)),)


def measured(
    load: Load, link: float, prefill: int, sessions: Sequence[tuple[float, Session]], *, every: bool
) -> dict[str, float]:
    costs = load.costs
    seconds = BYTES[costs] / link
    fleet = Split(costs._replace(read=seconds), load.replicas, prefill=prefill, write=seconds, every=every)
    found = fleet.serve(sessions)
    each = sorted(fleet.each)
    return {
        "computed": found.computed / found.asked,
        "handed": fleet.handed / sum(len(session) for _, session in sessions),
        "handing": fleet.handing,
        "first": found.first[0],
        "first_p99": found.first[1],
        "token": sum(each) / len(each),
        "token_p99": each[int(0.99 * len(each))],
        "whole": found.whole,
    }


def row(given: Given) -> Lines:
    """Every load without roles, and with one or two replicas for prompts: those that take long, or every one.
    Milliseconds of a token are those of a request behind its first one."""
    names = ("computed", "handed", "gap s", "first", "p99 s", "token ms", "p99 ms", "mean s")
    found = dict[str, dict[str, float]]()
    for load in QUICK if given.quick else LOADS:
        sessions = load.sessions()
        for link in load.links:
            label = f"{load.name}, {load.replicas} x {load.costs.name}, {load.rate:g} requests a second each"
            label += f", {link / 1e9:g} GB/s"
            yield f"\n{label}"
            yield "{:14} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>7}".format("", *names)
            for prefill, every in KINDS:
                one = measured(load, link, prefill, sessions, every=every)
                kind = f"{prefill}:{load.replicas - prefill}" if prefill else "without roles"
                kind += ", every" if every else ""
                found[f"{label}: {kind}"] = one
                yield (
                    f"{kind:14} {one['computed']:8.3f} {one['handed']:7.2f} {one['handing']:7.3f} {one['first']:7.3f} "
                    f"{one['first_p99']:7.2f} {1e3 * one['token']:8.1f} {1e3 * one['token_p99']:8.1f} "
                    f"{one['whole']:7.2f}"
                )
    return found
