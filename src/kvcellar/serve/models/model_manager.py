"""model_manager: the models of one server. Loads the one that a request names, and unloads those that are not used.

`find` and `take` are called in a thread, because they may read files; a request that gets no lease there waits for one
with `lease`, on the event loop. Every model is loaded, and every engine closed, on a thread of its own. A model whose
engine is there, because others use it, is added to that. What has to be done is decided by `step`, on the event loop.

Always true:
  * the bytes of all engines, counted from before their load until after they are closed, are at most the limit, and
    there are at most as many engines as the limits allow. An engine that is there counts with what it can use of its
    cache. The bytes of an adapter are counted from before it is read until it is freed;
  * an engine is closed, and a model removed from it, only without a lease; no lease is given on a model that is being
    loaded or closed;
  * requests wait for models in order of arrival. While the first of these models waits for memory, the models that have
    to leave for it get no new leases, so it waits for the requests that run now and for no later ones;
  * every request that waits for a model gets a lease or an error, or leaves;
  * there is at most one engine of a key, and at most one load and one model on an engine for a name and its files.

What leaves so that a model fits are engines, and adapters of engines that stay.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvcellar.errors import BadRequest, EngineClosed, ModelNotFound, ModelRefused, Overloaded
from kvcellar.frontend.conversations import Conversations
from kvcellar.frontend.documents import Documents
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.serve.http.api_errors import ApiError, model_refused
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.http.lifecycle import Startup
from kvcellar.serve.models.failed_loads import forget, log_failure, refused
from kvcellar.serve.models.loaded_model import FOREVER, LoadedEngine, LoadedModel, Stage
from kvcellar.serve.models.model_spec import LibraryModels, ModelKey, ModelSpec, not_served

log = logging.getLogger("kvcellar.serve")

Job = Callable[[], None]  # loads or closes, on a thread of its own
LONGEST_TIMER = 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all models together. `max_bytes` caps weights, caches, drafts and adapters."""

    max_bytes: int
    max_models: int = 3  # engines: models that share one count once
    max_waiting: int = 512  # requests that wait for a model
    wait_seconds: float = 300.0  # until a request that waits for the memory of others is refused
    keep_alive: float = 300.0  # seconds without requests until a model is unloaded
    device: str = "cpu"  # kind of the device whose bytes these are


class Lease(AbstractContextManager["Lease"]):
    """The use of a model by one request. While it is held, the model stays loaded."""

    def __init__(self, model: LoadedModel, release: "Callable[[Lease], None]") -> None:
        assert model.engine is not None
        self.model, self.engine, self.held, self._release = model, model.engine, True, release

    def release(self) -> None:
        """May be called from any thread, and again."""
        self._release(self)

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False, slots=True)
class _Wanted:
    """A model that requests wait for. Each has a future, which the event loop alone uses."""

    spec: ModelSpec
    keep_alive: float | None = None
    waiters: list[asyncio.Future[Lease]] = field(default_factory=list[asyncio.Future[Lease]])
    model: LoadedModel | None = None  # None: its load has not begun


class ModelManager:
    """Close it after the server. `unload` closes an engine, and `free` frees the memory of engines that are closed and
    not referred to; both are called on a thread of their own. `startup` loads the models that stay, and `catalogue` has
    those that are loaded on demand; None: there are none. What has to be remembered is kept in `documents`; None: in
    memory."""

    def __init__(
        self,
        catalogue: LibraryModels | None,
        limits: Limits,
        *,
        unload: Callable[[Any], None],
        free: Callable[[], object] = gc.collect,
        startup: Startup | None = None,
        documents: Documents | None = None,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Job], None] | None = None,
    ) -> None:
        self.limits, self._catalogue, self._unload, self._free = limits, catalogue, unload, free
        self._clock, self._spawn = clock, spawn or self._thread
        self.startup, self.documents = startup or Startup(), documents or Documents()
        self._lock = threading.RLock()  # held for what follows
        self._engines: dict[str, LoadedEngine] = {}  # by key
        self._wanted: dict[ModelKey, _Wanted] = {}  # those whose load has not begun in order of arrival
        self._fixed: Mapping[str, LoadedModel] = {}  # by name, the default first; replaced, never changed
        self._conversations: Conversations | None = None  # of the first engine: all others use its archive
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._threads: set[threading.Thread] = set()
        self._unloading: set[Callable[[LoadedEngine], None]] = set()

    @contextmanager
    def on_unload(self, tell: Callable[[LoadedEngine], None]) -> Iterator[None]:
        """Meanwhile `tell` is called with each engine that is about to be closed, on the thread that does so."""
        self._unloading.add(tell)
        try:
            yield
        finally:
            self._unloading.remove(tell)

    # -- models that stay -----------------------------------------------------------------------------------------

    def open(self, spec: ModelSpec) -> Engine:
        """Load a model that stays, before the first request; the first one is the default. Raises what its load raises,
        and `BadRequest` if it does not fit."""
        if spec.name in self._fixed:
            raise BadRequest(f"two models have the name {spec.name}; give one of them another", "models")
        with self._lock:
            self._check_fits(spec)
            model = self._reserve(spec, FOREVER)
            model.fixed = True
        try:
            engine = self._join(model)
        except BaseException:
            self._drop(model)
            raise
        model.spec = replace(spec, context=engine.model.context)
        self._fixed = {**self._fixed, spec.name: model}
        return engine

    def name_adapter(self, name: str, model: str | None = None) -> None:
        """Serve a model that stays, or the default one, with an adapter of its engine, as a model of the adapter's
        name. Raises `BadRequest` if another model has the name."""
        if name in self._fixed:
            raise BadRequest(
                f"a model and an adapter both have the name {printable(repr(name))}; rename one", "adapters"
            )
        join = partial(NamedEngine, adapter=name)
        base = self._default if model is None else self._fixed[model]
        self.open(replace(base.spec, name=name, id="", own=0, join=join))  # the library has no model of it

    @property
    def names(self) -> list[str]:
        """Of the models that stay, the default first."""
        return list(self._fixed)

    @property
    def _default(self) -> LoadedModel:
        return next(iter(self._fixed.values()))

    @property
    def default(self) -> NamedEngine:
        """The engine of the default model."""
        assert self._default.engine is not None, "it stays until the end"
        return self._default.engine

    @property
    def healthy(self) -> bool:
        """Whether the engines that stay are."""
        engines = [one.on.engine for one in self._fixed.values()]
        return all(engine is not None and engine.healthy for engine in engines)

    @property
    def starting(self) -> bool:
        """Whether one of these engines has died and is started again."""
        engines = [one.on.engine for one in self._fixed.values()]
        return any(engine is not None and engine.starting for engine in engines)

    def fixed(self, name: str) -> bool:
        """Whether the model of a name stays."""
        return name in self._fixed

    # -- in a thread ----------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> ModelSpec:
        """The model of a name, or the default. Raises `ModelNotFound`, and `ApiError` if it is damaged."""
        if name is None:
            return self._default.spec
        if (fixed := self._fixed.get(name)) is not None:
            return fixed.spec
        if self._catalogue is None:
            raise not_served(name)
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
        return name is None or name in self._fixed or self._catalogue is None or self._catalogue.known(name)

    def all(self) -> list[ModelSpec]:
        """What can be served, by name, the default first."""
        others = [] if self._catalogue is None else self._catalogue.all()
        fixed = self._fixed
        return [*(one.spec for one in fixed.values()), *(one for one in others if one.name not in fixed)]

    @property
    def longest(self) -> int:
        """The most tokens of the context of any model."""
        others = 0 if self._catalogue is None else self._catalogue.longest
        return max([others, *(one.spec.context or 0 for one in self._fixed.values())])

    def loaded(self, name: str | None) -> Lease:
        """A lease on a model that must be loaded. Raises `ModelNotFound` and `ApiError`."""
        if (lease := self.take(spec := self.find(name))) is None:
            message = f"the model {spec.name} is not loaded; send it a request first"
            raise ApiError(409, message, "model", "model_not_loaded")
        return lease

    def take(self, spec: ModelSpec, keep_alive: float | None = None) -> Lease | None:
        """A lease on a model that is loaded; None if `lease` has to be called. May be called from any thread."""
        with self._lock:
            model, wanted = self._model(spec), self._wanted.get(spec.model_key)
            if model is None or not model.ready or model.leaving or model.on.failed:
                return None
            if wanted is not None and wanted.model is None:
                return None  # requests that arrive later are queued behind those that wait
            if keep_alive is not None:
                model.keep_alive = keep_alive
            return self._lease(model)

    # -- on the event loop ----------------------------------------------------------------------------------------

    async def lease(self, spec: ModelSpec, keep_alive: float | None = None) -> Lease:
        """Waits until the model is loaded. Raises `ApiError` if it cannot be, `Overloaded`, and `EngineClosed`."""
        self._loop = asyncio.get_running_loop()
        if (lease := self.take(spec, keep_alive)) is not None:
            return lease
        if self._closed:
            raise EngineClosed("the server is closed")
        waiter: asyncio.Future[Lease] = self._loop.create_future()
        wanted = self._enter(spec, keep_alive, waiter)
        try:
            self.step()
            await asyncio.wait((waiter,), timeout=self.limits.wait_seconds)
            if not waiter.done() and wanted.model is None:
                seconds = f"{self.limits.wait_seconds:g} seconds"
                raise Overloaded(f"other models have used the memory for this one for {seconds}; try again later")
            return await waiter
        except BaseException:
            self._leave(wanted, waiter)
            raise

    def stays(self, spec: ModelSpec) -> bool:
        """Whether it is never unloaded."""
        fixed = self._fixed.get(spec.name)
        return fixed is not None and fixed.key == spec.model_key

    def unload(self, name: str) -> bool:
        """Unload the models of a name when their requests have ended, those too that wait for a load; requests that
        arrive meanwhile use it. False if there is none that is loaded or waited for, or it stays."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            found: list[_Wanted | LoadedModel] = [one for one in self._wanted.values() if one.spec.name == name]
            found += [one for one in self._all_models() if one.spec.name == name and not one.fixed and not one.closing]
            for one in found:
                one.keep_alive = 0.0
        self.step()
        return bool(found)

    def seconds_left(self, model: LoadedModel) -> float:
        """Until it is unloaded, if no request comes, or its running ones end now."""
        return max(0.0, model.keep_alive - (0.0 if model.leases else self._clock() - model.used))

    def step(self) -> None:
        """Do what is due: give leases, begin loads, close engines."""
        with self._lock:
            for wanted in [one for one in self._wanted.values() if one.model is not None and one.model.ready]:
                self._grant(wanted)
            jobs = self._due()
            for wanted in [one for one in self._wanted.values() if one.model is None]:
                if not self._begun(wanted, jobs):
                    break
            due = min((one.expires for one in self._all_models()), default=FOREVER)
        for job in jobs:
            self._spawn(job)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < FOREVER and self._loop is not None:
            self._timer = self._loop.call_later(min(max(0.0, due - self._clock()), LONGEST_TIMER), self.step)

    def _enter(self, spec: ModelSpec, keep_alive: float | None, waiter: asyncio.Future[Lease]) -> _Wanted:
        """Wait for a model. Raises `Overloaded`, and `BadRequest` for one that can never be loaded here."""
        with self._lock:
            if sum(len(one.waiters) for one in self._wanted.values()) >= self.limits.max_waiting:
                raise Overloaded(f"{self.limits.max_waiting} requests are waiting for models; try again later")
            if (wanted := self._wanted.get(spec.model_key)) is None:
                if self._model(spec) is None:
                    self._check_fits(spec)
                wanted = self._wanted[spec.model_key] = _Wanted(spec)
            wanted.waiters.append(waiter)
            if keep_alive is not None:
                wanted.keep_alive = keep_alive
            return wanted

    def _leave(self, wanted: _Wanted, waiter: asyncio.Future[Lease]) -> None:
        """A request does not wait any more. If it has got a lease at this moment, that is returned. A model that no
        request waits for, and whose load has not begun, is not loaded."""
        if waiter.done() and not waiter.cancelled():
            if waiter.exception() is None:
                waiter.result().release()
            return
        with self._lock:
            if waiter in wanted.waiters:
                wanted.waiters.remove(waiter)
            if not wanted.waiters and wanted.model is None and self._wanted.get(wanted.spec.model_key) is wanted:
                del self._wanted[wanted.spec.model_key]
        self.step()

    def _refuse(self, wanted: _Wanted, error: Exception) -> None:
        """The load of a model has failed: that is the error of the requests that wait for it."""
        for waiter in wanted.waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.step()

    # -- while the lock is held -------------------------------------------------------------------------------------

    def _model(self, spec: ModelSpec) -> LoadedModel | None:
        engine = self._engines.get(spec.key)
        return None if engine is None else engine.models.get(spec.model_key)

    def _all_models(self) -> list[LoadedModel]:
        return [model for engine in self._engines.values() for model in engine.models.values()]

    def _lease(self, model: LoadedModel) -> Lease:
        model.leases += 1
        model.used = self._clock()
        return Lease(model, self._give_back)

    def _grant(self, wanted: _Wanted) -> None:
        """The model is there: each request that waits for it gets a lease."""
        del self._wanted[wanted.spec.model_key]
        model = wanted.model
        assert model is not None
        model.used = self._clock()
        if wanted.keep_alive is not None:
            model.keep_alive = wanted.keep_alive
        for waiter in wanted.waiters:
            if not waiter.done():
                waiter.set_result(self._lease(model))

    def _due(self) -> list[Job]:
        """Close engines and remove models that were not used for long enough."""
        jobs, now = list[Job](), self._clock()
        for engine in self._engines.values():
            if engine.due(now):
                self._end(engine, jobs)
            for model in engine.models.values():
                if model.expires <= now:
                    self._end(model, jobs)
                model.leaving = False
        return jobs

    def _end(self, one: LoadedEngine | LoadedModel, jobs: list[Job]) -> None:
        one.stage = Stage.CLOSING
        jobs.append(partial(self._close, one) if isinstance(one, LoadedEngine) else partial(self._part, one))

    def _begun(self, wanted: _Wanted, jobs: list[Job]) -> bool:
        """Whether requests for other models that have come later need not wait for this one: it is there, is being
        loaded from now on, or can join when the engine is there."""
        spec = wanted.spec
        engine, model = self._engines.get(spec.key), self._model(spec)
        if engine is not None and engine.stage is Stage.LOADING:
            return True
        if model is not None and model.ready and not model.on.failed:
            wanted.model = model
            self._grant(wanted)
            return True
        if not self._has_room(spec, jobs):
            return False
        wanted.model = self._reserve(spec, self.limits.keep_alive if wanted.keep_alive is None else wanted.keep_alive)
        jobs.append(partial(self._load, wanted))
        return True

    def _reserve(self, spec: ModelSpec, keep_alive: float) -> LoadedModel:
        """The bytes of a model, and of its engine if that is not there, count from now on."""
        engine = self._engines.get(spec.key)
        if engine is None:
            size = min(spec.most, self.limits.max_bytes - self.bytes - spec.own)
            engine = self._engines[spec.key] = LoadedEngine(spec, size)
        for one in self._all_models():
            if one.spec.name == spec.name and not one.fixed:  # what the name was before
                one.keep_alive = 0.0
        model = LoadedModel(spec, engine, keep_alive)
        engine.models = {**engine.models, spec.model_key: model}
        return model

    # -- what fits, while the lock is held ----------------------------------------------------------------------------

    def _check_fits(self, spec: ModelSpec) -> None:
        fixed = [one for one in self._engines.values() if one.fixed]
        shares = any(one.key == spec.key for one in fixed)
        free = self.limits.max_bytes - sum(one.kept for one in fixed)
        need = spec.own if shares else spec.least + spec.own
        if need > free or (len(fixed) >= self.limits.max_models and not shares):
            taken = f"; models that stay loaded take {self.limits.max_bytes - free} of them" if fixed else ""
            raise BadRequest(
                f"the model {spec.name} needs {need} bytes, and this server has "
                f"{self.limits.max_bytes} bytes for at most {self.limits.max_models} models{taken}",
                "model",
                hint="A larger --memory or --max-models of `kvcellar serve` allows more",
            )

    def _has_room(self, spec: ModelSpec, jobs: list[Job]) -> bool:
        """Whether the model can be loaded now. If not, others leave for it, where that helps."""
        engine = keep = self._engines.get(spec.key)
        if (engine is not None and (not engine.ready or engine.failed)) or self._model(spec) is not None:
            return False  # until that is closed
        if engine is not None and not engine.fixed and spec.own > self._most_beside(engine):
            keep = None  # all that is left is in its cache: it has to be loaded again
        self._evict(spec, keep, jobs)
        return engine is keep and self._fits(spec, keep, self.bytes, len(self._engines))

    def _most_beside(self, engine: LoadedEngine) -> int:
        """Bytes that can be free while this engine stays."""
        others = sum(one.kept for one in self._engines.values() if one is not engine)
        return self.limits.max_bytes - others - engine.size

    def _fits(self, spec: ModelSpec, shared: LoadedEngine | None, used: int, engines: int) -> bool:
        """Whether a model does, on the engine `shared` or on one of its own, beside so many bytes and engines."""
        if shared is not None:
            return used + spec.own <= self.limits.max_bytes
        return used + spec.own + spec.least <= self.limits.max_bytes and engines < self.limits.max_models

    def _evict(self, spec: ModelSpec, keep: LoadedEngine | None, jobs: list[Job]) -> None:
        """Close the least recently used idle models until the model fits when all are closed; if that is not enough,
        mark those that have to become idle. The engine `keep` stays."""
        order = sorted((one for one in self._engines.values() if one.ready), key=lambda one: (one.leases > 0, one.used))
        models = [one for engine in order for one in sorted(engine.models.values(), key=lambda one: one.used)]
        gone: set[LoadedModel] = set()
        for busy in (False, True):
            for one in models:
                if self._fits(spec, keep, *self._without(gone, keep)):
                    break
                if one.ready and not one.fixed and (one.leases > 0) is busy:
                    gone.add(one)
        for engine in order:
            mine = [one for one in engine.models.values() if one in gone]
            whole = engine is not keep and all(one in gone or one.closing for one in engine.models.values())
            if whole and engine.idle:
                self._end(engine, jobs)
                continue
            for one in mine:
                if one.size and one.idle:
                    self._end(one, jobs)
                elif whole or one.size:
                    one.leaving = True

    def _without(self, gone: set[LoadedModel], keep: LoadedEngine | None) -> tuple[int, int]:
        """Bytes and engines that are left once these models have left, and what is being closed. An engine leaves with
        all its models, except `keep`."""
        size = engines = 0
        for engine in self._engines.values():
            left = [one for one in engine.models.values() if one not in gone and not one.closing]
            if engine.stage is Stage.CLOSING or (engine.ready and not left and engine is not keep):
                continue
            size += engine.size + sum(one.size for one in left)
            engines += 1
        return size, engines

    # -- on threads of their own ------------------------------------------------------------------------------------

    def _load(self, wanted: _Wanted) -> None:
        spec, model, began = wanted.spec, wanted.model, self._clock()
        assert model is not None
        log.info("loading %s", spec.name)
        try:
            self._join(model)
        except BaseException as failure:  # noqa: BLE001 - logged, and given to the requests that wait; a panic, too
            log_failure(spec, failure)
            error = refused(spec, failure)
            forget(failure)
        else:
            log.info("loaded %s in %.1f s", spec.name, self._clock() - began)
            self._post(self.step)
            return
        if not self._closed:
            self._free()  # what was made before it failed; only then are its bytes given back
        with self._lock:
            del self._wanted[spec.model_key]
            self._drop(model)
        self._post(partial(self._refuse, wanted, error))

    def _join(self, model: LoadedModel) -> Engine:
        """Add a model to its engine, which is loaded if others have not done that."""
        on, spec = model.on, model.spec
        if (engine := on.engine) is None:
            engine = spec.load(on.size - spec.weights, self._going_on)
            with self._lock:
                on.stage, on.engine = Stage.READY, engine
                on.size = min(on.size, spec.weights + engine.cache_bytes)  # what it cannot use of its cache is free
            self._post(self.step)  # others have waited for the engine
        named = spec.join(engine)
        named.model = replace(named.model, name=spec.name)
        with self._lock:
            self._conversations = self._conversations or engine.conversations
            named.share_conversations(self._conversations, on.key)
            model.stage, model.engine = Stage.READY, named
        return engine

    def _drop(self, model: LoadedModel) -> None:
        """It could not be loaded. An engine that is there and has no models is closed by the next step."""
        with self._lock:
            model.on.remove(model)
            if model.on.stage is Stage.LOADING:
                del self._engines[model.on.key]

    def _going_on(self) -> None:
        if self._closed:
            raise EngineClosed("the server was closed while the model was loaded")

    def _close(self, engine: LoadedEngine) -> None:
        for tell in list(self._unloading):
            tell(engine)
        closed, engine.engine = engine.engine, None  # so that its memory is free when it is closed
        for model in engine.models.values():
            model.engine = None
        try:
            self._unload(closed)
        except Exception:  # its memory is taken to be free
            log.exception("the engine of %s could not be closed", engine.spec.name)
        del closed
        if not self._closed:
            self._free()
        with self._lock:
            del self._engines[engine.key]
        if not self._closed:
            log.info("unloaded %s", engine.spec.name)
        self._post(self.step)

    def _part(self, model: LoadedModel) -> None:
        named, model.engine = model.engine, None
        assert named is not None
        try:
            named.close()
        except Exception:  # its memory is taken to be free
            log.exception("%s could not be removed from its engine", model.spec.name)
        with self._lock:
            model.on.remove(model)
        log.info("unloaded %s", model.spec.name)
        self._post(self.step)

    # -- from any thread --------------------------------------------------------------------------------------------

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            held, lease.held = lease.held, False
            if held:
                lease.model.leases -= 1
                lease.model.used = self._clock()
        if held and not lease.model.fixed:
            self._post(self.step)

    def _thread(self, job: Job) -> None:
        def run() -> None:
            try:
                job()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="kvcellar-models")
        self._threads.add(thread)
        thread.start()

    def _post(self, call: Callable[[], None]) -> None:
        """Call it on the event loop. Nothing waits there once the loop is closed."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(one.bytes for one in self._engines.values())

    def engines(self) -> list[LoadedEngine]:
        with self._lock:
            return list(self._engines.values())

    def models(self) -> list[LoadedModel]:
        """The models that can be used."""
        with self._lock:
            return [one for one in self._all_models() if one.ready]

    def close(self) -> None:
        """After the event loop has ended: waits for loads that are running, and closes all engines, whether they have
        leases or not."""
        self._closed = True
        with self._lock:
            self._wanted = {key: one for key, one in self._wanted.items() if one.model is not None}
        for thread in list(self._threads):
            thread.join()
        for engine in self.engines():
            if engine.ready:
                engine.stage = Stage.CLOSING
                self._close(engine)

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert self.bytes <= self.limits.max_bytes, f"{self.bytes} bytes of {self.limits.max_bytes}"
            assert len(self._engines) <= self.limits.max_models
            for key, engine in self._engines.items():
                assert engine.key == key
                assert engine.stage is not Stage.LOADING or engine.size >= engine.spec.least
                assert (engine.engine is not None) == engine.ready or engine.stage is Stage.CLOSING
                for model_key, model in engine.models.items():
                    self._check_model(model_key, model, engine)
            for model_key, wanted in self._wanted.items():
                assert wanted.spec.model_key == model_key
                assert wanted.waiters or wanted.model is not None

    def _check_model(self, key: ModelKey, model: LoadedModel, engine: LoadedEngine) -> None:
        assert model.key == key and model.on is engine and model.spec.key == engine.key
        assert model.leases >= 0
        assert not model.leases or model.ready or self._closed
        assert (model.engine is not None) == (model.stage is Stage.READY) or model.closing
        wanted = self._wanted.get(key)
        assert model.stage is not Stage.LOADING or model.fixed or (wanted is not None and wanted.model is model)
