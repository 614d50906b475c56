"""hosting: makes the host of `kvcellar serve`: its models, their engines on one device thread, and the cap on bytes."""

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from kvcellar.cli.options import given
from kvcellar.cli.progress_line import show_progress
from kvcellar.engine.core.device import DeviceThread
from kvcellar.engine.load.in_library import in_library, located
from kvcellar.engine.load.machine import free_cpu_bytes
from kvcellar.engine.load.settings import OF_ONE_ENGINE, SHARE_OF_FREE, Settings
from kvcellar.engine.models.weights.find import locate
from kvcellar.engine.models.weights.weights_bytes import adapter_bytes, bytes_in_memory
from kvcellar.errors import BadRequest
from kvcellar.frontend.documents import documents_of
from kvcellar.frontend.engine import Engine, import_needed
from kvcellar.frontend.fork_server import starter_for
from kvcellar.frontend.served_engine import open_variant
from kvcellar.library.library import Library
from kvcellar.library.names import EMBEDDED
from kvcellar.places import NoPlace
from kvcellar.places import models as library_directory
from kvcellar.progress import Listener, Progress
from kvcellar.serve.http.lifecycle import Startup
from kvcellar.serve.models.model_manager import Limits, ModelManager
from kvcellar.serve.models.model_spec import Caches, LibraryModels, ModelSpec, engine_key
from kvcellar.worker import own_python

log = logging.getLogger("kvcellar.serve")

MEMORY_SHARE = 0.9  # of the free memory, for all models
OF_ONE_MODEL = ("context", "draft", "draft_depth", "draft_bytes")  # settings for models of the command line only
OF_STORE = ("store", "store_bytes", "store_key", "store_remote", "store_remote_bytes", "tenant_share")
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of drivers that torch may use
FREE_CUDA_BYTES = """
import sys, torch
if torch.cuda.is_available():
    print(torch.cuda.mem_get_info(None if sys.argv[1] == "auto" else sys.argv[1])[0])
"""
NO_FILES = ("ngram", "mtp", "none")  # drafts without weights files of their own


@dataclass(frozen=True, slots=True)
class Hosting:
    """A host, its library, and the engines of the models of the command line, the default first, once they are loaded.

    `load` loads them, and ends with `EngineClosed` when the startup of the host is stopped."""

    host: ModelManager
    library: Library | None
    engines: Sequence[Engine]
    load: Callable[[], None]


@contextmanager
def hosting(
    models: Sequence[str],
    *,
    quiet: bool,
    memory: int | None,
    max_models: int,
    keep_alive: float,
    cache_bytes: int | None,
    engine_process: bool = False,
    **options: Any,
) -> Iterator[Hosting]:
    """What serves the models of the command line, none of which is loaded yet. Closes all engines at the end.
    `engine_process`: each engine has a process of its own, and this one imports no torch."""
    if not engine_process:
        with show_progress(quiet=quiet):
            import_needed()
    kind, free = _device(options["device"])
    max_bytes = int(MEMORY_SHARE * free) if memory is None else memory
    limits = Limits(max_bytes, max(max_models, len(models)), keep_alive=keep_alive, device=kind)
    caches = Caches(max_bytes, min(SHARE_OF_FREE[kind], MEMORY_SHARE / max(1, len(models))), cache_bytes)
    options["adapter"] = None  # adapters are models with names of their own
    named = models or (None,)
    startup = Startup(tuple(map(_shown, named)))
    made = Engines(options, quiet=quiet, max_bytes=max_bytes, process=engine_process, heard=startup.heard)
    library = _library()
    catalogue = library and LibraryModels(library, made.on_demand, open_variant, caches, dtype=options["dtype"])
    documents = documents_of(Settings(**{name: options[name] for name in OF_STORE if options.get(name) is not None}))
    host = ModelManager(
        catalogue, limits, unload=methodcaller("close"), free=_free, startup=startup, documents=documents
    )
    with closing(made), closing(host):

        def load() -> None:
            for at, model in enumerate(named):
                startup.loads(at)
                host.open(_spec(model, catalogue, made, caches))
            for name in options.get("adapters") or ():
                host.name_adapter(name)

        yield Hosting(host, library, made.of_command, load)


class Engines:
    """Makes engines, each in a process of its own, which have one starter, or all on one device thread. `heard` is told
    of models of the command line, while they are loaded."""

    def __init__(
        self, options: Mapping[str, Any], *, quiet: bool, max_bytes: int, process: bool, heard: Listener
    ) -> None:
        self.options, self._quiet, self._max_bytes, self._heard = options, quiet, max_bytes, heard
        self._starter = starter_for(sys.platform) if process else None
        self._thread = None if process else DeviceThread()
        self.of_command: list[Engine] = []

    def close(self) -> None:
        """When all engines are closed."""
        if self._starter is not None:
            self._starter.close()

    def on_demand(self, name: str, cache: int, going_on: Callable[[], None]) -> Engine:
        settings = {key: value for key, value in self.options.items() if key not in (*OF_ONE_MODEL, *OF_ONE_ENGINE)}
        return self._made(name, settings | {"adapters": {}}, cache, lambda _: going_on())

    def _made(self, model: str | None, settings: Mapping[str, Any], cache: int, heard: Listener) -> Engine:
        """Models add adapters to it. The cap of the host is that of their bytes, too."""
        own = given(**{**settings, "cache_bytes": cache, "adapter_bytes": self._max_bytes})
        return Engine(model, progress=heard, thread=self._thread, process=self._starter or False, **own)

    def stays(self, model: str | None, cache: int) -> Engine:
        first = not self.of_command
        settings = {key: value for key, value in self.options.items() if first or key not in OF_ONE_ENGINE}
        with show_progress(quiet=self._quiet) as shown:

            def heard(progress: Progress) -> None:
                self._heard(progress)
                if shown is not None:
                    shown(progress)

            adapters = {"adapters": settings.get("adapters") or {}}
            engine = self._made(model, settings | adapters, cache, heard)
        self.of_command.append(engine)
        return engine


def _shown(model: str | None) -> str:
    """The name of a model without the directories of this machine."""
    if model is None:
        return EMBEDDED
    return Path(model).resolve().name if Path(model).is_dir() else model


def _spec(model: str | None, catalogue: LibraryModels | None, made: Engines, caches: Caches) -> ModelSpec:
    """The model of the library of this name, unless there is a file of the name; else a directory, a name in the local
    Hugging Face cache, or the embedded model. The engine of one of the library is that of models on demand which are
    equal, where the command line sets nothing for it."""

    def load(cache: int, going_on: Callable[[], None]) -> Engine:
        return made.stays(model, cache)

    if (found := in_library(model)) is not None:
        assert catalogue is not None, "the library has the model"
        spec = catalogue.find(found.name)
        spec = replace(spec, key=engine_key(found, **{name: made.options.get(name) for name in OF_ONE_MODEL}))
    else:
        name, path = locate(EMBEDDED if model is None else model)
        weights = bytes_in_memory(path, dtype=made.options["dtype"])
        spec = ModelSpec(name, str(path), weights, 0, 0, load, directory=path)
    weights = spec.weights + _beside(made)
    least, most = caches.of(weights)
    return replace(spec, weights=weights, cache=most, least_cache=least, load=load)


def _beside(made: Engines) -> int:
    """Bytes of what the command line adds to the next of its models: a draft, and adapters to the first one."""
    draft, size = made.options["draft"], 0
    if draft is not None and draft not in NO_FILES:
        size += bytes_in_memory(locate(located(draft))[1], dtype=made.options["dtype"])
    adapters = made.options.get("adapters") or {} if not made.of_command else {}
    files = [file for paths in adapters.values() for path in paths for file in Path(path).glob("*.safetensors")]
    return size + sum(adapter_bytes(file.stat().st_size) for file in files)


def _library() -> Library | None:
    try:
        return Library(library_directory(os.environ))
    except NoPlace as error:
        log.warning("running without a library of models: %s", error)
        return None


def _device(device: str) -> tuple[str, int]:
    """The kind of device that is meant, and its free bytes. Another process asks a GPU, so that this one neither
    imports torch nor takes memory there."""
    if device.startswith("cuda") or (device == "auto" and any(Path(file).exists() for file in GPU_FILES)):
        asked, environment = own_python("-c", FREE_CUDA_BYTES, device)
        none = subprocess.DEVNULL
        found = subprocess.run(asked, env=environment, stdin=none, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip():
            return "cuda", int(found.stdout)
        if device != "auto":
            raise BadRequest(f"device is {device}, and torch cannot use it: {found.stderr[-500:].strip()}", "device")
    return "cpu", free_cpu_bytes()


def _free() -> None:
    """Free what engines that were closed had: they are in cycles."""
    gc.collect()
    torch = sys.modules.get("torch")  # None: engines have processes of their own
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
