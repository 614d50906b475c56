"""The scripts in examples/clients for packages with an environment of their own run there, as a person runs them.

tests/examples/test_clients.py runs the others.
"""

import re
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.serve import Server
from tests.clients.environment import printed

SCRIPTS = Path(__file__).parents[2] / "examples" / "clients"
TOLD = re.compile(r"^(\d+) of (\d+) tokens of the prompt came from memory$", re.M)


@pytest.fixture(autouse=True)
def _empty(engine: Engine) -> None:
    engine.cache.clear()


def ran(client: str, script: str, *arguments: str) -> str:
    return printed(client, SCRIPTS / f"{script}.py", *arguments)


@pytest.mark.parametrize(
    ("client", "script"), [("langchain-openai", "langchain_chat"), ("openai-agents", "agents_tool")]
)
def test_a_second_turn_comes_from_memory(server: Server, client: str, script: str) -> None:
    output = ran(client, script, server.url)
    (first, asked), (cached, prompt) = (map(int, numbers) for numbers in TOLD.findall(output))
    assert first == 0
    assert asked // 2 < cached < prompt


def test_langchain_gets_an_object(server: Server) -> None:
    assert re.search(r"^good=(True|False) mark=[1-5]$", ran("langchain-openai", "langchain_chat", server.url), re.M)


def test_an_agent_tells_the_result_of_its_tool(server: Server) -> None:
    assert ran("openai-agents", "agents_tool", server.url).count("'12 lines'\n") == 2


def test_litellm_gets_one_answer_by_three_routes(server: Server) -> None:
    output = ran("litellm", "litellm_chat", server.url)
    told = re.findall(r"^(\w+): (\d+) tokens of the prompt; from memory: (.+)\n(.+)$", output, re.M)
    routes, prompts, cached, answers = zip(*told, strict=True)
    assert routes == ("openai", "anthropic", "ollama_chat")
    assert len(set(prompts)) == len(set(answers)) == 1
    assert cached[0] == "0"
    assert 0 < int(cached[1]) < int(prompts[1])


def test_instructor_gets_an_object(server: Server) -> None:
    assert re.fullmatch(r"(?s).* has [1-9]\d{0,2} pages\n", ran("instructor", "instructor_objects", server.url))


def test_lm_eval_prefers_the_continuation_that_is_python(server: Server) -> None:
    found = re.findall(r"has log-likelihood (-\d+\.\d+); ", ran("lm-eval", "lm_eval_scores", server.url))
    python, other = map(float, found)
    assert other < python < 0


def test_guidellm_tells_the_times_of_a_benchmark(server: Server, model: Path) -> None:
    output = ran("guidellm", "guidellm_benchmark", server.url, str(model))
    assert "6 requests succeeded and 0 failed\n" in output
    assert re.search(r"^time to first token: \d+\.\d ms at the median$", output, re.M)
