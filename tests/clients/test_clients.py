"""Packages of others, each in a process and an environment of its own, with a server.

`python -m scripts.client_environments FOLDER` makes the environments; the tests find them by KVCELLAR_CLIENTS.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.serve import Server
from tests.clients.environment import run


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


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_reports_no_failed_request_and_the_tokens_of_each(
    server: Server, engine: Engine, model: Path, route: str
) -> None:
    """It breaks on `continuous_usage_stats`, `ignore_eos` and `stop: null`, on a stream without usage, and on a
    `/health` that is not there."""
    found = run("guidellm", "with_guidellm.py", server.url, engine.model.name, str(model), route)
    totals = found["totals"]
    assert (totals["errored"], totals["incomplete"], totals["successful"]) == (0, 0, 6)
    assert len(found["requests"]) == 6
    for told in found["requests"]:
        sent = told["sent"]
        if "prompt" in sent:
            prompt = engine.encode(sent["prompt"])
        else:  # items of a response may be messages as they are
            (message,) = sent.get("messages") or sent["input"]
            text = "".join(part["text"] for part in message["content"])
            prompt = engine.render([{"role": "user", "content": text}])
        assert (told["prompt_tokens"], told["completion_tokens"]) == (len(prompt), 8)
        assert told["output"]
