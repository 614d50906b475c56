"""The scripts in examples/clients run as a person runs them, against a server with the embedded model."""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
RUN = {"openai_chat", "openai_responses", "anthropic_messages", "ollama_chat", "http_stream"}
# Their packages bring along a hundred others, some with other versions than ours: tests/clients runs them where they
# have environments of their own, and here they are compiled only.
COMPILED = {
    "agents_tool": "openai-agents",
    "guidellm_benchmark": "guidellm",
    "instructor_objects": "instructor",
    "langchain_chat": "langchain-openai",
    "litellm_chat": "litellm",
    "lm_eval_scores": "'lm-eval[api]'",
}
TOLD = re.compile(r"^(\d+) of (\d+) tokens of the prompt came from memory$", re.M)
READ = re.compile(r"^(\d+) tokens of the prompt were read in \d+ ms$", re.M)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Its memory is empty."""
    with Engine(threads=1, cache_bytes=64_000_000) as engine:
        yield engine


@pytest.fixture
def address(engine: Engine) -> Iterator[str]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server.url


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """As a command. Its modules and `sys.argv` are its own."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(CLIENTS / f"{name}.py"), run_name="__main__")


def test_every_script_is_tested_here() -> None:
    assert {path.stem for path in CLIENTS.glob("*.py")} == RUN | set(COMPILED)


@pytest.mark.parametrize("name", sorted(RUN - {"ollama_chat"}))
def test_a_script_prints_how_much_of_the_second_turn_came_from_memory(
    name, engine, address, monkeypatch, capsys
) -> None:
    run(name, monkeypatch, address)
    (first, asked), (cached, prompt) = (map(int, numbers) for numbers in TOLD.findall(capsys.readouterr().out))
    assert first == 0
    assert asked <= cached < prompt, "all of the first prompt is the beginning of the second"
    found = engine.stats().prefixes
    assert (found.restored, found.asked) == (cached, asked + prompt - 2), (
        "the last token of a prompt is always computed"
    )


def test_the_script_for_ollama_prints_how_long_reading_a_prompt_took(engine, address, monkeypatch, capsys) -> None:
    run("ollama_chat", monkeypatch, address)
    asked, prompt = map(int, READ.findall(capsys.readouterr().out))
    found = engine.stats().prefixes
    assert found.asked == asked + prompt - 2
    assert asked <= found.restored < prompt


def test_the_conversation_of_the_stream_without_a_package_is_deleted_at_its_end(engine, address, monkeypatch) -> None:
    run("http_stream", monkeypatch, address)
    assert not engine.conversations.list()


@pytest.mark.parametrize("name", sorted(RUN))
def test_without_an_address_a_script_says_what_is_missing(name, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(name, monkeypatch)
    assert "required: address" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "package"), sorted(COMPILED.items()))
def test_a_script_for_a_package_that_is_not_installed_compiles_and_says_how_to_install_it(name, package) -> None:
    tree = ast.parse((CLIENTS / f"{name}.py").read_text())
    compile(tree, name, "exec")
    assert f"pip install {package}`" in str(ast.get_docstring(tree))
