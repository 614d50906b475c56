"""details: what there is to show about a model of the library."""

import json
from pathlib import Path
from typing import Any, cast

from kvcellar.errors import ModelRefused
from kvcellar.library.library import LibraryModel
from kvcellar.library.manifest import Manifest
from kvcellar.library.modelfile import Command, Modelfile
from kvcellar.library.parameters import commands

_MOST_JSON = 64 << 20
_SIZES = {  # what is shown, and the names that configs have for it
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "vocabulary": ("vocab_size",),
}


def modelfile_of(name: str, manifest: Manifest) -> Modelfile:
    """A Modelfile that creates the same model from `name`, whose files, draft and adapters it inherits."""
    texts = {"template": manifest.template, "system": manifest.system, "requires": manifest.requires}
    return Modelfile((
        Command("model", name),
        *commands(manifest.parameters),
        *(Command(key, text) for key, text in texts.items() if text is not None),
        *(Command("message", f"{one.role}: {one.content}") for one in manifest.messages),
        *(Command("license", text) for text in manifest.licenses),
    ))  # fmt: skip


def template_of(model: LibraryModel) -> str | None:
    """TEMPLATE, else the chat template of its files; None if it has none."""
    return template_in(model.directory) if model.manifest.template is None else model.manifest.template


def template_in(directory: Path) -> str | None:
    """The chat template of a directory."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _bounded(file).decode(errors="replace")
    found = _object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [cast("dict[str, Any]", one) for one in cast("list[Any]", found) if isinstance(one, dict)]
        found = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def details(model: LibraryModel) -> dict[str, Any]:
    """What its files say about a model, for JSON."""
    manifest = model.manifest
    found: dict[str, Any] = {
        "name": model.name,
        "id": model.id,
        "base_id": model.base_id,
        "source": manifest.source,
        "directory": str(model.directory),
        "size": manifest.size,
        **shape_of(model.directory),
        "quantized": manifest.quantized,
        "draft": None,
        "adapters": len(manifest.adapters),
        "parameters": dict(manifest.parameters),
        "template": template_of(model),
        "system": manifest.system,
        "messages": [{"role": one.role, "content": one.content} for one in manifest.messages],
        "licenses": list(manifest.licenses),
        "requires": manifest.requires,
        "report": None if manifest.report is None else dict(manifest.report),
        "files": [{"path": path, "digest": f.digest, "size": f.size} for path, f in sorted(manifest.files.items())],
    }
    if model.draft is not None:
        kind = _object(model.draft / "config.json").get("model_type")
        found["draft"] = {"architecture": kind, "quantized": manifest.draft_quantized}
    return found


def shape_of(directory: Path) -> dict[str, Any]:
    """The architecture of the model in a directory, and its sizes; None where its config has none."""
    config = _object(directory / "config.json")
    text = config.get("text_config")
    fields = {**config, **(cast("dict[str, Any]", text) if isinstance(text, dict) else {})}
    kind = config.get("model_type")
    sizes = {name: _size(fields, keys) for name, keys in _SIZES.items()}
    return {"architecture": kind if isinstance(kind, str) else None, **sizes}


def _size(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if type(fields.get(name)) is int), None)


def _bounded(file: Path) -> bytes:
    if file.stat().st_size > _MOST_JSON:
        raise ModelRefused(f"{file.name} has {file.stat().st_size} bytes; {_MOST_JSON} are allowed")
    return file.read_bytes()


def _object(file: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is none."""
    try:
        found = json.loads(_bounded(file))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
