"""Packages of others, each in a process and an environment of its own, with the server and the embedded model, which
gets a chat template with tools.

`python -m scripts.client_environments FOLDER` makes the environments; the tests find them by KVCELLAR_CLIENTS.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.models import embedded
from kvcellar.serve import Server, ServeSettings
from tests.engine.mixes import assert_at_rest
from tests.serve.fake_engine import PATIENCE
from tests.text.replies.chats import chat

# Calls, but no reasoning, which would be free in front of a required call, and which this model would not end.
CALLS = """{% for c in m.tool_calls or [] %}
<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("models") / "caller"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(chat(CALLS))
    with Engine(path, dtype="float32", device="cpu", cache_bytes=64_000_000, threads=1) as engine:
        yield engine
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server


def run(client: str, program: str, *arguments: str) -> Any:
    """What the program of this client prints last, as JSON. Skips the test where the client has no environment."""
    folder = os.environ.get("KVCELLAR_CLIENTS")
    python = Path(folder or "/nonexistent") / client / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{client} has no environment in KVCELLAR_CLIENTS; see scripts/client_environments.py")
    quiet = {"OPENAI_API_KEY": "any", "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [python, PROGRAMS / program, *arguments],
        env=kept | quiet,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def is_city(found: dict[str, Any]) -> bool:
    return found["name"] in ("Paris", "Rome") and 0 <= found["rivers"] <= 9


def test_instructor_makes_objects(server: Server, engine: Engine) -> None:
    """It breaks where a named tool choice, or a schema that is not strict, is not honoured."""
    found = run("instructor", "with_instructor.py", server.url, engine.model.name)
    assert set(found) == {"TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"}
    assert all(map(is_city, found.values()))


def test_langchain_gets_structured_output_calls_and_streams(server: Server, engine: Engine) -> None:
    """It breaks on a call beside content that is not null, on `parallel_tool_calls`, and on a stream without usage."""
    found = run("langchain-openai", "with_langchain.py", server.url, engine.model.name)
    assert is_city(found["json_schema"])
    assert is_city(found["function_calling"])
    assert set(found["call"]) == {"City"}
    assert found["stream"]["tokens"] == 8
    assert found["invoke"]


def test_litellm_gets_the_same_answer_by_each_api(server: Server, engine: Engine) -> None:
    """It breaks on content in parts, on a key in `x-api-key`, and on `/api/show` without what it reads there."""
    found = run("litellm", "with_litellm.py", server.url, engine.model.name)
    own = engine.chat([{"role": "user", "content": "Which city?"}], max_tokens=8, temperature=0.0)
    for told in found.values():
        assert (told["text"], told["streamed"]) == (own.text, own.text)
        assert (told["prompt_tokens"], told["completion_tokens"]) == (own.usage.prompt_tokens, 8)


def test_agents_call_a_tool_and_go_on_with_its_result(server: Server, engine: Engine) -> None:
    """It breaks on items without ids, on the events of a call, and on `include`."""
    found = run("openai-agents", "with_agents.py", server.url, engine.model.name)
    assert len(found) == 2
    for told in found.values():
        assert (told["calls"], told["outputs"]) == (2, ["two rivers"] * 2)
        assert told["kinds"] == ["message", "function_call", "function_call_output"]
        assert {"response.output_item.done", "response.completed"} <= set(told["events"])


def test_lm_eval_scores_continuations_as_the_engine_does(server: Server, engine: Engine) -> None:
    """It breaks on `echo` with token ids, on scores of a prompt that begin elsewhere, and on rounded scores."""
    found = run("lm-eval", "with_lm_eval.py", server.url, engine.model.name)
    for pair, (score, _) in zip(found["pairs"], found["scores"], strict=True):
        ids = pair["context"] + pair["continuation"]
        scored = engine.generate(ids, max_tokens=1, temperature=0.0, prompt_logprobs=1).prompt_logprobs
        assert scored is not None
        own = [entry.logprob for entry in scored[len(pair["context"]) :]]
        assert math.isclose(score, sum(own), rel_tol=1e-6)
    assert found["text"] == [engine.generate(found["prompt"], max_tokens=8, temperature=0.0).text.split("\n\n")[0]]
