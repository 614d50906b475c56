"""details: what Ollama's API shows of a model, from its files.

A model of the library has a digest of all its files. That of another one is made of its name, and of the names, sizes
and times of its files: it changes with them, and nothing is read for it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from kvcellar.engine.models.weights.weights_bytes import Weights, weights_of
from kvcellar.errors import KvcellarError, ModelNotFound, ModelRefused
from kvcellar.frontend.capabilities import NOTHING, Capability, capabilities, capabilities_of
from kvcellar.frontend.engine import Engine
from kvcellar.library.details import modelfile_of, shape_of, template_in, template_of
from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.names import LATEST
from kvcellar.library.parameters import listed
from kvcellar.serve.answers import Answer
from kvcellar.serve.http.api_errors import model_refused
from kvcellar.serve.models.model_spec import ModelSpec, not_served

log = logging.getLogger("kvcellar.serve")

KEPT = 1024  # models whose details are remembered
FORMAT, WHOLE = "safetensors", "unknown"


class ModelDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class NamedModel(Answer):
    name: str
    model: str
    digest: str
    details: ModelDetails


class ListedModel(NamedModel):
    modified_at: str
    size: int  # bytes


class ShownMessage(Answer):
    role: str
    content: str


class ShownModel(Answer, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    license: str = ""
    system: str | UnsetType = UNSET
    messages: list[ShownMessage] | UnsetType = UNSET
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: Sequence[Capability]
    modified_at: str


def whole_name(spec: ModelSpec) -> str:
    """With its tag, as Ollama's clients show it. What is not in the library has none."""
    return spec.name if not spec.id or ":" in spec.name else f"{spec.name}:{LATEST}"


@dataclass(frozen=True, slots=True)
class Files:
    """Those of a model. Without a `directory` there are none: it was made by the caller, or was removed or damaged
    while it is loaded."""

    digest: str
    modified: float  # seconds of the wall clock
    size: int  # bytes
    directory: Path | None = None
    model: LibraryModel | None = None  # where it is in the library

    @property
    def template(self) -> str | None:
        """What it was created with; None: that of its directory."""
        return None if self.model is None else self.model.manifest.template


class Details:
    """Called in threads. `library`: None where there is none."""

    def __init__(self, library: Library | None) -> None:
        self._library, self._began = library, time.time()
        self._models: dict[str, LibraryModel] = {}  # by id
        self._described: dict[str, tuple[ModelDetails, dict[str, Any]]] = {}  # by digest, with the `model_info`
        self._capable: dict[str, Sequence[Capability]] = {}  # by digest

    def named(self, spec: ModelSpec) -> NamedModel:
        return self._named(spec, self._files(spec))

    def listed(self, spec: ModelSpec) -> ListedModel:
        files = self._files(spec)
        named = self._named(spec, files)
        return ListedModel(**asdict(named), modified_at=_time(files.modified), size=files.size)

    def shown(self, spec: ModelSpec, engine: Engine | None, *, verbose: bool) -> ShownModel:
        """Raises `ApiError` for a model that is damaged, and `ModelNotFound` for one that was removed."""
        files = self._files(spec) if self._library is None else self._checked(self._library, spec)
        report = None if files.model is None else files.model.manifest.report
        details, info = self._of(files)
        if verbose:
            info = info | {"kvcellar.report": None if report is None else dict(report)}
        return ShownModel(
            **_texts(spec, files),
            details=details,
            capabilities=self._capabilities(files, engine),
            model_info=info,
            modified_at=_time(files.modified),
        )

    def _checked(self, library: Library, spec: ModelSpec) -> Files:
        """Of a model of the library as it is now, whatever was known of it."""
        if not spec.id:
            return self._files(spec)
        try:
            return _in_library(library, spec.name, library.resolve(spec.name))
        except ModelRefused as error:
            log.error("%s cannot be shown: %s", spec.name, error)
            raise model_refused(spec.name) from error
        except (ModelNotFound, FileNotFoundError) as error:
            raise not_served(spec.name) from error

    def _named(self, spec: ModelSpec, files: Files) -> NamedModel:
        name, (details, _) = whole_name(spec), self._of(files)
        return NamedModel(name, name, files.digest, details)

    def _files(self, spec: ModelSpec) -> Files:
        try:
            if spec.id and self._library is not None:
                if spec.id not in self._models:
                    found = self._library.resolve(spec.name)
                    _keep(self._models, found.id, found)
                if spec.id in self._models:  # else the name has another model since this one was loaded
                    return _in_library(self._library, spec.name, self._models[spec.id])
            elif not spec.id and spec.directory is not None:
                return _listing(spec.name, spec.directory)
        except (KvcellarError, OSError):
            pass  # it was removed or damaged while it is loaded
        digest = spec.id or sha256(f"{spec.key}\n{spec.name}".encode()).hexdigest()
        return Files(digest, self._began, spec.weights + spec.own)

    def _of(self, files: Files) -> tuple[ModelDetails, dict[str, Any]]:
        """`details` and `model_info`."""
        if files.digest not in self._described:
            if files.directory is None:
                return _described({}, Weights(0, ""), None)
            described = _described(shape_of(files.directory), _weights(files.directory), files.model)
            _keep(self._described, files.digest, described)
        return self._described[files.digest]

    def _capabilities(self, files: Files, engine: Engine | None) -> Sequence[Capability]:
        """The same, whether the model is loaded or not."""
        if engine is not None:
            return capabilities(engine.replies, sees=engine.sees, embeds=engine.embeddings.refused is None)
        if files.directory is None:
            return NOTHING
        if files.digest not in self._capable:
            _keep(self._capable, files.digest, capabilities_of(files.directory, files.template))
        return self._capable[files.digest]


def _keep(known: dict[str, Any], digest: str, value: Any) -> None:
    if len(known) >= KEPT:
        known.clear()
    known[digest] = value


def _in_library(library: Library, name: str, model: LibraryModel) -> Files:
    return Files(model.id, library.modified(name), model.manifest.size, model.directory, model)


def _listing(name: str, directory: Path) -> Files:
    """The files of a directory that is not in the library."""
    digest, size, modified = sha256(name.encode()), 0, 0.0
    for file in sorted(one for one in directory.rglob("*") if one.is_file()):
        about = file.stat()
        digest.update(f"\n{file.relative_to(directory)} {about.st_size} {about.st_mtime_ns}".encode(errors="replace"))
        size, modified = size + about.st_size, max(modified, about.st_mtime)
    return Files(digest.hexdigest(), modified, size, directory)


def _texts(spec: ModelSpec, files: Files) -> dict[str, Any]:
    if files.model is None:
        return {"template": "" if files.directory is None else template_in(files.directory) or ""}
    manifest = files.model.manifest
    return {
        "modelfile": str(modelfile_of(whole_name(spec), manifest)),
        "parameters": listed(manifest.parameters),
        "template": template_of(files.model) or "",
        "license": "\n".join(manifest.licenses),
        "system": UNSET if manifest.system is None else manifest.system,
        "messages": list(map(ShownMessage.of, manifest.messages)) or UNSET,
    }


def _described(
    shape: Mapping[str, Any], weights: Weights, model: LibraryModel | None
) -> tuple[ModelDetails, dict[str, Any]]:
    family: str = shape.get("architecture") or WHOLE
    source, quantized = ("", None) if model is None else (model.manifest.source, model.manifest.quantized)
    details = ModelDetails(
        parent_model=source,
        format=FORMAT,
        family=family,
        families=[family],
        parameter_size=_counted(weights.elements),
        quantization_level=(quantized or weights.kind).upper(),
    )
    info = {
        "general.architecture": family,
        "general.parameter_count": weights.elements,
        f"{family}.context_length": shape.get("context_length"),
        f"{family}.embedding_length": shape.get("embedding_length"),
        f"{family}.block_count": shape.get("layers"),
    }
    return details, info


def _weights(directory: Path) -> Weights:
    try:
        return weights_of(directory)
    except KvcellarError:
        return Weights(0, "")  # a request for the model gets the reason


def _counted(elements: int) -> str:
    """8030261248 -> 8.0B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if elements >= size:
            return f"{elements / size:.1f}{unit}"
    return str(elements)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
