"""Random requests, loads, failures and times: the cap holds, no engine is closed under a request, all requests end."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, KvcellarError, ModelNotFound, ModelRefused, Overloaded
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.models.loaded_model import LoadedModel, Stage
from kvcellar.serve.models.model_manager import Lease, Limits
from tests.serve.fake_host import World, engine_of

SIZES = {"a": (50, 10), "b": (60, 10), "c": (20, 5), "d": (30, 40)}
ADAPTERS = {"a1": ("a", 12), "a2": ("a", 35), "a3": ("a", 0), "c1": ("c", 50)}


def world(**limits: Any) -> World:
    return World(Limits(**({"max_bytes": 140, "max_models": 3, "keep_alive": 100.0} | limits)), SIZES, dict(ADAPTERS))


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play())


async def settle() -> None:
    """Let all tasks and callbacks run."""
    for _ in range(6):
        await asyncio.sleep(0)


async def all_jobs(made: World) -> None:
    chance = random.Random(0)
    while made.jobs:
        made.run_job(chance)
        await settle()


class Requests:
    """Requests that hold their leases until the test ends them."""

    def __init__(self, made: World) -> None:
        self.world, self.tasks = made, list[asyncio.Task[None]]()
        self.leases: list[Lease] = []
        self.errors: list[Exception] = []

    def begin(self, name: str, keep_alive: float | None = None) -> asyncio.Task[None]:
        async def request() -> None:
            try:
                lease = await self.world.host.lease(self.world.host.find(name), keep_alive)
            except (ApiError, KvcellarError) as error:
                self.errors.append(error)
                return
            engine, adapter = engine_of(lease), lease.engine.adapter
            assert adapter in engine.adapters, "it is not there"
            engine.leases += 1
            engine.used[adapter] = engine.used.get(adapter, 0) + 1
            assert not engine.closed
            self.leases.append(lease)

        self.tasks.append(asyncio.create_task(request()))
        return self.tasks[-1]

    def end(self, lease: Lease) -> None:
        self.leases.remove(lease)
        engine_of(lease).leases -= 1
        engine_of(lease).used[lease.engine.adapter] -= 1
        lease.release()
        lease.release()  # has no effect


class Chance:
    """Random events in a world."""

    def __init__(self, seed: int, made: World) -> None:
        self.random, self.world, self.requests = random.Random(seed), made, Requests(made)
        self.events = [self.begin, self.begin, self.work, self.end, self.cancel, self.wait, self.replace]

    def begin(self) -> None:
        keep_alive = self.random.choice([None, None, 0.0, 5.0, float("inf")])
        self.requests.begin(self.random.choice([*"aaabbcd", *ADAPTERS, *ADAPTERS]), keep_alive)

    def work(self) -> None:
        self.world.run_job(self.random)

    def end(self) -> None:
        if self.requests.leases:
            self.requests.end(self.random.choice(self.requests.leases))

    def cancel(self) -> None:
        if self.requests.tasks:
            self.random.choice(self.requests.tasks).cancel()

    def wait(self) -> None:
        self.world.now += self.random.choice([0.5, 10.0, 200.0])
        self.world.host.step()

    def replace(self) -> None:
        name = self.random.choice([*ADAPTERS])
        self.world.versions[name] = self.world.versions.get(name, 0) + 1

    def fail(self) -> None:
        name = self.random.choice([*SIZES, *ADAPTERS])
        if self.world.errors.pop(name, None) is None:
            self.world.errors[name] = ModelRefused("its weights are not numbers")
        for engine in self.world.engines:
            engine.healthy = engine.healthy and self.random.random() < 0.9

    async def happens(self) -> None:
        self.random.choice(self.events)()
        if self.random.random() < 0.7:
            await settle()
        self.world.check()

    async def ends(self) -> None:
        """Requests end until none is left."""
        rounds = 0
        while self.world.jobs or self.requests.leases or not all(task.done() for task in self.requests.tasks):
            rounds += 1
            assert rounds < 10_000, "a request does not end"
            for lease in list(self.requests.leases):
                self.requests.end(lease)
            self.work()
            await settle()
            self.world.check()
        for task in self.requests.tasks:
            assert task.cancelled() or task.exception() is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), models=st.integers(1, 4), failures=st.booleans())
def test_the_cap_holds_and_every_request_ends(seed: int, models: int, failures: bool) -> None:
    async def play() -> None:
        made = world(max_models=models, wait_seconds=1e6)
        chance = Chance(seed, made)
        chance.events += [chance.fail] * failures
        for _ in range(60):
            await chance.happens()
        await chance.ends()
        refused = [error.code for error in chance.requests.errors if isinstance(error, ApiError)]
        assert refused == ["model_refused"] * len(chance.requests.errors)
        made.host.close()
        assert made.bytes == 0 == made.host.bytes

    run(play)


async def used(made: World, requests: Requests, name: str) -> None:
    """One request, from its begin to its end."""
    requests.begin(name)
    await settle()
    await all_jobs(made)
    requests.end(requests.leases[-1])
    await settle()


def loaded(made: World) -> dict[str, list[str]]:
    """Models by the name of their engine."""
    engines = (one for one in made.engines if not one.closed)
    return {one.model.name: sorted(name.partition(" ")[0] for name in one.adapters) for one in engines}


def test_models_of_one_key_share_an_engine_and_leave_one_by_one() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        for name in ("a1", "a", "a3"):
            await used(made, requests, name)
            made.now += 40
        assert (made.loads, loaded(made)) == (1, {"a": ["a", "a1", "a3"]})
        for now, left in ((101, ["a", "a3"]), (141, ["a3"])):
            made.now = now
            made.host.step()
            await all_jobs(made)
            assert loaded(made) == {"a": left}
        await used(made, requests, "a1")
        made.now = 1000.0
        made.host.step()
        await all_jobs(made)
        assert loaded(made) == {}
        assert made.bytes == 0 == made.host.bytes

    run(play)


def test_idle_adapters_leave_first_and_busy_models_get_no_new_leases() -> None:
    async def play() -> None:
        made = world(max_bytes=135)
        requests = Requests(made)
        await used(made, requests, "a1")  # 102 with its engine
        requests.begin("a")
        await settle()
        await all_jobs(made)
        await used(made, requests, "a2")
        assert loaded(made) == {"a": ["a", "a2"]}, "the adapter that was not used has left"
        requests.begin("a1")
        await settle()
        await all_jobs(made)
        assert loaded(made) == {"a": ["a", "a1"]}
        waiting = requests.begin("a2")
        later = requests.begin("a1")
        await settle()
        assert not waiting.done()
        assert not later.done(), "it would keep the bytes of its adapter in use"
        requests.begin("a")
        await settle()
        assert len(requests.leases) == 3, "what needs no bytes goes on"
        assert made.loads == 1

    run(play)


def test_an_engine_whose_cache_has_all_memory_is_loaded_again_for_an_adapter() -> None:
    async def play() -> None:
        made = world(max_bytes=95)
        requests = Requests(made)
        await used(made, requests, "a")
        assert made.bytes == 90
        await used(made, requests, "a2")
        assert (made.loads, loaded(made)) == (2, {"a": ["a2"]})
        assert made.bytes == 95
        await used(made, requests, "a")
        assert (made.loads, loaded(made)) == (2, {"a": ["a", "a2"]})

    run(play)


def test_an_engine_counts_with_what_it_can_use_of_its_cache_and_the_rest_is_for_others() -> None:
    async def play() -> None:
        made = world(max_models=3)
        made.used = {"a": 1, "b": 1, "c": 1}
        requests = Requests(made)
        weights = {name: made.sizes[name][0] for name in "abc"}
        assert sum(weights.values()) + 3 * made.most_cache > made.limits.max_bytes
        for number, name in enumerate("abc", 1):
            await used(made, requests, name)
            made.check()
            assert made.host.bytes == made.bytes == sum([*weights.values()][:number]) + number
        assert loaded(made) == {name: [name] for name in "abc"}

    run(play)


def test_an_adapter_that_is_refused_leaves_nothing_and_its_name_is_replaced() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        await used(made, requests, "a")
        made.errors["a1"] = ModelRefused("it does not fit")
        before = made.host.bytes
        requests.begin("a1")
        await settle()
        await all_jobs(made)
        assert [str(error) for error in requests.errors] == ["the model a1 cannot be loaded: it does not fit"]
        assert (made.host.bytes, loaded(made)) == (before, {"a": ["a"]})
        made.errors = {}
        await used(made, requests, "a1")
        made.versions["a1"] = 1
        await used(made, requests, "a1")
        made.host.step()
        await all_jobs(made)
        assert [one.adapters.keys() for one in made.engines] == [{"a 0", "a1 1"}]

    run(play)


def test_requests_of_one_model_share_one_load() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        for _ in range(3):
            requests.begin("a")
        await settle()
        assert not requests.leases
        await all_jobs(made)
        assert len(requests.leases) == 3
        assert made.loads == 1
        made.host.close()

    run(play)


def test_a_model_is_unloaded_when_it_was_not_used_for_long_enough() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        for name, keep_alive in (("a", None), ("c", float("inf"))):
            requests.begin(name, keep_alive)
            await settle()
            await all_jobs(made)
            requests.end(requests.leases[0])
        for now, left in ((99.0, ["a", "c"]), (101.0, ["c"]), (1e9, ["c"])):
            made.now = now
            made.host.step()
            await all_jobs(made)
            assert [engine.model.name for engine in made.engines if not engine.closed] == left
        assert made.host.unload("c")
        await all_jobs(made)
        assert made.bytes == 0

    run(play)


def test_a_model_leaves_for_another_when_its_requests_have_ended_and_later_ones_wait_behind() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        requests.begin("a")
        await settle()
        await all_jobs(made)
        requests.begin("b")
        later = requests.begin("a")
        await settle()
        assert made.jobs == []
        assert not later.done()
        (running,) = requests.leases
        requests.end(running)
        await settle()
        await all_jobs(made)
        (other,) = requests.leases
        assert engine_of(other).model.name == "b"
        requests.end(other)
        await settle()
        await all_jobs(made)
        assert [engine_of(lease).model.name for lease in requests.leases] == ["a"]

    run(play)


def test_where_the_client_that_waits_has_gone_the_model_stays() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        requests.begin("a")
        await settle()
        await all_jobs(made)
        waiting, later = requests.begin("b"), requests.begin("a")
        await settle()
        waiting.cancel()
        await settle()
        assert later.done()
        assert len(requests.leases) == 2
        assert made.loads == 1

    run(play)


def test_other_models_are_used_while_one_is_loaded() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        requests.begin("a")
        await settle()
        await all_jobs(made)
        requests.begin("c")
        await settle()
        assert len(made.jobs) == 1
        assert made.host.take(made.find("a")) is not None
        assert made.host.take(made.find("c")) is None

    run(play)


def test_a_failed_load_is_an_error_of_those_who_wait_and_is_tried_again() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        made.errors["a"] = ModelRefused("its weights are not numbers")
        requests.begin("a")
        requests.begin("a")
        await settle()
        await all_jobs(made)
        assert [str(error) for error in requests.errors] == [
            "the model a cannot be loaded: its weights are not numbers"
        ] * 2
        made.errors = {}
        requests.begin("a")
        await settle()
        await all_jobs(made)
        assert len(requests.leases) == 1

    run(play)


def test_what_the_machine_refuses_is_tried_again_later() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        made.errors["a"] = MemoryError()
        requests.begin("a")
        await settle()
        await all_jobs(made)
        (error,) = requests.errors
        assert isinstance(error, ApiError)
        assert (error.status, error.message) == (
            503,
            "the model a cannot be loaded now; the log of the server has the reason",
        )
        assert "retry-after" in error.headers

    run(play)


def test_only_a_model_that_is_loaded_can_be_looked_into() -> None:
    async def play() -> None:
        made = world()
        with pytest.raises(ApiError, match="the model a is not loaded; send it a request first"):
            made.host.loaded("a")
        requests = Requests(made)
        requests.begin("a")
        await settle()
        await all_jobs(made)
        with made.host.loaded("a") as lease:
            assert lease.engine.model.name == "a"

    run(play)


def test_what_never_fits_is_refused_at_once() -> None:
    async def play() -> None:
        made = world(max_bytes=59)
        with pytest.raises(BadRequest, match="the model a needs 60 bytes, and this server has 59 bytes"):
            await made.host.lease(made.find("a"))
        with pytest.raises(ModelNotFound):
            made.host.find("e")

    run(play)


def test_too_many_that_wait_are_refused_and_so_is_one_that_waits_too_long() -> None:
    async def play() -> None:
        made = world(max_waiting=1, wait_seconds=0.0)
        requests = Requests(made)
        requests.begin("c")
        await settle()
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            await made.host.lease(made.find("a"))
        await all_jobs(made)
        assert len(requests.leases) == 1, "it does not wait for memory, and so for no longer than its load takes"
        requests.begin("d")
        await settle()
        await all_jobs(made)
        with pytest.raises(Overloaded, match="other models have used the memory for this one for 0 seconds"):
            await made.host.lease(made.find("b"))
        made.check()

    run(play)


def test_a_model_that_stays_is_never_unloaded_and_its_bytes_are_taken() -> None:
    async def play() -> None:
        made = world()
        made.host.open(made.find("b"))
        requests = Requests(made)
        assert made.host.find(None).name == "b"
        requests.begin("c")
        await settle()
        await all_jobs(made)
        assert made.bytes <= made.limits.max_bytes
        with pytest.raises(BadRequest, match="models that stay loaded take 100 of them"):
            await made.host.lease(made.find("a"))
        assert not made.host.unload("b")
        for lease in list(requests.leases):
            requests.end(lease)
        made.now = 1e9
        made.host.step()
        await all_jobs(made)
        assert [engine.model.name for engine in made.engines if not engine.closed] == ["b"]

    run(play)


def test_the_bytes_of_a_failed_load_are_given_back_when_its_half_of_an_engine_is_gone() -> None:
    class Half:
        def __init__(self) -> None:
            self.itself = self

    async def play() -> None:
        made = world()
        made.free = gc.collect
        halves: list[weakref.ref[Half]] = []

        def begin() -> None:
            half = Half()
            halves.append(weakref.ref(half))
            raise ValueError("no such weights")

        def load(cache: int, going_on: Callable[[], None]) -> Any:
            inner = Half()
            halves.append(weakref.ref(inner))
            try:
                begin()
            except ValueError as error:
                raise ModelRefused("its weights are not numbers") from error

        alive: list[int] = []
        drop = made.host._drop

        def noted(model: LoadedModel) -> None:
            alive.append(sum(half() is not None for half in halves))
            drop(model)

        made.host._drop = noted  # type: ignore[method-assign]
        waiting = asyncio.create_task(made.host.lease(replace(made.find("a"), load=load)))
        await settle()
        await all_jobs(made)
        with pytest.raises(ApiError, match="its weights are not numbers"):
            await waiting
        assert len(halves) == 2
        assert alive == [0]
        assert made.host.bytes == 0

    gc.freeze()  # what other tests have left is not collected here
    try:
        run(play)
    finally:
        gc.unfreeze()


def test_a_model_that_is_unloaded_while_it_is_loaded_leaves_after_its_requests() -> None:
    async def play() -> None:
        made = world()
        requests = Requests(made)
        requests.begin("a")
        await settle()
        assert made.host.unload("a")
        assert not made.host.unload("c")
        await all_jobs(made)
        (lease,) = requests.leases
        assert not engine_of(lease).closed
        requests.end(lease)
        await settle()
        await all_jobs(made)
        assert made.bytes == 0 == made.host.bytes

    run(play)


@pytest.mark.parametrize("look", ["fixed", "leases", "used", "bytes", "kept"])
def test_a_model_may_leave_an_engine_while_another_thread_looks_at_its_models(look: str) -> None:
    """A list of the models of an engine looks without the lock of the manager."""
    made = world()

    class Watched(LoadedModel):
        """Another one leaves when it is looked at."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("fixed", "leases", "used", "size", "expires") and leaving:
                engine.remove(leaving.pop())
            return super().__getattribute__(name)

    leaving = list[LoadedModel]()
    made.host.open(made.find("a"))
    (engine,) = made.host.engines()
    others = {one.key: one for one in (Watched(made.find(name), engine, 1.0) for name in ("a1", "a2", "a3"))}
    engine.models = {**others, **engine.models}
    leaving.append(others[made.find("a2").model_key])
    leaving[0].stage = Stage.CLOSING
    getattr(engine, look)
    assert not leaving, "nothing was looked at"
    assert len(engine.models) == 3
