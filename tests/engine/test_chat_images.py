"""Images of chats in a front end: rows in prompts, which are shown as one word, and which namespaces have them."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken

from kvcellar.engine.arguments import prompt_ids
from kvcellar.engine.card import EngineCard, ModelCard, TextCard, VisionCard
from kvcellar.engine.load.settings import Settings
from kvcellar.errors import BadRequest
from kvcellar.frontend import chat_images
from kvcellar.frontend.chat_images import ChatImages, portable
from kvcellar.frontend.engine import images_of
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.frontend.transcript import Transcript
from kvcellar.images.fetching import Fetcher
from kvcellar.images.image import has_rows, is_row
from kvcellar.images.sources import file_of
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.output import Stops
from kvcellar.text.tokens import TextAssets
from tests.serve.fake_images import PNG, FakeImages
from tests.text import made

CAT = PNG + b"cat"
TEMPLATE = """\
{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\
{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"""


def codec(images: Any) -> TextCodec:
    tokenizer = made.byte_level()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    assets = TextAssets(tokenizer, {}, TEMPLATE)
    seen = ChatImages(images, placeholder=tokenizer.token_to_id("<image>"), why_not="it does not see")
    card = TextCard(assets=assets, why_not="", context=4096, text_bytes=2**27, replay_bytes=2**20)
    return TextCodec(card, images=seen)


@pytest.fixture
def seeing() -> Iterator[TextCodec]:
    made = codec(FakeImages())
    yield made
    made.images.check()
    made.rest()


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_a_run_of_rows_is_shown_once(seeing: TextCodec) -> None:
    ids = seeing.render([user(CAT, "what is it", CAT)])
    assert sum(map(is_row, ids)) == 6
    assert seeing.decode(ids, special=True) == "<|im_start|><image>what is it<image><|im_end|><|im_start|>"
    assert seeing.decode(ids[:3]) == "<image>"
    assert (seeing.written(ids[1]), seeing.token_bytes(ids[1])) == ("<image>", b"")
    assert prompt_ids(ids, vocab_size=600, context=99) == tuple(ids)
    assert seeing.images.inputs(ids, "")[0].row_ids() == tuple(ids[1:4])


def test_images_that_are_too_many_bytes_for_a_message_are_refused(
    seeing: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = seeing.render([user(CAT, "what is it", CAT)])
    monkeypatch.setattr(chat_images, "MOST_SENT", -1)
    with pytest.raises(BadRequest, match="Send fewer, or smaller ones"):
        seeing.images.inputs(ids, "")


def test_more_images_than_allowed_are_refused_before_one_is_decoded(
    seeing: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_images, "MOST_IMAGES", 3)
    seeing.render([user(CAT, "a", CAT), user(CAT)])
    with pytest.raises(BadRequest, match=r"the messages have 4 images; 3 are allowed. Leave out the first ones"):
        seeing.render([user(b"no image", "a", CAT), user(CAT, CAT)])


@pytest.mark.parametrize("end", [2, 4, 5, 6])
def test_what_follows_rows_is_text(seeing: TextCodec, end: int) -> None:
    ids = seeing.render([user(CAT, "what is it")])
    output = seeing.output(Stops(()), ids[:end])
    words = seeing.encode(" is kept", special=False)
    assert "".join([*(output.push(token, may_stop=True) for token in words), output.flush()]) == " is kept"


def test_a_second_turn_has_the_tokens_of_the_reply(seeing: TextCodec) -> None:
    first = seeing.render([user(CAT, "what")], namespace="n")
    assert seeing.replays is not None
    known = seeing.replays.known("n", first)
    assert known is not None
    reply = [token for char in "nothing is kept" for token in seeing.encode(char, special=False)]
    seeing.replays.replied(known.key, None, reply)
    said = {"role": "assistant", "content": "nothing is kept"}
    second = seeing.render([user(CAT, "what"), said, user("and")], namespace="n")
    assert second[: len(first) + len(reply)] == first + reply


def test_rows_are_of_images_that_the_namespace_has_had(seeing: TextCodec) -> None:
    ids = seeing.render([user(CAT)], namespace="a")
    assert len(seeing.images.inputs(ids, "a")) == 1
    with pytest.raises(BadRequest, match="that are not known"):
        seeing.images.inputs(ids, "b")
    seeing.render([user(CAT)])
    assert len(seeing.images.inputs(ids, "b")) == 1
    with pytest.raises(BadRequest, match="it does not see"):
        codec(None).images.inputs(ids, "a")


def test_a_model_that_does_not_see_says_why() -> None:
    with pytest.raises(BadRequest, match=r"^messages\[0\].content\[1\].image: it does not see$"):
        codec(None).render([user("what", CAT)])


def test_sources_of_python_are_kept_as_urls(seeing: TextCodec, tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    picture = Image.fromarray(pixels)
    (tmp_path / "a.png").write_bytes(CAT)
    for source in (CAT, tmp_path / "a.png", pixels, picture):
        (part, text) = portable([source, "what"])
        assert (part["type"], text) == ("image", {"type": "text", "text": "what"})
        file = file_of(part["image"], Fetcher(()))
        assert file == CAT or np.array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    with pytest.raises(BadRequest, match="is not an image"):
        portable([object()])
    with pytest.raises(BadRequest, match="cannot be read"):
        portable([tmp_path / "b.png"])


def test_a_saved_chat_has_its_images(seeing: TextCodec) -> None:
    transcript = Transcript(chat=True)
    prompt = transcript.chatted([user(*portable([CAT, "what"]))], SamplingParams(), 99, seeing.render)
    transcript.conclude(prompt, seeing.encode("it", special=False), {"role": "assistant", "content": "it"})
    again = Transcript.decoded(transcript.encoded(), chat=True, vocab_size=600)
    assert has_rows(again.tokens)
    assert again.tokens == transcript.tokens
    other = codec(FakeImages())
    after = again.chatted([user("and")], SamplingParams(), 99, other.render)
    assert after.ids[: len(prompt.ids)] == prompt.ids
    assert len(other.images.inputs(after.ids, "")) == 1


def test_hosts_that_images_are_fetched_from_are_a_list_of_names() -> None:
    assert Settings(image_hosts=["example.com"]).image_hosts == ("example.com",)  # pyright: ignore[reportArgumentType]
    for wrong in ("example.com", [1]):
        with pytest.raises(BadRequest, match="image_hosts must be a list of names"):
            Settings(image_hosts=wrong)  # pyright: ignore[reportArgumentType]
    card = EngineCard(
        model=ModelCard("m", None, "X", 99, 600, "float32", "cpu", "flat", True, True, SamplingParams()),
        text=TextCard(assets=None, why_not="", context=99, text_bytes=2**20),
        padding=None,
        cells={},
        vision=VisionCard(placeholder=5, path=Path("/nothing")),
        pooling="",
        cache_bytes=1,
        max_waiting=1,
    )
    images = images_of(card, ("example.com",))
    with pytest.raises(BadRequest, match=r"^messages\[0\].content\[0\].image_url: images are not fetched from 'x.org'"):
        images.taken([user({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}})], "")
    assert images.placeholder == 5
