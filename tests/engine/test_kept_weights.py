"""Weights that are made from the files for programs, without a network."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvcellar.engine.load.kept_weights import Layers, StoredTensor, Weights, made_weights, word
from kvcellar.engine.recording.kept import Damaged


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(32, 32)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_an_empty_tensor_keeps_its_type(path: Path, dtype: torch.dtype) -> None:
    one = StoredTensor(word(dtype), None, (0, 3))
    (made,) = made_weights(Weights({"a.b": one}, [], {}), path, packs=False)[0].parameters()
    assert (made.dtype, made.shape) == (dtype, (0, 3))


def test_experts_that_have_no_codes_are_named(path: Path) -> None:
    layers = Layers("experts", "float32", (("w",), ("w",)), "auto")
    with pytest.raises(Damaged, match=r"w has no codes: it is not stored quantised"):
        made_weights(Weights({}, [], {"mlp.experts": layers}), path, packs=False)
