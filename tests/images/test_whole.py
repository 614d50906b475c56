"""A model that takes images, from a directory to each door: what an image is decides the answer, and what was computed
of it is not computed again."""

import base64
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from kvcellar import Engine
from kvcellar.frontend import capabilities
from kvcellar.frontend.result import Collector
from kvcellar.images import shared
from kvcellar.serve import Server, ServeSettings

from .files import picture
from .whole import ROWS, write_model

ASKED: Any = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
SETTINGS: Any = {"cache_bytes": 60_000_000, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write_model(found)
    return found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, **SETTINGS) as engine:
        yield engine


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def encoded(engine: Engine) -> int:
    """How often an image went through the tower."""
    seeing = engine._built.loop.manager.seeing
    assert seeing is not None
    return seeing.encoded


def as_url(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_second_question_on_an_image_computes_neither_the_image_nor_what_is_before_it(engine: Engine) -> None:
    engine.clear_cache()
    before = encoded(engine)
    first = engine.chat(user("look: ", picture(seed=1), "what is it?"), **ASKED)
    second = engine.chat(user("look: ", picture(seed=1), "which one?"), **ASKED)
    assert encoded(engine) == before + 1
    assert first.usage.cached_tokens == 0
    behind = len("which one?</s><s>assistant:") - 5 - 3 + 2 + 1  # tokens behind what both have in common, at most
    assert second.usage.cached_tokens >= second.usage.prompt_tokens - behind
    assert first.usage.prompt_tokens > ROWS


def test_another_image_has_other_logits_and_shares_only_what_is_before_it(engine: Engine) -> None:
    engine.clear_cache()
    first = engine.chat(user("look: ", picture(seed=1), "what is it?"), logprobs=3, **ASKED)
    other = engine.chat(user("look: ", picture(seed=2), "what is it?"), logprobs=3, **ASKED)
    assert 0 < other.usage.cached_tokens < other.usage.prompt_tokens - ROWS
    one, two = (result.choices[0].logprobs for result in (first, other))
    assert one is not None
    assert two is not None
    assert [dict(at.top) for at in one] != [dict(at.top) for at in two]


def test_why_names_the_image_that_is_not_as_it_was(engine: Engine) -> None:
    engine.clear_cache()
    said: list[dict[str, Any]] = [{"role": "system", "content": "look"}]
    engine.chat([*said, *user(picture(seed=1), "and", picture(seed=2), "what?")], **ASKED)
    other = engine.chat([*said, *user(picture(seed=1), "and", picture(seed=3), "what?")], **ASKED).recall
    moved = engine.chat([*said, *user("now ", picture(seed=1), "what?")], **ASKED).recall
    again = engine.chat([*said, *user(picture(seed=1), "and", picture(seed=2), "what?")], **ASKED).recall
    assert other is not None
    assert moved is not None
    assert again is not None
    assert (other.reason, other.image) == ("diverged", "message 2, image 2: another image")
    assert (moved.reason, moved.image) == ("diverged", "message 2, image 1: the same image, after other tokens")
    assert (again.reason, again.image) == ("all", "")
    ids = engine.render([*said, *user(picture(seed=4), "what?")])
    collector = Collector(1)
    engine.submit(ids[:-1], engine.params(**ASKED), deliver=collector.deliver)
    found = collector.result().recall
    assert found is not None
    assert found.image == "image 1 of the prompt: another image", "it is no prompt of a chat"


def test_an_image_in_another_place_keeps_its_features(engine: Engine) -> None:
    engine.clear_cache()
    engine.chat(user(picture(seed=3), "what is it?"), **ASKED)
    before = encoded(engine)
    engine.chat(user("first, another text. ", picture(seed=3), "and it?"), **ASKED)
    assert encoded(engine) == before


def test_another_namespace_computes_an_image_anew(engine: Engine) -> None:
    engine.clear_cache()
    cached = list[int]()
    for namespace in ("a", "a", "b"):
        ids, collector = engine.render(user(picture(seed=4), "what is it?"), namespace=namespace), Collector(1)
        engine.submit(ids, engine.params(**ASKED), deliver=collector.deliver, namespace=namespace)
        cached.append(collector.result().usage.cached_tokens)
    assert cached == [0, len(ids) - 1, 0]


def test_after_a_restart_the_store_has_an_image_and_no_tower_runs(folder: Path, tmp_path: Path) -> None:
    messages = user("look: " + 400 * "-", picture(seed=5), "what is it?")  # short texts are not stored
    with Engine(folder, store=str(tmp_path / "store"), **SETTINGS) as engine:
        cold = engine.chat(messages, **ASKED)
    with Engine(folder, store=str(tmp_path / "store"), **SETTINGS) as engine:
        warm = engine.chat(messages, **ASKED)
        assert encoded(engine) == 0
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    assert warm.choices[0].token_ids == cold.choices[0].token_ids


def test_outputs_of_one_prompt_share_its_image(engine: Engine) -> None:
    engine.clear_cache()
    alone = engine.chat(user(picture(seed=6), "what is it?"), **ASKED)
    several = engine.chat(user(picture(seed=6), "what is it?"), n=3, **ASKED)
    assert {tuple(choice.token_ids) for choice in several.choices} == {tuple(alone.choices[0].token_ids)}


def test_penalties_skip_rows_of_images(engine: Engine) -> None:
    asked = user(picture(seed=7), "what is it?")
    result = engine.chat(asked, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, **ASKED)
    assert len(result.choices[0].token_ids) == ASKED["max_tokens"]


@pytest.mark.parametrize("num_keep", [-1, 0])  # -1: the prompt
def test_a_full_context_drops_text_behind_an_image_and_ends_where_it_would_drop_the_image(
    folder: Path, num_keep: int
) -> None:
    with Engine(folder, context=64, **SETTINGS) as engine:
        asked = ASKED | {"max_tokens": 60, "shift": True, "num_keep": num_keep}
        result = engine.chat(user(picture(seed=8), "hm"), **asked)
        engine._built.loop.call(engine._built.loop.check)
    room = 64 - result.usage.prompt_tokens
    assert result.usage.completion_tokens in ((60,) if num_keep else (room, room + 1))


def test_rows_of_images_have_no_log_probabilities(engine: Engine) -> None:
    found = engine.chat(user(picture(seed=1), "what?"), prompt_logprobs=1, **ASKED).prompt_logprobs
    assert found is not None
    assert found.count(None) == 1 + ROWS


def test_a_session_goes_on_behind_an_image(engine: Engine) -> None:
    session = engine.session()
    session.send([picture(seed=9), "what is it?"], **ASKED)
    second = session.send("and now?", **ASKED)
    assert second.usage.cached_tokens > ROWS


def test_forks_of_a_session_go_on_behind_an_image(engine: Engine) -> None:
    engine.clear_cache()
    before = encoded(engine)
    session = engine.session()
    session.send([picture(seed=11), "what is it?"], **ASKED)
    with session.fork() as fork:
        found = [one.send("and now?", **ASKED) for one in (session, fork)]
    assert found[0].token_ids == found[1].token_ids
    assert min(one.usage.cached_tokens for one in found) > ROWS
    assert encoded(engine) == before + 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_an_engine_in_another_process_reads_images_in_shared_memory(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = engine.chat(user("look: ", picture(seed=1), "and", picture(seed=2)), **ASKED)
    monkeypatch.setattr(shared, "LEAST", 1)
    with Engine(folder, process=True, **SETTINGS) as other:
        theirs = other.chat(user("look: ", picture(seed=1), "and", picture(seed=2)), **ASKED)
        image = other.image(picture(seed=1)).input
        assert shared.to_send(image).place is not None
    assert theirs.choices[0].token_ids == ours.choices[0].token_ids


def test_that_it_sees_is_known_before_it_is_loaded(engine: Engine, folder: Path) -> None:
    assert engine.sees
    found = capabilities.read(folder, None)
    assert "vision" in found
    assert found == capabilities.capabilities(engine.replies, sees=True, embeds=False)
    (folder / "preprocessor_config.json").rename(folder / "not.json")
    try:
        assert "vision" not in capabilities.read(folder, None)
    finally:
        (folder / "not.json").rename(folder / "preprocessor_config.json")


def test_over_http_the_same_image_is_the_same_prompt(engine: Engine) -> None:
    ours = engine.chat(user(picture(seed=1), "what is it?"), **ASKED)
    with Server(engine, ServeSettings(port=0)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        part = {"type": "image_url", "image_url": {"url": as_url(picture(seed=1))}}
        content = [part, {"type": "text", "text": "what is it?"}]
        body = {"messages": [{"role": "user", "content": content}], **ASKED}
        answer = http.post("/v1/chat/completions", json=body).json()
        tokenized = http.post("/tokenize", json={"messages": body["messages"]}).json()["count"]
        source = {"type": "base64", "media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]}
        asked = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, content[1]]}]}
        anthropic = http.post("/v1/messages/count_tokens", json={"model": engine.model.name, **asked}).json()
        seen = [
            {"type": "input_image", "image_url": part["image_url"]["url"]},
            {"type": "input_text", "text": "what is it?"},
        ]
        item = {"input": [{"role": "user", "content": seen}]}
        responses = http.post("/v1/responses/input_tokens", json=item).json()
    counted = [tokenized, anthropic["input_tokens"], responses["input_tokens"]]
    assert counted == 3 * [ours.usage.prompt_tokens]
    assert answer["usage"]["prompt_tokens"] == ours.usage.prompt_tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == ours.usage.prompt_tokens - 1
    assert answer["choices"][0]["message"]["content"] == ours.text
