"""Image processors of which transformers has no variant for Pillow: with torchvision, in forks, and refused without."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest

from kvcellar.errors import ModelRefused
from kvcellar.images.processing import Processor
from kvcellar.images.store import Images

from .files import picture
from .made import write_processor, write_tokenizer
from .packages import PACKAGES, environment

KINDS = {  # the class of processors and that of image processors, its settings, and the placeholder
    "lfm2_vl": ("Lfm2VlProcessor", "Lfm2VlImageProcessor", {}, "<image>"),
    "llama4": ("Llama4Processor", "Llama4ImageProcessor", {"size": {"height": 56, "width": 56}}, "<|patch|>"),
}


def folder_of(kind: str, folder: Path) -> int:
    """The id of its placeholder."""
    named, image, settings, placeholder = KINDS[kind]
    ids = write_tokenizer(folder, {"image_token": "<image>", "patch_token": "<|patch|>"})
    write_processor(folder, kind, {"processor_class": named}, {"image_processor_type": image} | settings)
    return ids[placeholder]


def file_of(seed: int) -> bytes:
    file = BytesIO()
    picture(90, 60, seed=seed).save(file, "PNG")
    return file.getvalue()


@pytest.mark.skipif(not (PACKAGES / "torchvision").is_dir(), reason="torchvision is not there: `make .venv/.dev`")
@pytest.mark.parametrize("kind", ["lfm2_vl", pytest.param("llama4", marks=pytest.mark.slow)])
def test_images_are_prepared_by_forks_that_have_torchvision(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at the same time. Pixels that it makes in bfloat16 are passed in float32."""
    placeholder = folder_of(kind, tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    images = Images(tmp_path, model="m", placeholder=placeholder, most_rows=10_000)
    try:
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda seed: images.process(file_of(seed), "image"), range(3)))
    finally:
        images.close()
    assert len({one.input.digest for one in made}) == 3
    for one in made:
        pixels = next(array for array in one.input.arrays if array.name == "pixel_values")
        assert pixels.dtype == "float32"
        assert one.input.rows > 0


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is here")
@pytest.mark.parametrize("kind", KINDS)
def test_without_torchvision_they_are_refused_with_what_to_install(kind: str, tmp_path: Path) -> None:
    placeholder = folder_of(kind, tmp_path)
    with pytest.raises(ModelRefused, match=r"needs torchvision.*pip install 'kvcellar\[images\]'.*fit torch \d"):
        Processor(tmp_path, "m", placeholder, 100)
