"""ollama_details: what Ollama's API shows of a model, from its files."""

import logging
from datetime import UTC, datetime
from typing import Any

from kvcellar.errors import KvcellarError, ModelNotFound, ModelRefused
from kvcellar.library.details import details, modelfile_of, template_of
from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.names import LATEST
from kvcellar.library.parameters import listed
from kvcellar.models.weights_bytes import elements_of
from kvcellar.serve.api_errors import model_refused
from kvcellar.serve.protocols import ServedEngine
from kvcellar.serve.servable import Servable, not_served

log = logging.getLogger("kvcellar.serve")

Json = dict[str, Any]
KEPT = 1024  # models whose details are remembered
FORMAT, WHOLE = "safetensors", "unknown"


def whole_name(servable: Servable) -> str:
    """With its tag, as Ollama's clients show it. What is not in the library has none."""
    return servable.name if not servable.id or ":" in servable.name else f"{servable.name}:{LATEST}"


class Details:
    """Called in threads. `library`: None where there is none."""

    def __init__(self, library: Library | None) -> None:
        self._library = library
        self._known: dict[str, Json] = {}  # by the id of a model of the library: what its files say

    def named(self, servable: Servable) -> Json:
        name = whole_name(servable)
        return {"name": name, "model": name, "digest": servable.id, "details": self._of(servable)["details"]}

    def listed(self, servable: Servable) -> Json:
        about = {"modified_at": _time(self._modified(servable)), "size": self._of(servable)["size"]}
        return self.named(servable) | about

    def shown(self, servable: Servable, engine: ServedEngine | None, *, verbose: bool) -> Json:
        if self._library is None or not servable.id:
            context = engine.model.context if engine is not None else None
            info = {"general.architecture": WHOLE, f"{WHOLE}.context_length": context}
            return self._parts(servable, None, engine) | {"model_info": info, "modified_at": _time(0.0)}
        try:
            model = self._library.resolve(servable.name)
        except ModelRefused as error:
            log.error("%s cannot be shown: %s", servable.name, error)
            raise model_refused(servable.name) from error
        except (ModelNotFound, FileNotFoundError) as error:
            raise not_served(servable.name) from error
        info = self._of(servable)["model_info"]
        if verbose:
            info = info | {"kvcellar.report": None if model.manifest.report is None else dict(model.manifest.report)}
        return self._parts(servable, model, engine) | {
            "model_info": info,
            "modified_at": _time(self._modified(servable)),
        }

    def _parts(self, servable: Servable, model: LibraryModel | None, engine: ServedEngine | None) -> Json:
        found: Json = {"details": self._of(servable)["details"], "capabilities": capabilities(engine)}
        if model is None:
            return found | {"modelfile": "", "parameters": "", "template": "", "license": ""}
        manifest = model.manifest
        texts: Json = {
            "modelfile": str(modelfile_of(whole_name(servable), manifest)),
            "parameters": listed(manifest.parameters),
            "template": template_of(model) or "",
            "license": "\n".join(manifest.licenses),
        }
        if manifest.system is not None:
            texts["system"] = manifest.system
        if manifest.messages:
            texts["messages"] = [{"role": one.role, "content": one.content} for one in manifest.messages]
        return found | texts

    def _of(self, servable: Servable) -> Json:
        """`details`, `model_info` and `size` of a model. What was removed or damaged while it is loaded has only its
        size in memory."""
        if self._library is None or not servable.id:
            return _plain(WHOLE, "", servable.weights + servable.own)
        if (known := self._known.get(servable.id)) is not None:
            return known
        try:
            model = self._library.resolve(servable.name)
            made = _described(model)
        except (KvcellarError, OSError):
            return _plain(WHOLE, "", servable.weights + servable.own)
        if model.id != servable.id:  # the name has another model since this one was loaded
            return _plain(WHOLE, "", servable.weights + servable.own)
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[servable.id] = made
        return made

    def _modified(self, servable: Servable) -> float:
        if self._library is None or not servable.id:
            return 0.0
        try:
            return self._library.modified(servable.name)
        except (KvcellarError, OSError):
            return 0.0  # removed while it is loaded


def _plain(family: str, quantized: str, size: int) -> Json:
    about = {"parent_model": "", "format": FORMAT, "family": family, "families": [family], "parameter_size": ""}
    return {"details": about | {"quantization_level": quantized}, "model_info": {}, "size": size}


def _described(model: LibraryModel) -> Json:
    about = details(model)
    family, elements = about["architecture"] or WHOLE, _elements(model)
    found = _plain(family, (about["quantized"] or "").upper(), about["size"])
    found["details"] |= {"parent_model": about["source"], "parameter_size": _counted(elements)}
    found["model_info"] = {
        "general.architecture": family,
        "general.parameter_count": elements,
        f"{family}.context_length": about["context_length"],
        f"{family}.embedding_length": about["embedding_length"],
        f"{family}.block_count": about["layers"],
    }
    return found


def _elements(model: LibraryModel) -> int:
    try:
        return elements_of(model.directory)
    except KvcellarError:
        return 0  # a request for the model gets the reason


def _counted(elements: int) -> str:
    """8030261248 -> 8.0B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if elements >= size:
            return f"{elements / size:.1f}{unit}"
    return str(elements)


def capabilities(engine: ServedEngine | None) -> list[str]:
    """What clients may ask of a model. Without its engine only that it completes texts is known: whether it calls tools
    is found by its chat template, when it is loaded."""
    found = ["completion"]
    if engine is None:
        return found
    known = {
        "tools": engine.replies.refusal is None,
        "thinking": engine.replies.reasons,
        "embedding": engine.embeddings.refused is None,
    }
    return found + [name for name, has in known.items() if has]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
