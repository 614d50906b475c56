"""host: the models of one server. Loads the one that a request names, and unloads those that are not used.

`find` and `take` are called in a thread, because they may read files; a request that gets no lease there waits for one
with `lease`, on the event loop. Every model is loaded, and every engine closed, on a thread of its own. A model whose
engine is there, because others use it, is added to that.

Always true, on the event loop:
  * every request that waits for a model gets a lease or an error, or leaves;
  * what `Residents` promises: a cap on bytes that holds at any moment, and no engine closed under a request.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvcellar.engine.conversations import Conversations
from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.variants import Variant
from kvcellar.errors import BadRequest, EngineClosed, ModelNotFound, ModelRefused, Overloaded
from kvcellar.serve.api_errors import ApiError, model_refused
from kvcellar.serve.failed_loads import forget, log_failure, refused
from kvcellar.serve.json_text import printable
from kvcellar.serve.lease import Lease
from kvcellar.serve.named_engine import NamedEngine
from kvcellar.serve.resident import FOREVER, Limits, Load, Member, Resident, Stage, Work
from kvcellar.serve.residents import Residents
from kvcellar.serve.servable import Catalogue, Servable, as_it_is, not_served
from kvcellar.serve.startup import Startup

log = logging.getLogger("kvcellar.serve")

Spawn = Callable[[Callable[[], None]], None]
LONGEST_TIMER = 3600.0  # seconds


class Host:
    """Close it after the server. `unload` closes an engine, and `free` frees the memory of engines that are closed and
    not referred to; both are called on a thread of their own. `startup` loads the models that stay."""

    def __init__(
        self,
        catalogue: Catalogue,
        limits: Limits,
        *,
        unload: Callable[[Any], None],
        free: Callable[[], object] = gc.collect,
        startup: Startup | None = None,
        clock: Callable[[], float] = time.monotonic,
        spawn: Spawn | None = None,
    ) -> None:
        self.limits, self._catalogue, self._unload, self._free = limits, catalogue, unload, free
        self.residents = Residents(limits)
        self._clock, self._spawn = clock, spawn or self._thread
        self._fixed: Mapping[str, Servable] = {}  # by name, the default first; replaced, never changed
        self._waiting: dict[Load, list[asyncio.Future[Member]]] = {}
        self._conversations: Conversations | None = None  # of the first engine: all others use its archive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._threads: set[threading.Thread] = set()
        self.startup = startup or Startup()
        self._closed = False
        self._unloading: set[Callable[[Resident], None]] = set()

    @contextmanager
    def on_unload(self, tell: Callable[[Resident], None]) -> Iterator[None]:
        """Meanwhile `tell` is called with each model that is about to be unloaded, on the thread that does so."""
        self._unloading.add(tell)
        try:
            yield
        finally:
            self._unloading.remove(tell)

    def open(self, servable: Servable) -> ServedEngine:
        """Load a model that stays, before the first request; the first one is the default. Raises what its load raises,
        and `BadRequest` if it does not fit."""
        if servable.name in self._fixed:
            raise BadRequest(f"two models have the name {servable.name}; give one of them another", "models")
        member = self.residents.reserved(servable)
        try:
            self.residents.add(member, self._joined(member, self._going_on))
        except BaseException:
            self.residents.drop(member)
            raise
        engine = member.resident.engine
        assert engine is not None
        self._fixed = {**self._fixed, servable.name: replace(servable, context=engine.model.context)}
        return engine

    def name_adapter(self, name: str) -> None:
        """Serve the default model with an adapter of its engine, as a model of the adapter's name. Raises `BadRequest`
        if another model has the name."""
        default = self.find(None)
        if name in self._fixed:
            raise BadRequest(
                f"a model and an adapter both have the name {printable(repr(name))}; rename one", "adapters"
            )

        def join(engine: ServedEngine) -> Variant:
            return replace(as_it_is(engine), adapter=name)

        self.open(replace(default, name=name, id="", own=0, join=join))  # the library has no model of it

    @property
    def names(self) -> list[str]:
        """Of the models that stay, the default first."""
        return list(self._fixed)

    # -- in a thread ----------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> Servable:
        """The model of a name, or the default. Raises `ModelNotFound`, and `ApiError` if it is damaged."""
        if name is None:
            return next(iter(self._fixed.values()))
        if (fixed := self._fixed.get(name)) is not None:
            return fixed
        try:
            return self._catalogue.find(name)
        except (ModelNotFound, BadRequest) as error:
            raise not_served(name) from error
        except ModelRefused as error:
            shown = printable(repr(name))
            log.error("%s cannot be loaded: %s", shown, error)
            raise model_refused(shown) from error

    def known(self, name: str | None) -> bool:
        """Whether `find` takes no time. If not, it may compare all files of a model."""
        return name is None or name in self._fixed or self._catalogue.known(name)

    def fixed(self, name: str) -> Servable | None:
        """The model of a name, if it stays."""
        return self._fixed.get(name)

    def all(self) -> list[Servable]:
        """What can be served, by name, the default first."""
        others = [one for one in self._catalogue.all() if one.name not in self._fixed]
        return [*self._fixed.values(), *others]

    @property
    def longest(self) -> int:
        """The most tokens of the context of any model."""
        return max([self._catalogue.longest, *(one.context or 0 for one in self._fixed.values())])

    @property
    def default(self) -> NamedEngine:
        """The engine of the default model, which stays."""
        servable = self.find(None)
        lease = self.take(servable)
        assert lease is not None, "a model that stays is not loaded"
        lease.release()
        return lease.engine

    @property
    def healthy(self) -> bool:
        """Whether the engines that stay, and are loaded, are."""
        return all(engine is not None and engine.healthy for engine in self._staying())

    @property
    def starting(self) -> bool:
        """Whether one of these engines has died and is started again."""
        return any(engine is not None and engine.starting for engine in self._staying())

    def _staying(self) -> list[ServedEngine | None]:
        return [one.engine for one in self.residents.all() if one.fixed and one.stage is not Stage.LOADING]

    def loaded(self, name: str | None) -> Lease:
        """A lease on a model that must be loaded. Raises `ModelNotFound` and `ApiError`."""
        if (lease := self.take(servable := self.find(name))) is None:
            message = f"the model {servable.name} is not loaded; send it a request first"
            raise ApiError(409, message, "model", "model_not_loaded")
        return lease

    def take(self, servable: Servable, keep_alive: float | None = None) -> Lease | None:
        """A lease on a model that is loaded; None if `lease` has to be called. May be called from any thread."""
        member = self.residents.take(servable, self._clock(), keep_alive)
        return None if member is None else self._leased(member)

    # -- on the event loop ----------------------------------------------------------------------------------------

    async def lease(self, servable: Servable, keep_alive: float | None = None) -> Lease:
        """Waits until the model is loaded. Raises `ApiError` if it cannot be, `Overloaded`, and `EngineClosed`."""
        self._loop = asyncio.get_running_loop()
        if (lease := self.take(servable, keep_alive)) is not None:
            return lease
        return self._leased(await self._member(servable, keep_alive))

    def stays(self, servable: Servable) -> bool:
        """Whether it is never unloaded."""
        return any(one.fixed and one.key == servable.member for one in self.residents.members())

    def unload(self, name: str) -> bool:
        """Unload a model when its requests have ended. False if it is neither loaded nor being loaded, or stays."""
        self._loop = asyncio.get_running_loop()
        found = self.residents.unload(name)
        self.step()
        return found

    def seconds_left(self, member: Member) -> float:
        """Until it is unloaded, if no request comes, or its running ones end now."""
        return max(0.0, member.keep_alive - (0.0 if member.leases else self._clock() - member.used))

    def step(self) -> None:
        """Do what is due: begin loads, close engines, give leases."""
        work = self.residents.work(self._clock())
        self._do(work)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self.residents.next_due) < FOREVER and self._loop is not None:
            seconds = min(max(0.0, due - self._clock()), LONGEST_TIMER)
            self._timer = self._loop.call_later(seconds, self.step)

    def _do(self, work: Work) -> None:
        for resident in work.close:
            self._spawn(partial(self._close, resident))
        for member in work.part:
            self._spawn(partial(self._part, member))
        for load in work.begin:
            log.info("loading %s", load.servable.name)
            self._spawn(partial(self._load, load))
        for load in work.ready:
            self._resolve(load)

    async def _member(self, servable: Servable, keep_alive: float | None) -> Member:
        if self._closed:
            raise EngineClosed("the server is closed")
        load = self.residents.enter(servable, keep_alive)
        waiter: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(load, []).append(waiter)
        try:
            self.step()
            await asyncio.wait((waiter,), timeout=self.limits.wait_seconds)
            if not waiter.done() and load.member is None:
                seconds = f"{self.limits.wait_seconds:g} seconds"
                raise Overloaded(f"other models have used the memory for this one for {seconds}; try again later")
            return await waiter
        except BaseException:
            self._leave(load, waiter)
            raise

    def _leave(self, load: Load, waiter: asyncio.Future[Member]) -> None:
        """A request does not wait any more. If it has got a lease at this moment, that is returned."""
        if waiter.done() and not waiter.cancelled():
            if waiter.exception() is None:
                self._release(waiter.result())
            return
        waiters = self._waiting.get(load, [])
        if waiter in waiters:
            waiters.remove(waiter)
        self.residents.leave(load, self._clock())
        self.step()

    def _resolve(self, load: Load, error: Exception | None = None) -> None:
        """The load has ended: those who wait get leases, or the error."""
        for waiter in self._waiting.pop(load, ()):
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                assert load.member is not None
                waiter.set_result(load.member)

    # -- on threads of their own ------------------------------------------------------------------------------------

    def _load(self, load: Load) -> None:
        assert load.member is not None
        servable, error = load.servable, None
        began = self._clock()
        try:
            variant = self._joined(load.member, self._going_on)
        except BaseException as failure:  # noqa: BLE001 - logged, and given to the requests that wait; a panic, too
            log_failure(servable, failure)
            error = refused(servable, failure)
            forget(failure)
        else:
            self.residents.loaded(load, variant, self._clock())
            log.info("loaded %s in %.1f s", servable.name, self._clock() - began)
        if error is not None:
            if not self._closed:
                self._free()  # what was made before it failed; only then are its bytes given back
            self.residents.failed(load)
        self._post(partial(self._resolve, load, error))

    def _joined(self, member: Member, going_on: Callable[[], None]) -> Variant:
        """The model on its engine, which is loaded if others have not done that."""
        resident, servable = member.resident, member.servable
        if resident.engine is None:
            engine = servable.load(resident.size - servable.weights, going_on)
            self.residents.opened(resident, engine)
            self._post(lambda: None)  # others have waited for the engine
        assert resident.engine is not None
        return servable.join(resident.engine)

    def _going_on(self) -> None:
        if self._closed:
            raise EngineClosed("the server was closed while the model was loaded")

    def _close(self, resident: Resident) -> None:
        engine = resident.engine
        assert engine is not None
        for tell in list(self._unloading):
            tell(resident)
        resident.engine = None  # so that its memory is free when it is closed
        for member in resident.members.values():
            member.variant = None
        try:
            self._unload(engine)
        except Exception:  # its memory is taken to be free
            log.exception("the engine of %s could not be closed", resident.servable.name)
        del engine
        if not self._closed:
            self._free()
        self.residents.closed(resident)
        if not self._closed:
            log.info("unloaded %s", resident.servable.name)
        self._post(lambda: None)

    def _part(self, member: Member) -> None:
        variant, member.variant = member.variant, None
        assert variant is not None
        try:
            variant.close()
        except Exception:  # its memory is taken to be free
            log.exception("%s could not be removed from its engine", member.servable.name)
        self.residents.parted(member)
        log.info("unloaded %s", member.servable.name)
        self._post(lambda: None)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _thread(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="kvcellar-models")
        self._threads.add(thread)
        thread.start()

    def _post(self, call: Callable[[], None]) -> None:
        """Call it on the event loop, and then do what is due. Nothing waits there once the loop is closed."""

        def run() -> None:
            call()
            self.step()

        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(run)

    def _leased(self, member: Member) -> Lease:
        engine, variant = member.resident.engine, member.variant
        assert engine is not None and variant is not None
        named = NamedEngine(engine, member.servable.name, self._conversations_of(member, engine), variant)
        return Lease(member, named, self._release)

    def _release(self, member: Member) -> None:
        self.residents.give_back(member, self._clock())
        if not member.fixed:
            self._post(lambda: None)

    def _conversations_of(self, member: Member, engine: ServedEngine) -> Conversations:
        own, name = engine.conversations, member.servable.name
        if self._conversations is None:
            self._conversations = own
        if own is not self._conversations:
            return own.beside(self._conversations, member.resident.key, name)
        return own if name == engine.model.name else own.beside(own, "", name)

    def close(self) -> None:
        """After the event loop has ended: waits for loads that are running, and closes all engines."""
        self._closed = True
        self.residents.close()
        for thread in list(self._threads):
            thread.join()
        for resident in self.residents.work(self._clock()).close:
            self._close(resident)

    def check(self) -> None:
        """Assert what is always true."""
        self.residents.check()
