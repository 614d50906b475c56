"""Images at every door of the server: what reaches the model, and which field of a body is at fault."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.fake_images import PNG, FakeImages
from tests.serve.wire import MODEL

CAT, DOG = PNG + b"cat", PNG + b"dog"


def data(image: bytes) -> str:
    return base64.b64encode(image).decode()


def url(image: bytes) -> str:
    return f"data:image/png;base64,{data(image)}"


def shown(image: bytes) -> str:
    """What the fake engine's template writes for an image."""
    return f"[{hashlib.sha256(image).hexdigest()[:6]}]"


@pytest.fixture(scope="module")
def seeing() -> Iterator[tuple[FakeEngine, httpx.Client]]:
    with FakeEngine(images=FakeImages()) as engine, Server(engine, ServeSettings(port=0)) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
            yield engine, http


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def openai(image: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(image: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": image}


def said(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


def looked(image: str) -> dict[str, Any]:
    """A result of a tool, as the Responses API has it."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [picture(image)]}
    return {"input": [{"role": "user", "content": "x"}, call, result]}


def anthropic(image: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [text("seen"), anthropic(data(DOG))]}
X = {"role": "user", "content": "x"}

SENT: list[tuple[str, dict[str, Any], str]] = [  # route, body, and the prompt
    ("/v1/chat/completions", chat(text("a"), openai(url(CAT), detail="low")), f"<user>a+{shown(CAT)}"),
    ("/v1/chat/completions", chat(openai(url(CAT))), f"<user>{shown(CAT)}"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": url(DOG)}, text("b")), f"<user>{shown(DOG)}+b"),
    (
        "/v1/responses",
        said({"type": "input_text", "text": "a"}, picture(url(CAT))),
        f"<user>a+{shown(CAT)}",
    ),
    (
        "/v1/responses",
        looked(url(DOG)),
        shown(DOG),
    ),
    ("/v1/messages", {"max_tokens": 9, **chat(anthropic(data(CAT)), text("a"))}, f"<user>{shown(CAT)}+a"),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": [X, USE, {"role": "user", "content": [RESULT, text("a")]}]},
        f"seen+{shown(DOG)}",
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [X, USE, {"role": "user", "content": [RESULT | {"is_error": True}]}],
        },
        f"Error: seen+{shown(DOG)}",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": [data(CAT), data(DOG)]}]},
        f"<user>{shown(CAT)}+{shown(DOG)}+a",
    ),
    ("/api/generate", {"prompt": "a", "images": [data(CAT)]}, f"<user>{shown(CAT)}+a"),
    ("/tokenize", chat(openai(url(CAT)), text("a")), f"<user>{shown(CAT)}+a"),
    ("/v1/messages/count_tokens", chat(anthropic(data(CAT)), text("a")), f"<user>{shown(CAT)}+a"),
    ("/v1/responses/input_tokens", said(picture(url(CAT))), f"<user>{shown(CAT)}"),
]


@pytest.mark.parametrize(("route", "body", "prompt"), SENT)
def test_images_are_where_they_were_sent(
    seeing: tuple[FakeEngine, httpx.Client], route: str, body: dict[str, Any], prompt: str
) -> None:
    engine, http = seeing
    engine.seen.clear()
    response = http.post(route, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    if route in ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        found = response.json()
        assert found.get("count", found.get("input_tokens")) == len(prompt)
    else:
        assert prompt in bytes(engine.seen[-1][0]).decode()


def bodies(source: str) -> list[tuple[str, dict[str, Any], str]]:
    """Bodies with one image, as its data in base64, and the field that has it."""
    link = source if ":" in source else f"data:image/png;base64,{source}"
    found: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", chat(text("a"), openai(link)), "messages[0].content[1].image_url"),
        (
            "/v1/responses",
            said({"type": "input_text", "text": "a"}, picture(link)),
            "input[0].content[1].image_url",
        ),
        (
            "/v1/responses",
            looked(link),
            "input[2].output[0].image_url",
        ),
    ]
    if ":" in source:
        block = {"type": "image", "source": {"type": "url", "url": source}}
    else:
        block = anthropic(source)
        found += [
            (
                "/api/chat",
                {"messages": [{"role": "user", "content": "a", "images": [source]}]},
                "messages[0].images[0]",
            ),
            ("/api/generate", {"prompt": "a", "images": [source]}, "images[0]"),
        ]
    result = {"role": "user", "content": [RESULT | {"content": [text("seen"), block]}]}
    return [
        *found,
        ("/v1/messages", {"max_tokens": 9, **chat(text("a"), block)}, "messages[0].content[1].source"),
        ("/v1/messages", {"max_tokens": 9, "messages": [X, USE, result]}, "messages[2].content[0].content[1].source"),
    ]


WRONG = [
    (data(b"GIF"), "it is no image of a known format"),
    ("!!", "the image is not valid base64"),
    ("http://169.254.169.254/", "images are not fetched from '169.254.169.254'"),
    ("file:///etc/passwd", "'file:///etc/passwd': an image may be a data: URL"),
]


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(
    ("route", "body", "field", "why"), [(*one, why) for source, why in WRONG for one in bodies(source)]
)
def test_the_field_of_a_wrong_image_is_named(
    seeing: tuple[FakeEngine, httpx.Client], route: str, body: dict[str, Any], field: str, why: str
) -> None:
    response = seeing[1].post(route, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert message_of(response).startswith(f"{field}: {why}"), message_of(response)


@pytest.mark.parametrize(("route", "body", "field"), bodies(data(CAT)))
def test_a_model_that_does_not_see_says_why(http: httpx.Client, route: str, body: dict[str, Any], field: str) -> None:
    response = http.post(route, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert message_of(response) == f"{field}: this model takes no images: it is a fake"


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": "x"}}), "here for video"),
        ("/v1/chat/completions", chat({"type": "file", "file": {}}), "here for files"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "here for files"),
        (
            "/v1/chat/completions",
            chat(text("a"), {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}),
            "be of text or an image: there is no encoder here for audio; send its words as text",
        ),
        (
            "/v1/responses",
            said({"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}),
            "there is no encoder here for audio; send its words as text",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                **chat({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}),
            },
            "the type 'document', which cannot stand here; this server reads text, images of the user and of tools, "
            "and calls: there is no encoder here for files; send their text, or their pages as images",
        ),
        ("/api/generate", {"prompt": "a", "raw": True, "images": ["QQ=="]}, "images need a chat template"),
    ],
)
def test_what_is_no_image_is_refused_by_name(
    seeing: tuple[FakeEngine, httpx.Client], route: str, body: dict[str, Any], field: str
) -> None:
    response = seeing[1].post(route, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert field in message_of(response)


def test_ollama_shows_which_models_see(seeing: tuple[FakeEngine, httpx.Client], http: httpx.Client) -> None:
    for client, sees in ((seeing[1], True), (http, False)):
        found = client.post("/api/show", json={"model": MODEL}).json()["capabilities"]
        assert ("vision" in found) == sees
