"""What is made of an image is what transformers makes of it: arrays, text, and as many placeholders as rows."""

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.images.image import with_rows
from kvcellar.images.processing import MOST_CONFIG, Processor, _class_of, _importable

from .files import picture
from .made import write_processor, write_tokenizer

LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
SMALL = {"size": {"height": 56, "width": 56}}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
GRID = {"size": {"shortest_edge": 784, "longest_edge": 50_176}, "patch_size": 14, "merge_size": 2}
TYPES = {  # the class, its settings, its image processor and the settings of that, and the placeholder
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {}, "Qwen2VLImageProcessor", GRID, "<image>"),
    "qwen3_vl": ("Qwen3VLProcessor", {}, "Qwen2VLImageProcessor", GRID, "<image>"),
    "glm46v": ("Glm46VProcessor", {}, "Glm46VImageProcessor", GRID, "<image>"),
    "gemma3": ("Gemma3Processor", {"image_seq_length": 16}, "Gemma3ImageProcessor", SMALL, "<image>"),
    "gemma4": ("Gemma4Processor", {}, "Gemma4ImageProcessor", {}, "<image>"),
    "llava": ("LlavaProcessor", LLAVA, "CLIPImageProcessor", {}, "<image>"),
    "llava_next": ("LlavaNextProcessor", LLAVA, "LlavaNextImageProcessor", {}, "<image>"),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}, "Idefics3ImageProcessor", TILES, "<image>"),
    "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4}, "SmolVLMImageProcessor", TILES, "<image>"),
    "internvl": ("InternVLProcessor", {"image_seq_length": 4}, "GotOcr2ImageProcessor", SMALL, "<IMG_CONTEXT>"),
    "mistral3": ("PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}, "PixtralImageProcessor", {}, "[IMG]"),
}
WITHOUT = ("llava", "llava_next", "gemma3", "idefics3")  # of images and text only: transformers makes them as they are


def folder_of(kind, path):
    """The files of a model of this type, and the id of its placeholder."""
    name, own, image, settings, placeholder = TYPES[kind]
    ids = write_tokenizer(path)
    write_processor(path, kind, {"processor_class": name} | own, {"image_processor_type": image} | settings)
    return path, ids[placeholder]


@pytest.fixture(params=TYPES)
def made(request, tmp_path):
    folder, placeholder = folder_of(request.param, tmp_path)
    return request.param, folder, placeholder, Processor(folder, "m", placeholder, 10_000)


def test_rows_are_the_placeholders_of_the_text(made):
    _, folder, placeholder, processor = made
    one, two = (processor.process(picture(*size)) for size in ((200, 120), (90, 160)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"a{one.text}b{two.text}c", add_special_tokens=False)["input_ids"]
    found = with_rows(ids, placeholder, [one.input, two.input])
    assert [row for row in found if row >> 62] == [*one.input.row_ids(), *two.input.row_ids()]
    assert {array.name for array in one.input.arrays} & {"pixel_values"}
    assert (one.width, one.height) == (200, 120)


@pytest.mark.parametrize("kind", WITHOUT)
def test_text_and_arrays_are_those_of_its_call(kind, tmp_path):
    folder, placeholder = folder_of(kind, tmp_path)
    image = picture(200, 120)
    one = Processor(folder, "m", placeholder, 10_000).process(image)
    theirs = _importable(_class_of(folder)).from_pretrained(folder, backend="pil")
    mark = theirs.image_token
    called = theirs(images=[image], text=[f"x{mark}y"], return_tensors="np")
    ids = theirs.tokenizer(f"x{one.text}y")["input_ids"]
    assert called["input_ids"][0].tolist() == ids
    for array in one.input.arrays:
        if array.name in called:
            assert np.array_equal(array.array(), called[array.name]), array.name
    assert {array.name for array in one.input.arrays} >= {"pixel_values"}


def test_a_digest_is_of_pixels_processing_and_model(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    folder, placeholder = folder_of("qwen3_vl", one)
    folder_of("glm46v", other)
    first = Processor(folder, "m", placeholder, 10_000)
    image = picture(120, 84)
    digests = [
        first.process(image).input.digest,
        first.process(picture(120, 84, seed=1)).input.digest,
        first.process(Image.frombytes("RGB", (84, 120), image.tobytes())).input.digest,
        Processor(folder, "another", placeholder, 10_000).process(image).input.digest,
        Processor(other, "m", placeholder, 10_000).process(image).input.digest,
    ]
    assert len(set(digests)) == len(digests)
    assert Processor(folder, "m", placeholder, 10_000).process(image.copy()).input.digest == digests[0]


def test_an_image_of_too_many_tokens_is_refused_by_its_size(tmp_path):
    folder, placeholder = folder_of("qwen3_vl", tmp_path)
    processor = Processor(folder, "m", placeholder, 50)
    with pytest.raises(BadRequest, match=r"2000 x 1000 pixels has \d+ tokens for this model; 50 are allowed"):
        processor.check_rows(2000, 1000)
    processor.check_rows(56, 56)
    folder_of("llava", tmp_path)
    with pytest.raises(BadRequest, match="tokens for this model; 50 are allowed"):
        Processor(folder, "m", placeholder, 50).process(picture())


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("BlipProcessor", "names no token that stands for an image"),
        ("OwnProcessor", "is OwnProcessor, which transformers does not have"),
    ],
)
def test_other_processors_are_refused_by_name(tmp_path, named, reason):
    write_tokenizer(tmp_path)
    write_processor(tmp_path, "blip", {"processor_class": named}, {"image_processor_type": "BlipImageProcessor"})
    with pytest.raises(ModelRefused, match=reason):
        Processor(tmp_path, "m", 4, 100)


def test_files_of_settings_have_a_limit(tmp_path):
    folder, placeholder = folder_of("llava", tmp_path)
    with (folder / "preprocessor_config.json").open("ab") as file:
        file.write(b" " * MOST_CONFIG)
    with pytest.raises(ModelRefused, match=r"preprocessor_config.json has \d+ bytes"):
        Processor(folder, "m", placeholder, 100)


def test_code_of_a_model_is_not_run(tmp_path):
    folder, placeholder = folder_of("llava", tmp_path)
    (folder / "own.py").write_text("raise SystemExit('run')")
    image = {"image_processor_type": "CLIPImageProcessor", "auto_map": {"AutoImageProcessor": "own.Own"}}
    write_processor(folder, "llava", LLAVA | {"auto_map": {"AutoProcessor": "own.Own"}}, image)
    assert Processor(folder, "m", placeholder, 10_000).process(picture()).input.rows  # by the class of transformers
