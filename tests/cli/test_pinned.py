"""`kvcellar serve --pin`: the file is checked line by line, and its prompts are in memory before the first request."""

import json
import re

import httpx
import pytest

from kvcellar.cli.serve import Line, pin_all, read_pinned
from kvcellar.errors import BadRequest, PromptTooLong
from kvcellar.events import Usage
from tests.cli.command import kvcellar, started

MESSAGES = [{"role": "system", "content": "You write short functions in Python, with types."}]


def test_a_file_has_a_prompt_on_each_line(tmp_path) -> None:
    file = tmp_path / "pins.jsonl"
    lines = [json.dumps({"prompt": "import os"}), "", '{"prompt": [5, 6]}', "  ", json.dumps({"messages": MESSAGES})]
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = read_pinned(file)
    assert [line.prompt for line in found] == ["import os", [5, 6], MESSAGES]
    assert [line.where for line in found] == [f"{file}, line {number}" for number in (1, 3, 5)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("5", 'it must be an object with either "prompt" or "messages"'),
        ("{}", "it must be an object"),
        ('{"prompt": "a", "messages": []}', "it must be an object"),
        ('{"text": "a"}', "it must be an object"),
        ('{"prompt": ""}', "prompt must be a text or a list of token ids, and not empty"),
        ('{"prompt": [5, true]}', "prompt must be a text or a list of token ids"),
        ('{"prompt": null}', "prompt must be a text"),
        ('{"messages": []}', "messages must be a list of messages, and not empty"),
        ('{"messages": ["a"]}', "messages must be a list of messages"),
        ("\udcff", "it is not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_before_a_model_is_loaded(monkeypatch, tmp_path, line, message) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvcellar.cli.hosting.Engine", load)
    file = tmp_path / "pins.jsonl"
    file.write_bytes(f'{{"prompt": "a"}}\n{line}\n'.encode(errors="surrogateescape"))
    ran = kvcellar("serve", "--no-store", "--port", "0", "--pin", str(file))
    assert (ran.code, ran.out) == (2, "")
    said = re.sub(r"\s+", " ", ran.err)
    assert f"Invalid value for '--pin': {file}, line 2: {message}" in said


def test_an_error_of_the_engine_names_the_line() -> None:
    class Engine:
        def pin(self, prompt: object, *, adapter: str | None) -> Usage:
            assert adapter == "poet"
            if prompt == "long":
                raise PromptTooLong(9, 8, "the model's context")
            return Usage(4, 3, 1)

    assert pin_all(Engine(), [Line("f, line 1", "a"), Line("f, line 2", "b")], "poet") == (
        "2 prompts with 8 tokens are pinned; 6 tokens did not have to be computed"
    )
    with pytest.raises(BadRequest, match=r"^f, line 7: .*9 tokens") as error:
        pin_all(Engine(), [Line("f, line 1", "a"), Line("f, line 7", "long")], "poet")
    assert error.value.param == "pin_file"


def test_prompts_are_pinned_before_the_first_request_and_found_with_every_salt(tmp_path) -> None:
    file = tmp_path / "pins.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    engine = ("--cache-bytes", "16M", "--threads", "1", "--max-sequences", "4", "--store", str(tmp_path / "store"))
    process = started(tmp_path, "serve", "--port", "0", "--pin", str(file), *engine)
    assert process.stderr is not None
    try:
        output = ""
        while not (found := re.search(r"Serving embedded at (http://127\.0\.0\.1:\d+)/v1", output)):
            line = process.stderr.readline()
            assert line, output
            output += line
        said = re.search(r"1 prompts with (\d+) tokens are pinned; 0 tokens did not have to be computed", output)
        assert said, output
        with httpx.Client(base_url=found[1], trust_env=False, timeout=240) as client:
            body = {"messages": [*MESSAGES, {"role": "user", "content": "def add"}], "max_tokens": 1}
            for salt in ("a", "b"):
                usage = client.post("/v1/chat/completions", json=body | {"cache_salt": salt}).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= int(said[1]) - 1
        process.terminate()
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
