"""Model directories that are as small as files can be, and tools that only look at file names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused
from kvcellar.library.create import Created, create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import parse


def files(directory: Path, contents: Mapping[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return directory


def model(directory: Path, seed: int = 0, size: int = 1000) -> Path:
    """A directory with a config, weights and a tokenizer."""
    return files(
        directory,
        {
            "config.json": json.dumps({"model_type": "fake", "seed": seed}).encode(),
            "model.safetensors": bytes([seed % 256]) * size,
            "tokenizer.json": b"{}",
        },
    )


def adapter(directory: Path, seed: int = 0) -> Path:
    return files(directory, {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes([seed]) * 50})


class FakeTools:
    """Quantizes by inverting the bits of weights, and refuses directories by a marker file."""

    def __init__(self, cached: Mapping[str, Path] | None = None) -> None:
        self.cached = dict(cached or {})

    def find(self, name: str) -> Path:
        if name not in self.cached:
            raise ModelNotFound(f"no model {name!r} in the local Hugging Face cache")
        return self.cached[name]

    def kind(self, text: str) -> str:
        if text.lower() not in ("int8", "q8", "int4"):
            raise BadRequest(f"{text!r} is no type; there are int4, int8", "quantize")
        return {"q8": "int8"}.get(text.lower(), text.lower())

    def gguf(self, file: Path, into: Path, *, codes: bool) -> None:
        model(into, len(file.read_bytes()))  # creates the directory

    def quantize(self, source: Path, into: Path, kind: str, *, draft: bool) -> Mapping[str, Any]:
        into.mkdir()
        for file in source.iterdir():
            if file.is_file():
                content = file.read_bytes()
                weights = file.suffix == ".safetensors"
                (into / file.name).write_bytes(bytes(255 - byte for byte in content) if weights else content)
        return {"kind": kind, "draft": draft}

    def check_model(self, directory: Path) -> None:
        if "refused" in json.loads((directory / "config.json").read_bytes()):
            raise ModelRefused("a marked model")

    def check_draft(self, directory: Path, draft: Path) -> None:
        if "other" in json.loads((draft / "config.json").read_bytes()):
            raise ModelRefused("a marked draft")

    def check_adapter(self, directory: Path, adapter: Path) -> None:
        if (adapter / "adapter_config.json").read_bytes() != b"{}":
            raise ModelRefused("a marked adapter")


def made(library: Library, name: str, modelfile: str, *folders: Path, **options: Any) -> Created:
    return create(library, name, parse(modelfile), folders=folders, **{"tools": FakeTools(), **options})


def tree(library: Library) -> dict[str, bytes]:
    """Every file below a library by its path, and every link."""
    return {
        str(path.relative_to(library.root)): path.readlink().as_posix().encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in library.root.rglob("*")
        if path.is_symlink() or path.is_file()
    }
