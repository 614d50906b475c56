"""Whatever is loaded or checked, transformers builds its networks one at a time, and torch's default dtype stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar.engine.models import hf_globals as module
from kvcellar.engine.models.heads.assistant_head import check_assistant
from kvcellar.engine.models.heads.mtp_head import load_mtp
from kvcellar.engine.models.hf_globals import building, silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize.directory import quantize_directory
from tests.models.assistants import ORDERED, VOCAB, saved
from tests.models.mtp import saved_beside
from tests.zoo import ARCHS


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of networks that are built; those that are built while another thread could build one, too, begin with
    "free"."""
    found: list[str] = []
    original = PreTrainedModel.__init__

    def recorded(self: PreTrainedModel, *args: Any, **more: Any) -> None:
        found.append(type(self).__name__ if module._BUILDING.locked() else f"free {type(self).__name__}")
        original(self, *args, **more)

    monkeypatch.setattr(PreTrainedModel, "__init__", recorded)
    return found


def test_the_default_dtype_is_that_from_before() -> None:
    before = torch.get_default_dtype()
    with building():
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is before
    assert not module._BUILDING.locked()


def test_a_load_builds_its_networks_alone(tmp_path: Path, built: list[str]) -> None:
    with silence_transformers(), building():
        ARCHS["llama"].build().save_pretrained(tmp_path)
    built.clear()
    load(tmp_path, dtype="bfloat16", device="cpu")
    assert built == ["LlamaForCausalLM", "LlamaModel"] * 2  # without weights, and with them
    assert not module._BUILDING.locked()


def test_an_assistant_is_built_alone(tmp_path: Path, built: list[str]) -> None:
    with silence_transformers(), building():
        target = ARCHS["gemma4-e2b"].build(vocab_size=VOCAB)
        saved(tmp_path / "a", "gemma4_assistant", **ORDERED)
    built.clear()
    check_assistant(tmp_path / "a", target)
    quantize_directory(tmp_path / "a", tmp_path / "q", "int8")
    assert built == ["_Assistant", "Gemma4TextModel"] * 2


def test_mtp_layers_are_built_alone(tmp_path: Path, built: list[str]) -> None:
    with building():
        saved_beside(tmp_path, "llama")
    built.clear()
    load_mtp(load(tmp_path, device="cpu").model, tmp_path)
    assert "MtpModel" in built
    assert not [name for name in built if name.startswith("free")]
