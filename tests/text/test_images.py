"""Images in chats: the text of each is where the template wrote it, and what a client writes is no image."""

import hashlib
import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from kvcellar.errors import BadRequest
from kvcellar.images.image import ImageInput, ProcessedImage, is_row
from kvcellar.text.labels import LENGTH, Labelled, label
from kvcellar.text.replay import Replays
from kvcellar.text.template import ChatTemplate, Rendered
from kvcellar.text.tokens import TextTokenizer
from kvcellar.text.turns import prompt_key
from tests.text import made
from tests.text.image_templates import CONTROL, MODELS

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SEEING = sorted(MODELS.keys() - {"text only"})
Message = dict[str, Any]


@cache
def byte_level() -> Any:
    tokenizer = made.byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer


WORDS = TextTokenizer(byte_level(), special_tokens=SPECIAL)
THEIRS = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)


class Seeing:
    """A model with vision: its template, and images that its processor has made."""

    def __init__(self, name: str) -> None:
        self.source, self.token, self.soft, self.form = MODELS[name]
        self.template = ChatTemplate(self.source, WORDS, made.RENDERER)
        self.placeholder = WORDS.added[self.soft]

    def image(self, name: str, rows: int = 3) -> ProcessedImage:
        text = self.form.replace("{rows}", self.soft * rows)
        return ProcessedImage(ImageInput(hashlib.sha256(name.encode()).digest(), rows, ()), text, 8, 8, self.token)

    def labelled(self, *images: ProcessedImage) -> Labelled:
        return Labelled(images, self.placeholder, self.token)

    def render(self, messages: list[Message], *images: ProcessedImage, **options: Any) -> Rendered:
        return self.template.render(messages, images=self.labelled(*images), **options)


@cache
def seeing(name: str) -> Seeing:
    return Seeing(name)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def shown(image: ProcessedImage) -> dict[str, str]:
    return {"type": "image", "image": image.input.digest.hex()}


def user(*parts: dict[str, str]) -> Message:
    return {"role": "user", "content": list(parts)}


def assistant(words: str) -> Message:
    return {"role": "assistant", "content": [text(words)]}


def theirs(model: Seeing, messages: list[Message], images: list[ProcessedImage]) -> list[int]:
    """As processors of transformers: the template's text, in which the text of each image replaces the token."""
    plain = [
        {**one, "content": [{"type": "image"} if part["type"] == "image" else part for part in one["content"]]}
        for one in messages
    ]
    made: Any = THEIRS.apply_chat_template(
        plain, chat_template=model.source, tokenize=False, add_generation_prompt=True
    )
    rest = iter(images)
    return THEIRS(re.sub(re.escape(model.token), lambda _: next(rest).text, made), add_special_tokens=False).input_ids


def with_placeholders(model: Seeing, ids: list[int]) -> list[int]:
    return [model.placeholder if is_row(token) else token for token in ids]


WRITTEN = st.text(st.sampled_from("aé <\n世"), min_size=1, max_size=6)


@given(
    st.sampled_from(SEEING),
    st.lists(st.lists(st.one_of(WRITTEN, st.integers(1, 5)), min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_prompts_are_those_of_the_models_processor(name: str, turns: list[list[str | int]]) -> None:
    model, images, messages = seeing(name), list[ProcessedImage](), list[Message]()
    for number, turn in enumerate(turns):
        parts: list[dict[str, str]] = []
        for part in turn:
            if isinstance(part, int):
                images.append(model.image(f"{number} {len(images)}", part))
                parts.append(shown(images[-1]))
            else:
                parts.append(text(part))
        messages += [user(*parts), assistant("ok")]
    messages.pop()
    ids = model.render(messages, *images).encode(WORDS)
    assert with_placeholders(model, ids) == theirs(model, messages, images)
    assert [token for token in ids if is_row(token)] == [row for one in images for row in one.input.row_ids()]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_client_writes_is_no_image(name: str) -> None:
    model = seeing(name)
    image, spelled = (
        model.image("a"),
        " ".join({*CONTROL, label(model.image("b").input).encode("utf-8", "replace").decode()}),
    )
    ids = model.render([user(text(spelled), shown(image), text(spelled))], image).encode(WORDS)
    assert [token for token in ids if is_row(token)] == list(image.input.row_ids())
    assert model.placeholder not in ids
    with pytest.raises(BadRequest, match="not Unicode"):
        model.render([user(text(label(image.input)), shown(image))], image)


@pytest.mark.parametrize("name", MODELS)
def test_images_in_tool_results_and_of_the_system(name: str) -> None:
    model = seeing(name)
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    asked = [user(text("look")), {"role": "assistant", "tool_calls": [call]}]
    image, other = model.image("a"), model.image("b", 2)
    result = {"role": "tool", "tool_call_id": "call00000", "content": [text("seen"), shown(image)]}
    talks = [([*asked, result], [image])]
    if name != "llava":  # which has no form for content that is a text
        talks.append(
            ([{"role": "system", "content": [text("as here"), shown(other)]}, user(shown(image))], [other, image])
        )
    for messages, images in talks:
        ids = model.render(messages, *images).encode(WORDS)
        assert [token for token in ids if is_row(token)] == [row for one in images for row in one.input.row_ids()]


def test_a_sign_has_what_the_template_writes_around_images() -> None:
    """Where a template shows images of users alone, those of tools look like these."""
    source = MODELS["qwen-vl"][0].replace(
        "{{ render_content(message.content) }}{{ '\\n</tool", "{{ message.content }}{{ '\\n</tool"
    )
    assert source != MODELS["qwen-vl"][0]
    model = seeing("qwen-vl")
    template = ChatTemplate(source, WORDS, made.RENDERER)
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    image = model.image("a")
    result = {"role": "tool", "tool_call_id": "call00000", "content": [text("seen"), shown(image)]}
    messages = [user(text("look")), {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    rendered = template.render(messages, images=model.labelled(image))
    assert "seen\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>" in rendered.written


def test_images_that_a_template_does_not_write_are_refused() -> None:
    model = seeing("text only")
    template = ChatTemplate("{{ messages[-1].content[:2] }}", WORDS, made.RENDERER)
    with pytest.raises(BadRequest, match="writes 0 images, and the messages have 1"):
        template.render([user(text("abc"), shown(model.image("a")))], images=model.labelled(model.image("a")))


class Chat:
    """A conversation whose replies are replayed."""

    def __init__(self, name: str, replays: Replays | None = None) -> None:
        self.model = seeing(name)
        self.replays = replays or Replays(WORDS, 2**20, borders=True, placeholder=self.model.placeholder)
        self.messages: list[Message] = []
        self.images: list[ProcessedImage] = []

    def ask(self, *parts: str | ProcessedImage) -> list[int]:
        self.images += [part for part in parts if isinstance(part, ProcessedImage)]
        self.messages.append(user(*(text(part) if isinstance(part, str) else shown(part) for part in parts)))
        return self.replays.encode(self.model.render(self.messages, *self.images), "")

    def reply(self, prompt: list[int], tokens: list[int]) -> None:
        self.replays.replied(prompt_key("", prompt), None, tokens)
        self.messages.append(assistant(WORDS.decode(tokens)))


def spelled(words: str) -> list[int]:
    """A reply with other tokens than the tokenizer gives its text."""
    return [token for char in words for token in WORDS.encode_marked(char, ())]


@pytest.mark.parametrize("name", ["qwen-vl", "gemma-3", "mistral-3", "text only"])
def test_the_next_prompt_begins_with_the_tokens_of_the_conversation(name: str) -> None:
    chat = Chat(name)
    first = chat.ask(chat.model.image("a"), "nothing is kept")
    reply = spelled("nothing in it is forgotten")
    assert reply != WORDS.encode_marked("nothing in it is forgotten", ())
    chat.reply(first, reply)
    second = chat.ask("and", chat.model.image("b", 2))
    assert second[: len(first) + len(reply)] == first + reply
    assert [token for token in second if is_row(token)] == [row for one in chat.images for row in one.input.row_ids()]
    chat.reply(second, spelled("the cellar"))
    third = chat.ask("so")
    assert third[: len(second)] == second
    found = chat.replays.known("", second)
    assert found is not None
    assert all(not is_row(second[at]) or not is_row(second[at - 1]) for at in found.borders)
    chat.replays.check()


def test_chats_on_other_images_of_one_size_are_known_apart() -> None:
    replays = Replays(WORDS, 2**20, placeholder=seeing("gemma-3").placeholder)
    chats = [Chat("gemma-3", replays) for _ in range(3)]
    prompts = [chat.ask(chat.model.image(str(n)), "what") for n, chat in enumerate(chats)]
    replies = [spelled(words) for words in ("the cellar", "cellar is", "is kept")]
    for chat, prompt, reply in zip(chats, prompts, replies, strict=True):
        chat.reply(prompt, reply)
    for chat, prompt, reply in zip(chats, prompts, replies, strict=True):
        assert chat.ask("and")[: len(prompt) + len(reply)] == prompt + reply
    replays.check()


@given(st.lists(st.one_of(WRITTEN, st.integers(1, 4)), max_size=8), st.data())
def test_marks_are_where_they_were(parts: list[str | int], data: st.DataObject) -> None:
    """Of a text with labels, and of the same text with what images are written as."""
    model = seeing("gemma-3")
    images = [model.image(str(part), part) for part in parts if isinstance(part, int)]
    labels = [part if isinstance(part, str) else label(model.image(str(part), part).input) for part in parts]
    whole, at, places = "".join(labels), 0, [0]
    for one in labels:
        places += [at + len(one)] if len(one) == LENGTH else range(at + 1, at + len(one) + 1)
        at += len(one)
    marks = sorted(data.draw(st.sets(st.sampled_from(places))))
    labelled = model.labelled(*images)
    written, moved = labelled.written(whole, marks)
    assert written == "".join(part if isinstance(part, str) else model.image(str(part), part).text for part in parts)
    assert list(moved) == [len(labelled.written(whole[:mark])[0]) for mark in marks]


def test_an_image_part_must_be_an_object_that_names_it() -> None:
    model = seeing("llava")
    for part in ({"type": "image"}, {"type": "image", "image": 3}, {"type": "input_audio"}, {"type": ["image"]}):
        with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\]"):
            model.template.render([{"role": "user", "content": [json.loads(json.dumps(part))]}])
