"""Loop, scheduler, manager, store and memory together, in virtual time: games with a store whose reads end late, fail,
find nothing any more, or never end. In every game all requests end as they should, no step lacks memory, and the engine
never sleeps while something waits that nothing will wake it for.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest

from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.layout import Layout
from kvcellar.memory.tiers.host import HostTier
from kvcellar.memory.tiers.tier import Loaded, Take, fresh
from tests.engine.world import Ask, World

CONTEXT = 260
LAYOUTS: list[dict[str, Layout]] = [
    {"causal": Causal()},
    {"sliding": Sliding(24)},
    {"causal": Causal(), "sliding": Sliding(9)},
    {"chunked": Chunked(32), "causal": Causal()},
]
GAMES = 40
STATES = {False: 60, True: 5000}  # of each layout


class Flaky(HostTier):
    """Host memory that loses entries and fails to read some."""

    rng: Random

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        return None if self.rng.random() < 0.1 else super().get(key, take)


@dataclass
class Game:
    """A world with a store, requests, and what happens meanwhile: reads that end, entries that are lost, a cache that
    is cleared."""

    seed: int
    world: World = field(init=False)
    asks: list[Ask] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = Random(self.seed)
        layouts = rng.choice(LAYOUTS)
        fit = rng.randint(70, 150)  # tokens of the longest prompt
        scarce = rng.random() < 0.5
        cells = {
            name: layout.most_cells(fit + 1, 1) + (rng.randint(0, 80) if scarce else rng.randint(200, 900))
            for name, layout in layouts.items()
        }
        self.tier = Flaky(rng.choice([1 << 14, 1 << 20]))
        self.tier.rng = rng
        sequences = rng.randint(1, 8)
        drafts = Random(rng.randint(0, 99)) if rng.random() < 0.3 else None
        self.world = World(
            layouts,
            cells,
            context=CONTEXT,
            max_sequences=sequences,
            step_tokens=rng.choice([8, 64, 512]),
            drafts=drafts,
            tier=self.tier,
        )
        self.asks = [self._ask(fit, sequences) for _ in range(rng.randint(2, 16))]

    def _ask(self, fit: int, sequences: int) -> Ask:
        rng = self.rng
        owner = rng.choice(["", "a", "b"])
        return Ask(
            at=rng.choice([0, rng.randint(0, 60), rng.randint(0, 400)]),
            prompt=rng.randint(1, fit) if rng.random() < 0.3 else rng.randint(65, fit),
            max_tokens=rng.randint(1, 40),
            n=1 if rng.random() < 0.6 else rng.randint(1, 2 * sequences),
            cancel=rng.choice([None, None, rng.randint(0, 500)]),
            family=rng.choice([None, 0, 1, 1, 2]),
            owner=owner,
            weight={"": 1.0, "a": 2.0, "b": 1.0}[owner],
        )

    def meanwhile(self) -> None:
        rng, world = self.rng, self.world
        for _ in range(rng.choice([0, 0, 1, 3])):
            if jobs := world.jobs():
                world.read(rng.choice(jobs))
        if rng.random() < 0.02:
            world.loop.post(world.manager.clear_cache)
        if rng.random() < 0.02 and (entries := self.tier.entries()):
            self.tier.remove([rng.choice(entries).snapshot.key])
        if rng.random() < 0.02:
            world.now += rng.choice([0.1, 3.0, 20.0])  # a read takes too long

    def play(self) -> None:
        self.world.play(self.asks, self.meanwhile)
        for number, ask in enumerate(self.asks):
            heard = self.world.heard[number]
            assert heard.over
            assert ask.cancel is not None or set(heard.reasons) == set(range(ask.n))
            for choice, reason in heard.reasons.items():
                assert reason == "cancelled" or heard.tokens(choice) <= ask.max_tokens


@pytest.mark.parametrize("batch", range(4))
def test_with_a_store_no_step_lacks_memory_and_nothing_waits_for_nothing(batch: int) -> None:
    restored = 0
    for seed in range(batch, GAMES, 4):
        game = Game(seed)
        game.play()
        assert game.world.store is not None
        restored += game.world.store.restores.restored
    assert restored > 100, "the games read something back"


class Scripted(HostTier):
    """Host memory of which the next reads fail, as many as it is told."""

    fails = 0

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        if self.fails:
            self.fails -= 1
            return None
        return super().get(key, take)


class Small:
    """A small world, in which what may happen next is a list of actions: a turn of the engine, a job of a thread of the
    store, a request that arrives or is cancelled, an entry that is lost, a read that fails, and time that passes.

    It begins with one answer that is stored, and with a memory that has been cleared."""

    ASKS = (
        Ask(at=0, prompt=90, max_tokens=2, family=1),
        Ask(at=0, prompt=70, max_tokens=2, n=2, family=1),
        Ask(at=0, prompt=66, max_tokens=1, owner="a"),
    )

    def __init__(self, layouts: dict[str, Layout]) -> None:
        cells = {name: layout.most_cells(94, 1) + 30 for name, layout in layouts.items()}
        self.tier = Scripted(1 << 20)
        self.world = World(layouts, cells, context=100, max_sequences=2, step_tokens=64, tier=self.tier)
        self.world.submit(-1, Ask(at=0, prompt=90, max_tokens=1, family=1))
        self.drain()
        self.world.loop.post(self.world.manager.clear_cache)
        self.drain()
        self.arrived = 0
        self.left = {"lose", "fail", "late", "cancel 0", "cancel 1"}  # each happens once at most

    def actions(self) -> list[str]:
        world = self.world
        found = [f"job {at}" for at in range(len(world.jobs()))]
        if world.device.awake or world.now >= world.device.until:
            found.append("turn")
        if self.arrived < len(self.ASKS):
            found.append("arrive")
        alive = {f"cancel {at}" for at in range(self.arrived) if not world.heard[at].over}
        always = {"lose", "fail", "late"} if self.arrived else set[str]()
        return found + sorted(self.left & (alive | always))

    def act(self, action: str) -> None:
        world = self.world
        self.left.discard(action)
        match action.split():
            case ["turn"]:
                world.wake()
            case ["job", at]:
                world.read(world.jobs()[int(at)])
            case ["arrive"]:
                world.submit(self.arrived, self.ASKS[self.arrived])
                self.arrived += 1
            case ["cancel", at]:
                world.loop.cancel(world.requests[int(at)].number)
            case ["lose"]:
                self.tier.remove([entry.snapshot.key for entry in self.tier.entries()][:1])
            case ["fail"]:
                self.tier.fails += 1
            case _:
                world.now += 10.0  # more than a read may take

    def state(self) -> Hashable:
        """What decides how the game goes on, time apart."""
        world, store = self.world, self.world.store
        assert store is not None
        completions = [
            (one.key, one.status, one.computed, len(one.tokens))
            for request in world.requests.values()
            for one in request.completions
        ]
        fetches = [
            (one.key, fetch.done, len(fetch.reads), len(fetch.chain), fetch.node is None)
            for one in world.manager._waiting
            if (fetch := world.manager.cache.fetches.get(one.key)) is not None
        ]
        lanes = [(len(lane._readings), len(lane._jobs), lane._notes) for lane in store.transfers._lanes]
        rest = world.device.awake, world.device.until < inf, len(world.loop._inbox), self.tier.fails
        memory = *world.memory.free().values(), len(self.tier.entries()), len(store.transfers._events._jobs)
        return (*completions, *fetches, *lanes, *rest, *memory, self.arrived, *sorted(self.left))

    def drain(self) -> None:
        """Let everything happen that has begun: the jobs first, then turns. All requests are over then."""
        world = self.world
        for _ in range(500):
            if jobs := world.jobs():
                world.read(jobs[0])
            elif not world.wake():
                break
        assert not [*world.scheduler.waiting, *world.scheduler.running], "it does not come to an end"
        assert all(heard.over for heard in world.heard.values())


def explore(layouts: dict[str, Layout], most: int, rng: Random) -> int:
    """Play every order of actions, long and short ones in turn, up to so many states. From each of them the game comes
    to an end. Returns how many states there were."""
    seen = set[Hashable]()
    paths: list[tuple[str, ...]] = [()]
    while paths and len(seen) < most:
        path = paths.pop(rng.choice([-1, rng.randrange(len(paths))]))
        small = Small(layouts)
        for action in path:
            small.act(action)
        if (state := small.state()) in seen:
            continue
        seen.add(state)
        paths += [(*path, action) for action in small.actions()]
        small.drain()
    return len(seen)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_from_every_order_of_events_all_requests_come_to_an_end(number: int, request: pytest.FixtureRequest) -> None:
    most = STATES[bool(request.config.getoption("--long"))]
    assert explore(LAYOUTS[number], most, Random(number)) == most
