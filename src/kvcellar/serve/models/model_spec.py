"""model_spec: a model that a server can load, under a name, and the models of the library as that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvcellar.engine.models.weights.weights_bytes import adapter_bytes, bytes_in_memory
from kvcellar.errors import KvcellarError, ModelNotFound, ModelRefused
from kvcellar.frontend.engine import Engine
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.names import LATEST, ModelName
from kvcellar.serve.http.json_text import printable

LONGEST = 2**20  # tokens of a prompt that a body may have, before the model is known
KEPT = 1024  # names whose models are remembered
LEAST_SHARE = 8  # of the cache: with less, a model waits until others are unloaded

# Loads an engine with a cache of so many bytes. Blocks; calls the second argument often, which may raise to end it.
Loader = Callable[[int, Callable[[], None]], Engine]
Join = Callable[[Engine], NamedEngine]  # adds a model to its engine. Blocks; if it raises, nothing has changed
ModelKey = tuple[str, str]  # a name, and the id of its files


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that can be served. Those of one `key` share an engine; it is a digest of what that is made of. `id` is
    the digest of all files of the model, so a name that gets another model is another model of an engine.

    An engine takes `weights` bytes, and a cache of `least_cache` to `cache` bytes; the model adds `own` to it.
    """

    name: str
    key: str
    weights: int  # bytes in memory, those of drafts included
    cache: int
    least_cache: int
    load: Loader = field(compare=False, repr=False)
    context: int | None = None  # most tokens of a sequence; None: not known before it is loaded
    id: str = ""  # of the model in the library; "": it is in none
    own: int = 0  # bytes of its adapter
    directory: Path | None = None  # of its files; None: it was made from none
    join: Join = field(default=NamedEngine, compare=False, repr=False)

    @property
    def model_key(self) -> ModelKey:
        return self.name, self.id

    @property
    def least(self) -> int:
        """Of the engine."""
        return self.weights + self.least_cache

    @property
    def most(self) -> int:
        """Of the engine."""
        return self.weights + self.cache


def not_served(name: str) -> ModelNotFound:
    return ModelNotFound(f"model {printable(repr(name))} not found; /v1/models lists what is served here")


Make = Callable[[str, int, Callable[[], None]], Engine]  # an engine of a name, as `Loader`
OpenVariant = Callable[[Engine, LibraryModel], NamedEngine]  # as `open_variant`


@dataclass(frozen=True, slots=True)
class Caches:
    """Bytes of the cache of an engine: `fixed`, or a share of what the limit leaves beside its weights."""

    max_bytes: int
    share: float
    fixed: int | None = None

    def of(self, weights: int) -> tuple[int, int]:
        """The least bytes of the cache of a model, and the most."""
        if self.fixed is not None:
            return self.fixed, self.fixed
        most = max(0, int(self.share * (self.max_bytes - weights)))
        return most // LEAST_SHARE, most


def listed(name: str) -> str:
    """A name as it is listed."""
    return name.removesuffix(f":{LATEST}")


class LibraryModels:
    """The models of a library that can be served. Thread-safe. Methods read files: not for the event loop."""

    longest = LONGEST

    def __init__(
        self, library: Library, make: Make, variant: OpenVariant, caches: Caches, *, dtype: str = "auto"
    ) -> None:
        """`make` returns an engine without adapters."""
        self._library, self._make, self._variant, self._caches, self._dtype = library, make, variant, caches, dtype
        self._known: dict[str, tuple[float, ModelSpec]] = {}  # by name, with the time of its manifest

    def find(self, name: str) -> ModelSpec:
        """Raises `ModelNotFound`; and `BadRequest` for what cannot be a name."""
        whole = str(ModelName.parse(name))
        try:
            modified = self._library.modified(whole)
        except FileNotFoundError as error:
            raise ModelNotFound(f"the model {name!r} was removed at this moment") from error
        if (known := self._known.get(whole)) is not None and known[0] == modified:
            return known[1]
        made = self._spec(self._library, self._library.resolve(whole))
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[whole] = modified, made
        return made

    def known(self, name: str) -> bool:
        """Whether `find` reads no file, or raises. If not, it may compare all files of the model."""
        try:
            whole = str(ModelName.parse(name))
            return self._known.get(whole, (None,))[0] == self._library.modified(whole)
        except (KvcellarError, OSError):
            return True

    def all(self) -> list[ModelSpec]:
        """By name."""
        found: list[ModelSpec] = []
        for name in self._library.names():
            try:
                found.append(self.find(str(name)))
            except (KvcellarError, OSError):
                continue  # removed meanwhile, or damaged: a request for it gets the reason
        return found

    def _spec(self, library: Library, model: LibraryModel) -> ModelSpec:
        weights = sum(self._bytes(path) for path in (model.directory, model.draft) if path is not None)
        own = sum(adapter_bytes(file.size) for part in model.manifest.adapters for file in part.files)
        least, most = self._caches.of(weights)

        def load(cache: int, going_on: Callable[[], None]) -> Engine:
            engine = self._make(model.name, cache, going_on)
            try:
                _check_current(library, model)
            except BaseException:
                engine.close()
                raise
            return engine

        def join(engine: Engine) -> NamedEngine:
            try:
                return self._variant(engine, model)
            except BaseException:
                _check_current(library, model)  # its files may have been removed
                raise

        about = {"id": model.id, "own": own, "join": join, "directory": model.directory}
        return ModelSpec(listed(model.name), engine_key(model), weights, most, least, load, **about)

    def _bytes(self, directory: Path) -> int:
        return bytes_in_memory(directory, dtype=self._dtype)


def engine_key(model: LibraryModel, **given: object) -> str:
    """Models of one key can share an engine: their weights and draft are the same files, and their engines have the
    same settings. `given`: settings of the command line."""
    parameters = model.manifest.parameters
    created = parameters.get("context"), parameters.get("draft_depth")
    return f"{model.base_id} {created} {sorted((name, value) for name, value in given.items() if value is not None)}"


def _check_current(library: Library, model: LibraryModel) -> None:
    """Raise `ModelRefused` if the name has another model now, and `ModelNotFound`."""
    if library.manifest(model.name).id != model.id:
        raise ModelRefused("it was created again while it was loaded; try again")
