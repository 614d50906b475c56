"""The bytes that weights take are known from the files, and never too few."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvcellar import Engine, ModelRefused
from kvcellar.engine.models.weights.weights_bytes import MARGIN, bytes_in_memory
from kvcellar.kernels.layers import PanelWeight
from tests.zoo import ARCHS


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba", "qwen2-moe"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_no_model_takes_more_than_its_files_say(name: str, dtype: str, tmp_path: Path) -> None:
    ARCHS[name].build().save_pretrained(tmp_path)
    expected = bytes_in_memory(tmp_path, dtype=dtype)
    with Engine(tmp_path, dtype=dtype, device="cpu", cache_bytes=32_000_000, threads=1) as engine:  # type: ignore[arg-type]
        built = engine._built
        network = built.loaded.model
        own = [p for p in network.parameters() if not isinstance(p, PanelWeight)]
        parameters = sum({p.data_ptr(): p.nbytes for p in own}.values())
        packed = built.packing.bytes if built.packing is not None else 0
        assert 0 < parameters + packed + sum(b.nbytes for b in network.buffers()) <= expected
    assert expected <= 3 * (parameters + packed) + MARGIN, "far too many"


def test_packed_integers_count_as_what_they_are_decoded_to(tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 4}}}}}
    write(tmp_path, config, {"a.weight_packed": {"dtype": "I32", "shape": [64, 1000], "data_offsets": [0, 256_000]}})
    plain = tmp_path / "plain"
    plain.mkdir()
    tensors = {"a.weight": {"dtype": "BF16", "shape": [64, 8000], "data_offsets": [0, 1_024_000]}}
    write(plain, {"dtype": "bfloat16"}, tensors)
    assert 2 * 64 * 8000 <= bytes_in_memory(tmp_path) <= bytes_in_memory(plain)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**60),
        b"1234",
        struct.pack("<Q", 4) + b"[1]]",
        struct.pack("<Q", 2) + b"{}"[:1],
        struct.pack("<Q", 12) + b'{"a": "1234"',
        struct.pack("<Q", 41) + b'{"a": {"dtype": "F32", "shape": [1.5, 2]}}'[:41],
    ],
)
def test_a_damaged_file_is_refused_by_name(header: bytes, tmp_path: Path) -> None:
    write(tmp_path, {}, {})
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelRefused, match=r"model\.safetensors is not a whole safetensors file"):
        bytes_in_memory(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="has no safetensors files"):
        bytes_in_memory(tmp_path)


def write(folder: Path, config: dict[str, object], tensors: dict[str, dict[str, Any]]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + sum(about["data_offsets"][1] for about in tensors.values()))
