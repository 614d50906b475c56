"""OpenAI's package, the server and the real engine with a template that has tools: required calls fit their schema."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvcellar import Engine
from kvcellar.models import embedded
from kvcellar.serve import Server, ServeSettings
from tests.engine.test_replies import TOOLS
from tests.serve.fake_engine import PATIENCE
from tests.text.templates import THINKER

ASKED = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
# Reasoning is free in front of a required call, and this model would not end it.
THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    path = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(THINKER)
    with (
        Engine(path, threads=1) as engine,
        Server(engine, ServeSettings(port=0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def fits(arguments: str) -> bool:
    given = json.loads(arguments)
    return set(given) == {"days", "unit"} and 0 <= given["days"] <= 9 and given["unit"] in ("C", "F")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_fits_its_schema(client, choice):
    model = client.models.list().data[0].id
    body = {"model": model, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    body |= {"max_tokens": 400, "temperature": 0, "extra_body": THOUGHTLESS}
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert fits(whole.message.tool_calls[0].function.arguments)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_responses_api_requires_the_same_call(client):
    model = client.models.list().data[0].id
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = {"model": model, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"max_output_tokens": 400, "temperature": 0, "extra_body": THOUGHTLESS}
    made = client.responses.create(input=ASKED, **body)
    call = made.output[-1]
    assert (made.status, call.type) == ("completed", "function_call")
    assert fits(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(input=[result], previous_response_id=made.id, **body)
    assert fits(again.output[-1].arguments)
