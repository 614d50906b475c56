"""processing: what a model gets of an image: the arrays and the text that its processor in transformers makes.

The class is transformers', of the files of the model: its image processor in the variant for Pillow, else in that for
torchvision, where that is installed, and what stands for one image in a prompt is written by `replace_image_token`,
with which it expands prompts itself. Processors of video and audio are not made: they need other packages, and the text
of an image does not depend on them.

Only a process that decodes images imports this (`preparing`).
"""

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.auto import processing_auto

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.images.image import ImageArray, ImageInput, ProcessedImage

MOST_CONFIG = 16 << 20  # bytes of a file of settings
MOST_ARRAYS = 128 << 20  # bytes of what a processor may make of an image
_CONFIGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "config.json")
_library: Any = transformers  # parts of it have no types
_auto: Any = processing_auto
_LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class _Absent(dict[str, Any]):
    """In place of a processor of videos or audio: all its settings are None, and none are written."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__") or name == "to_dict":
            raise AttributeError(name)


class _ImagesOnly:
    """In front of a class of processors: its objects have an image processor and a tokenizer."""

    @classmethod
    def _get_arguments_from_pretrained(cls, path: str, *_: Any, **__: Any) -> list[Any]:
        of: Any = cls
        return [_part(of, name, path) for name in of.get_attributes()]

    def check_argument_for_proper_class(self, name: str, value: object) -> object:
        return type(value)


class Processor:
    """Of one model."""

    def __init__(self, folder: Path, model: str, placeholder: int, most_rows: int) -> None:
        """`model` is what digests name it by. An image may have `most_rows` placeholders. Raises `ModelRefused`, with
        the reason, if its processor cannot be used."""
        self._placeholder, self._most = placeholder, most_rows
        self._processor: Any = _loaded(folder)
        self._tensors = isinstance(self._processor.image_processor, TorchvisionBackend)
        self._made_for = self._identity(model)

    def check_rows(self, width: int, height: int) -> None:
        """Raise `BadRequest` if an image of this size has too many rows, where its class can say that of a size."""
        with suppress(AttributeError, NotImplementedError, TypeError):
            counted = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            self._check(int(counted["num_image_tokens"][0]), width, height)

    def process(self, image: Image.Image) -> ProcessedImage:
        """Raises `BadRequest` if the processor does not take such an image."""
        processor, size = self._processor, image.size
        try:
            kind = "pt" if self._tensors else "np"  # bfloat16, as some make of an image, is no type of NumPy
            merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors=kind)
            images = processor.prepare_inputs_layout(images=[image], text=None)[0]
            named = inspect.signature(processor._process_images).parameters.values()
            own = {one.name: merged[one.name] for one in named if one.name in merged and one.kind != one.VAR_KEYWORD}
            made, texts = processor._process_images(images, **own, **merged["images_kwargs"])
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - code of 97 classes
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise BadRequest(f"the model's processor takes no image of {size[0]} x {size[1]} pixels: {why}") from None
        if len(texts) != 1:
            raise BadRequest(f"{type(processor).__name__} writes no text for an image, so it cannot be in a prompt")
        unused = set(processor.unused_input_names)
        arrays = tuple(
            array for name, value in made.items() if name not in unused and (array := _array(name, value)) is not None
        )
        total = sum(len(one.data) for one in arrays)
        if total > MOST_ARRAYS:
            raise BadRequest(f"the processor makes {total} bytes of the image; {MOST_ARRAYS} are allowed")
        rows = self._rows(texts[0])
        self._check(rows, *size)
        return ProcessedImage(ImageInput(self._digest(image), rows, arrays), texts[0], *size, processor.image_token)

    def tokens(self, text: str) -> list[int]:
        """Of a text that it has written."""
        return self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _rows(self, text: str) -> int:
        rows = self.tokens(text).count(self._placeholder)
        if not rows:
            raise BadRequest(f"the text that the processor writes for an image has no token {self._placeholder}")
        return rows

    def _check(self, rows: int, width: int, height: int) -> None:
        if rows > self._most:
            raise BadRequest(
                f"an image of {width} x {height} pixels has {rows} tokens for this model; {self._most} are allowed. "
                f"Send a smaller image"
            )

    def _digest(self, image: Image.Image) -> bytes:
        """Fields of variable length have their length before them."""
        found = hashlib.sha256()
        for part in (self._made_for, f"{image.mode} {image.width} {image.height}".encode(), image.tobytes()):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
        return found.digest()

    def _identity(self, model: str) -> bytes:
        """All that decides on what is made of pixels, and for which model."""
        processor = self._processor
        settings = [json.loads(one.to_json_string()) for one in (processor, processor.image_processor)]
        kinds = [f"{type(one).__module__}.{type(one).__name__}" for one in (processor, processor.image_processor)]
        packages = ("transformers", "torch", "torchvision") if self._tensors else ("transformers", "pillow")
        versions = [version(package) for package in packages]
        return json.dumps([model, self._placeholder, kinds, settings, versions], sort_keys=True).encode()


def _loaded(folder: Path) -> Any:
    for name in _CONFIGS:
        if (file := folder / name).exists() and file.stat().st_size > MOST_CONFIG:
            raise ModelRefused(f"{name} has {file.stat().st_size} bytes; {MOST_CONFIG} are allowed")
    try:
        kind = _importable(_class_of(folder))
        only: Any = type(kind.__name__, (_ImagesOnly, kind), {"__module__": kind.__module__})
        processor = only.from_pretrained(str(folder), **_LOCAL)
    except (ModelRefused, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - code of 97 classes, and of files of a model
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelRefused(f"its processor cannot be made of its files: {why}") from None
    if getattr(processor, "image_token", None) is None:
        raise ModelRefused(f"its processor ({kind.__name__}) names no token that stands for an image")
    return processor


def _class_of(folder: Path) -> Any:
    """The class of processors that its files name, else that of its type of model."""
    for name in _CONFIGS:
        if (file := folder / name).exists():
            said: Any = json.loads(file.read_bytes())
            named = cast("dict[str, Any]", said).get("processor_class") if isinstance(said, dict) else None
            if isinstance(named, str):
                if (found := _auto.processor_class_from_name(named)) is None:
                    raise ModelRefused(f"its processor is {named}, which transformers does not have")
                return found
    config = _library.AutoConfig.from_pretrained(str(folder), **_LOCAL)
    if type(config) not in _auto.PROCESSOR_MAPPING:
        raise ModelRefused(f"transformers has no processor for models of type {config.model_type}")
    return _auto.PROCESSOR_MAPPING[type(config)]


def _importable(kind: Any) -> Any:
    """The class itself, where transformers has only a name for it because a package is missing that images do not need:
    its module gets the image processor's module for Pillow in place of the one for torchvision, and what writes numbers
    of videos as words is not called."""
    if getattr(kind, "is_dummy", False):
        place = f"transformers.{vars(_library)['_class_to_module'][kind.__name__]}"
        folder = place.rpartition(".")[0]
        name = folder.rpartition(".")[2]
        with suppress(ImportError):
            for_pillow = importlib.import_module(f"{folder}.image_processing_pil_{name}")
            sys.modules.setdefault(f"{folder}.image_processing_{name}", for_pillow)
            kind = getattr(importlib.import_module(place), kind.__name__)
    module: Any = sys.modules[kind.__module__]
    if "num2words" in vars(module) and module.num2words is None:
        module.num2words = str
    return kind


def _part(kind: Any, name: str, path: str) -> Any:
    if "tokenizer" in name:
        return kind._load_tokenizer_from_pretrained(name, path, **_LOCAL)
    if name != "image_processor":
        return _Absent()
    try:
        return _library.AutoImageProcessor.from_pretrained(path, backend="pil", **_LOCAL)
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error).lower():
            raise
        raise ModelRefused(
            f"its image processor ({kind.__name__}) needs torchvision: transformers has no variant of it for Pillow. "
            f"Install it by pip install 'kvcellar[images]', in the version and build that fit torch {torch.__version__}"
        ) from None


def _array(name: str, value: Any) -> ImageArray | None:
    """None: no array of numbers."""
    try:
        value = value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        found = np.ascontiguousarray(value)
    except (ValueError, TypeError):
        return None
    if found.dtype.kind not in "fiub":
        return None
    if found.dtype.kind == "f":
        found = found.astype(np.float32, copy=False)
    shape = np.shape(value)  # `ascontiguousarray` makes one axis of none
    return ImageArray(name, found.dtype.name, tuple(map(int, shape)), memoryview(found.tobytes()))
