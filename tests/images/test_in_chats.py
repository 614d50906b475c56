"""A chat with images has the tokens that the model's own processor makes of the same messages."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kvcellar.engine.card import TextCard
from kvcellar.frontend.chat_images import ChatImages
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.images.image import is_row
from kvcellar.images.processing import _class_of, _importable
from kvcellar.images.store import Images
from kvcellar.text.tokens import TextAssets

from .files import picture
from .test_processing import WITHOUT, folder_of

TEMPLATE = """\
{% for message in messages %}<s>{% for part in message['content'] %}{% if part['type'] == 'image' %}TOKEN\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"""


def codec_of(folder: Path, placeholder: int, token: str) -> TextCodec:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    card = TextCard(
        assets=TextAssets(tokenizer, {}, TEMPLATE.replace("TOKEN", token)),
        why_not="",
        context=10_000,
        text_bytes=2**28,
        replay_bytes=2**20,
        borders=True,
    )
    images = Images(folder, model="m", placeholder=placeholder, most_rows=10_000)
    return TextCodec(card, images=ChatImages(images, placeholder=placeholder))


@pytest.mark.parametrize("kind", WITHOUT)
def test_prompts_are_those_of_its_processor(kind: str, tmp_path: Path) -> None:
    folder, placeholder = folder_of(kind, tmp_path)
    processor: Any = _importable(_class_of(folder)).from_pretrained(folder, backend="pil")
    token = processor.image_token
    codec = codec_of(folder, placeholder, token)
    one, other = picture(200, 120), picture(60, 80, seed=1)
    shown: list[Image.Image] = [one, other]
    messages = [{"role": "user", "content": [one, "a <image> b"]}, {"role": "user", "content": ["c", other, "d"]}]
    try:
        ids = codec.render(messages)
        again = codec.render(messages)
        assert sum(map(is_row, ids)) == sum(len(image.row_ids()) for image in codec.images.inputs(ids, ""))
    finally:
        codec.rest()
    assert again == ids
    # what a client writes like a token of images is plain text
    written = f"<s>{token}a W b</s><s>c{token}d</s>"
    theirs = processor(images=[shown], text=[written], return_tensors="np")["input_ids"][0].tolist()
    words = AutoTokenizer.from_pretrained(folder)
    plain = [token for char in "<image>" for token in words(char, add_special_tokens=False)["input_ids"]]
    at = next(n for n, one in enumerate(theirs) if one == words("W", add_special_tokens=False)["input_ids"][0])
    expected = [*theirs[:at], *plain, *theirs[at + 1 :]]
    assert [placeholder if is_row(one) else one for one in ids] == expected
