"""create_tools: what making a model of the library needs of the code that loads models: conversion and checks.

The checks read configs, headers of weights files and tokenizers, and no weights. What imports torch is imported where
it is used: a Modelfile with a mistake is refused before.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcellar.engine.models import embedded
from kvcellar.engine.models.quantize.kinds import GPTQ, canonical_kind
from kvcellar.engine.models.weights.find import cached
from kvcellar.errors import ModelRefused

if TYPE_CHECKING:
    from kvcellar.engine.models.load import Loaded


class CreateTools:
    """The tools of `library/create.py`, as `library/tools.py` describes them."""

    def __init__(self, *, calibrate: bool = False, calibration_text: str | None = None, measure: bool = True) -> None:
        """`calibrate`: codes of 4 bits of a model, not those of a draft, are chosen by GPTQ, on this text or on samples
        of the model. `measure`: the report of a quantisation has the error of predictions, for which both models are
        loaded, one after the other."""
        self._calibrate, self._text = calibrate or calibration_text is not None, calibration_text
        self._measure = measure

    def find(self, name: str) -> Path:
        return embedded.found(name) or cached(name)[1]

    def kind(self, text: str) -> str:
        return canonical_kind(text)

    def gguf(self, file: Path, into: Path, *, codes: bool) -> None:
        from kvcellar.engine.models.gguf.gguf_import import import_gguf

        import_gguf(file, into, codes=codes)

    def quantize(self, source: Path, into: Path, kind: str, *, draft: bool) -> Mapping[str, Any]:
        from kvcellar.engine.models.quantize.directory import quantize_directory

        if draft or not self._calibrate:
            return quantize_directory(source, into, kind, draft=draft, measure=self._measure)
        return quantize_directory(source, into, kind, method=GPTQ, calibrate=self._text, measure=self._measure)

    def check_model(self, directory: Path) -> None:
        _described(directory)

    def check_draft(self, directory: Path, draft: Path) -> None:
        from kvcellar.engine.models.heads.assistant_head import ASSISTANTS, check_assistant
        from kvcellar.engine.models.heads.draft_fit import draft_fit
        from kvcellar.engine.models.heads.heads import kind_of

        kind, why = kind_of(draft)
        if why is not None:
            raise ModelRefused(f"it cannot draft: it is {why}")
        target = replace(_described(directory), name="the target")
        if kind in ASSISTANTS:
            check_assistant(draft, target.model)
        else:
            draft_fit(target, replace(_described(draft), name="it")).require()

    def check_adapter(self, directory: Path, adapter: Path) -> None:
        from kvcellar.engine.models.adapters.adapters import check_adapter

        check_adapter(directory, adapter)


def _described(directory: Path) -> "Loaded":
    """The model of a directory, whose network has shapes and no weights."""
    from kvcellar.engine.models.load import load

    return load(directory, device="cpu", check=lambda _: False)
