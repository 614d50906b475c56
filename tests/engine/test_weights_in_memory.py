"""An engine holds the weights of a directory once: nothing of the file is mapped, and no plain copy stays beside a
packed one."""

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvcellar import Engine
from kvcellar.bench.network import Size, write
from kvcellar.engine.models.weights import packing
from kvcellar.kernels.packed import Packing, pack

WIDE = Size(1024, 1, 8, 8, 128, 4096, 64, 256)  # nearly all of it are weights of linear layers


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(WIDE, tmp_path)
    return tmp_path


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_plain_weights_are_gone_once_they_are_packed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: dict[str, weakref.ref[Tensor]] = {}

    def watched(model: nn.Module, **how: bool) -> Packing:
        linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        plain.update({name: weakref.ref(module.weight) for name, module in linear.items()})
        return pack(model, **how)

    monkeypatch.setattr(packing, "pack", watched)
    with Engine(directory, dtype="float32", cache_bytes=8 << 20, context=64):
        gc.collect()
        alive = [name for name, weight in plain.items() if weight() is not None]
        assert len(plain) == 8
        assert alive == [], "the output layer is the embedding, too"


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped and resident is read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_takes_as_much_memory_as_its_weights_and_maps_no_file_of_them(directory: Path, dtype: str) -> None:
    gc.collect()
    before = resident()
    with Engine(directory, dtype=dtype, cache_bytes=512 << 20, context=64, max_sequences=4096) as engine:
        stats = engine.stats()
        weights = sum(f.stat().st_size for f in directory.glob("*.safetensors")) * (2 if dtype == "float32" else 1)
        assert weights > 30 << 20
        assert stats.cache_bytes > 256 << 20
        gc.collect()
        assert resident() - before < 1.5 * weights + (24 << 20)
        assert str(directory) not in Path("/proc/self/maps").read_text()
