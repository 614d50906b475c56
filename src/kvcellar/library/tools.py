"""tools: what creating a model needs beside the library. It is passed in, because it loads models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

CASTS = ("bf16", "f16", "f32")  # kinds of `Tools.quantize` whose weights can be quantized again


class Tools(Protocol):
    """Everything here raises `ModelRefused` with the reason; the directories `into` do not exist yet."""

    def find(self, name: str) -> Path:
        """The directory of a model that comes with kvcellar, or is in the local Hugging Face cache. Raises
        `ModelNotFound`."""
        ...

    def kind(self, text: str) -> str:
        """The type of quantization that a name stands for. Raises `BadRequest` with the list of types."""
        ...

    def gguf(self, file: Path, into: Path, *, codes: bool) -> None:
        """Write the model of a GGUF file as a model directory; with `codes`, quantised weights that can stay so do."""
        ...

    def quantize(self, source: Path, into: Path, kind: str, *, draft: bool) -> Mapping[str, Any]:
        """Write a model directory with weights of this type; returns a report of size and measured harm, which is the
        same for the same source."""
        ...

    def check_model(self, directory: Path) -> None:
        """Refuse what cannot be loaded, without reading weights."""
        ...

    def check_draft(self, directory: Path, draft: Path) -> None:
        """Refuse a draft that does not fit the model."""
        ...

    def check_adapter(self, directory: Path, adapter: Path) -> None:
        """Refuse an adapter that does not fit the model."""
        ...
