"""adapters: the adapters of an engine, by name: added, replaced and removed while requests run.

Always true:
  * a name has at most one adapter; a request keeps the one that its name had when it was submitted, until it ends;
  * an adapter that was removed or replaced is loaded until no request uses it, and is freed between two steps;
  * what is loaded, and what is being read, takes at most `adapter_bytes`.

What was computed with an adapter is found again by requests with the same weights only: by the digest of these, not by
the name (see `memory/snapshot.py`).
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvcellar.engine.arguments import Places, adapter_directories, adapter_name
from kvcellar.engine.control_replies import AdapterInfo
from kvcellar.engine.core.request import AdapterUse
from kvcellar.engine.models.adapters.adapters import Adapter, read_adapter
from kvcellar.engine.models.guest import Guest
from kvcellar.errors import AdapterRefused, BadRequest, EngineClosed, ModelRefused, first_few, shown

PARAM = "adapter"  # of errors

# Runs a call, which makes the changes that the text names, on the engine's thread between two steps; returns its result
Run = Callable[[Callable[[], Any], str], Any]


@dataclass(eq=False, slots=True)
class _Loaded:
    """An adapter that is loaded; `current`: requests can name it."""

    use: AdapterUse
    adapter: Adapter
    requests: int = 0
    current: bool = False
    freed: threading.Event = field(default_factory=threading.Event)


class Adapters:
    """Of one engine. All methods may be called from any thread but the engine's; `take` and `give` from that, too.
    `AdaptersClient` describes `add`, `remove` and `list`."""

    def __init__(
        self,
        guest: Guest,
        plain: Guest,
        *,
        post: Callable[[Callable[[], None]], None],
        most_bytes: int,
        default: str | None = None,
    ) -> None:
        """`plain` is the guest with K/V stored as computed, in which an adapter is tested. `post` lets the engine's
        thread run a call. `default` is the name of the one that requests have which name none."""
        self._guest, self._plain, self._post, self._most, self.default = guest, plain, post, most_bytes, default
        self._numbers = count(1)
        self._loaded: dict[int, _Loaded] = {}  # by number
        self._named: dict[str, _Loaded] = {}
        self._lock = threading.Lock()  # of the fields above
        self._adding = threading.Lock()  # held while one is added
        self._tested: int | None = None  # that one

    # -- by name ------------------------------------------------------------------------------------------------

    def add(self, name: str, path: Places, run: Run) -> AdapterInfo:
        name, directories = adapter_name(name), adapter_directories(path)
        with self._adding:
            adapter = read_adapter(directories, self._guest.model, most_bytes=lambda: self._most - self.bytes)
            if (vision := self._guest.vision) is not None and (towers := vision.of_towers(adapter.loras)):
                raise AdapterRefused(
                    name,
                    f"it changes {first_few(towers)}, which make features of images, and these are the same for all "
                    f"requests. Let target_modules select layers that text alone goes through",
                )
            try:
                number = self._install(adapter, run)
            except ModelRefused as error:
                raise AdapterRefused(name, str(error)) from error
            with self._lock:
                loaded, before = self._loaded[number], self._named.pop(name, None)
                self._named[name] = loaded
                loaded.use, loaded.current = loaded.use._replace(name=name), True
        self._retire(before)
        return _info(loaded)

    def remove(self, name: str) -> threading.Event:
        """The event is set when the adapter is freed."""
        with self._lock:
            if name not in self._named:
                raise self._unknown(name)
            before = self._named.pop(name)
        self._retire(before)
        return before.freed

    def list(self) -> list[AdapterInfo]:
        with self._lock:
            return [_info(self._named[name]) for name in sorted(self._named)]

    @property
    def bytes(self) -> int:
        """Of all that are loaded, those included that only running requests use."""
        with self._lock:
            return sum(one.adapter.bytes for one in self._loaded.values())

    @property
    def sized(self) -> str:
        """What they take, in words; "" without any."""
        size = self.bytes
        return f"\n  adapters: {size} of {self._most} bytes" if size else ""

    # -- of a request -------------------------------------------------------------------------------------------

    def take(self, name: Any) -> AdapterUse | None:
        """The adapter of a request, which stays loaded until `give`; None: the request has none. Raises
        `BadRequest`."""
        if name is None:
            name = self.default
        if name is None or name == "":
            return None
        with self._lock:
            if not isinstance(name, str) or name not in self._named:
                raise self._unknown(name)
            loaded = self._named[name]
            loaded.requests += 1
            return loaded.use

    def give(self, use: AdapterUse | None) -> None:
        """A request that has taken an adapter is over."""
        if use is None:
            return
        with self._lock:
            loaded = self._loaded[use.number]
            loaded.requests -= 1
            assert loaded.requests >= 0, "an adapter was given back twice"
            unused = not (loaded.current or loaded.requests)
        if unused:
            self._free(loaded)

    def digest(self, name: Any) -> str:
        """Of the adapter that a request of this name would have; "": none. Raises `BadRequest`."""
        use = self.take(name)
        self.give(use)
        return use.digest if use is not None else ""

    def check(self) -> None:
        """Assert what is always true, on the engine's thread."""
        self._guest.adapted.check()
        with self._lock:
            assert self._named.keys() == {one.use.name for one in self._loaded.values() if one.current}
            assert self._guest.adapted.adapters.keys() - {self._tested} == self._loaded.keys() - {self._tested}

    # -- inside -------------------------------------------------------------------------------------------------

    def _unknown(self, name: object) -> BadRequest:
        known = sorted(self._named) or "none"
        return BadRequest(f"there is no adapter {shown(name)}; there are {known}", PARAM)

    def _install(self, adapter: Adapter, run: Run) -> int:
        """Returns its number. What raises leaves nothing of it. It is tested with one forward in each turn of the
        engine's thread, between the steps of others."""
        from kvcellar.engine.models.selftest import check_adapted  # imports transformers

        adapted, number = self._guest.adapted, next(self._numbers)
        placed = adapter.on(self._guest.device, self._guest.dtype)
        self._tested = number
        try:
            run(lambda: adapted.add(number, placed), "loading an adapter")
            test = check_adapted(self._plain, number)
            while run(lambda: next(test, number), "testing an adapter") is None:
                pass
            with self._lock:
                self._loaded[number] = _Loaded(AdapterUse("", number, adapter.digest), placed)
        except BaseException:
            with suppress(EngineClosed):
                run(lambda: adapted.remove(number) if number in adapted.adapters else None, "removing an adapter")
            raise
        finally:
            self._tested = None
        return number

    def _retire(self, before: _Loaded | None) -> None:
        """An adapter has no name any more."""
        if before is None:
            return
        with self._lock:
            before.current = False
            unused = not before.requests
        if unused:
            self._free(before)

    def _free(self, loaded: _Loaded) -> None:
        """Drop the matrices of an adapter, between two steps."""

        def drop() -> None:
            with self._lock:
                found = self._loaded.pop(loaded.use.number, None)
            if found is not None:
                self._guest.adapted.remove(found.use.number)
            loaded.freed.set()

        with suppress(EngineClosed):
            self._post(drop)


def open_adapters(guest: Guest, plain: Guest, given: Mapping[str, Places], **options: Any) -> Adapters:
    """With the adapters of the settings, before the engine runs. `options` are those of `Adapters`. Raises what
    `Adapters.add` raises."""
    adapters = Adapters(guest, plain, **options)
    for name, path in given.items():
        adapters.add(name, path, lambda act, changes: act())
    adapters.digest(None)  # there is one of the default's name
    return adapters


def _info(loaded: _Loaded) -> AdapterInfo:
    use, adapter = loaded.use, loaded.adapter
    return AdapterInfo(use.name, use.digest, adapter.rank, len(adapter.loras), adapter.bytes, loaded.requests)
