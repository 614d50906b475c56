"""The section on images of docs/models.md: every image-text type of transformers, served and compared.

See `models_page`, which writes it.
"""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers
from transformers.models.auto import processing_auto

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.vision import vision_of
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.images.processing import Processor, _loaded
from kvcellar.memory.attention.choose import backends
from tests.images.files import picture
from tests.images.made import NAMED, write_processor, write_tokenizer
from tests.images.seeing import pictures_of
from tests.images.test_types import check
from tests.zoo_test_support.images import ALIKE, TYPES, image_processors, network_of

HEADING = "\n## Images\n"
NOT_YET = "not yet"
HEAD = """\

*Made by `python -m scripts.models_page --images`, with transformers {version}. Tests repeat each row that says yes.*

Every type of `AutoModelForImageTextToText`. The column *network* is of a tiny random network in float32, in a whole
engine, with arrays that the type's image processor makes of two drawn pictures: greedy texts of five prompts (an image
first, last, two images, the same one twice, text alone) have to equal those of the network's own forward, in chunks, in
one batch, with two completions each, and again from memory. The column *processor* is of the class that writes what
stands for an image in a prompt, with a tokenizer of bytes and the default settings of the class: whether it takes a
picture, and with Pillow or torchvision. A model needs both. `kvcellar doctor` says whether yours has them.

Two types attend to images by cross-attention. Of mllama, the text in front of the first image is in the cache of the
own forward: in one forward over all of a prompt, transformers lets that text see all images, unlike
[Meta's code](decisions/0111-cross-attention-has-no-cells.md). The config of idefics names no placeholder: that of the
tiny network does, as `image_token_id`.

Networks of BLIP-2, InstructBLIP and KOSMOS-2 take no text without an image. Here it is read by their decoder, and
compared with their own forward over that text and an image that has no place in it. GIT's own forward takes one image,
in front of a text: it has three prompts. Features of InstructBLIP are of an image and of a question
(`qformer_input_ids`), so both are what a prompt has as an image, and its digest is of both: another question about a
picture is another image, which is computed again; front ends do not make these ids yet. An image of InstructBLIP for
videos is a video of four equal frames, as many as its processor writes placeholders for.

**{works} of {all} types work, with {processors} of their processors{left}.**

Audio and video are refused by name, at every door. What is missing: their files are not decoded; a video's frames have
positions in time, of which the seam passes only those of an image; and sound has placeholders, towers and processors
(torchaudio, feature extractors) of its own. Types that take them as well are served with text and images.
"""
_MAPPED: Mapping[str, Any] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]


@dataclass(frozen=True, slots=True)
class ImageRow:
    """How a type that sees is served, `why` if it is not, and what its processor does."""

    model_type: str
    how: Literal["yes", "refused", "wrong", "not tried"]
    processor: str
    why: str = ""

    def __str__(self) -> str:
        said = (text.replace("|", "/") for text in (self.processor, self.why))
        return " | ".join((f"| {self.model_type}", self.how, *said)) + " |"


def check_type(model_type: str) -> ImageRow:
    processor = _processor(model_type)
    try:
        pictures_of(model_type)
    except Exception as error:  # noqa: BLE001 - code of 97 types
        if (why := _refusal(model_type)) is not None:
            return ImageRow(model_type, "refused", processor, why)
        return ImageRow(model_type, "not tried", processor, _plainly(error))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        try:
            check(model_type, Path(folder), patch)
        except ModelRefused as refused:
            return ImageRow(model_type, "refused", processor, _plainly(refused))
        except AssertionError as error:
            return ImageRow(model_type, "wrong", processor, _plainly(error) or "its text is another one")
        except Exception as error:  # noqa: BLE001 - code of 97 types
            why = _refusal(model_type)
            return ImageRow(model_type, "wrong" if why is None else "refused", processor, why or _plainly(error))
    return ImageRow(model_type, "yes", processor)


def _refusal(model_type: str) -> str | None:
    """Why a network of this type takes no images, where that is known before it gets one."""
    try:
        guest = build_guest(network_of(model_type), backends())
        return guest.not_seeing if vision_of(guest.model) is None else None
    except ModelRefused as refused:
        return _plainly(refused)
    except Exception:  # noqa: BLE001 - code of 97 types; the network cannot be made
        return None


def _processor(model_type: str) -> str:
    """What its class of processors does with a picture, of a tokenizer with the tokens that it asks for."""
    named = dict(NAMED)
    while True:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return _tried(Path(folder), model_type, named)
            except (ModelRefused, BadRequest) as error:
                asked = re.search(r"has no attribute (\w+_token)\b", str(error))
                if asked is None or asked[1] in named:
                    return _plainly(error)
                named[asked[1]] = f"<{asked[1]}>"


def _tried(folder: Path, model_type: str, named: Mapping[str, str]) -> str:
    ids = write_tokenizer(folder, named)
    kind, names = _MAPPED.get(ALIKE.get(model_type, model_type)), image_processors(model_type)
    image = (
        {"image_processor_type": names.get("torchvision", names.get("pil")), "image_seq_length": 16} if names else {}
    )
    like = {} if kind is None else {"processor_class": kind, "patch_size": 14, "image_seq_length": 16}
    write_processor(folder, model_type, like | {"vision_feature_select_strategy": "default"}, image)
    theirs = _loaded(folder)
    if theirs.image_token not in ids:
        return _tried(folder, model_type, {**named, "own_token": theirs.image_token})
    placeholder = getattr(theirs, "image_token_id", None) or ids[theirs.image_token]
    Processor(folder, "m", placeholder, 1 << 20).process(picture(200, 120))
    return "Pillow" if "pil" in names else "torchvision"


def _plainly(error: Exception) -> str:
    """The reason without numbers and names that differ between machines."""
    said = str(error) if isinstance(error, ModelRefused | BadRequest | AssertionError) else ""
    text = said or f"{type(error).__name__}: {error}"
    for pattern, plain in (
        (r"\s+", " "),
        (r"differ by [\d.e+-]+ from its own forward \([\d.e+-]+ is allowed\)", "differ from its own forward"),
        (r"the model's processor takes no image of 200 x 120 pixels: ", "raises "),
        (r"its processor cannot be made of its files: ", "raises "),
        (r" in your environment\..*", ""),
        (r", Model type should be one of.*|\. Model type should be one of.*", ""),
    ):
        text = re.sub(pattern, plain, text)
    return text.strip()[:240]


def render(rows: Iterable[ImageRow]) -> str:
    found = list(rows)
    works = [row for row in found if row.how == "yes"]
    processors = sum(row.processor in ("Pillow", "torchvision") for row in works)
    left = sum(row.why == NOT_YET for row in found)
    more = f"; {left} have not been run yet" if left else ""
    head = HEAD.format(
        version=transformers.__version__, works=len(works), all=len(found), processors=processors, left=more
    )
    table = "| type | network | processor | why not |\n" + "| --- " * 4 + "|"
    return "\n".join([HEADING.strip("\n"), head, table, *map(str, found)]) + "\n"


def rows_of(section: str) -> dict[str, ImageRow]:
    """Of a section that was rendered, by their types."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    return {name: ImageRow(name, how, *rest) for name, how, *rest in cells if name in TYPES}  # pyright: ignore


def ordered(rows: Mapping[str, ImageRow]) -> Sequence[ImageRow]:
    return [rows.get(one, ImageRow(one, "not tried", "", NOT_YET)) for one in sorted(TYPES)]
