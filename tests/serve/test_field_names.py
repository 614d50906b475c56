"""Errors about parameters of the engine name the fields of an API."""

import pytest

from kvcellar.errors import BadRequest, PromptTooLong
from kvcellar.serve.generation.field_names import naming_fields

NAMES = {"prompt": "input", "messages": "input", "stop": "stop_sequences", "max_tokens": "num_predict"}


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (BadRequest("max_tokens must be 1", "max_tokens"), "num_predict", "num_predict must be 1"),
        (BadRequest("every string needs 1", "stop"), "stop_sequences", "stop_sequences: every string needs 1"),
        (BadRequest("prompt: -1 is no id", "prompt"), "input", "input: -1 is no id"),
        (BadRequest("this model has no tokenizer", "prompt"), "input", "input: this model has no tokenizer"),
        (BadRequest("messages[1].role is wrong", "messages[1].role"), "input", "input: messages[1].role is wrong"),
        (BadRequest("stop[2] is wrong", "stop[2]"), "stop_sequences[2]", "stop_sequences[2] is wrong"),
        (BadRequest("top_p is wrong", "top_p"), "top_p", "top_p is wrong"),
        (BadRequest("all is wrong"), None, "all is wrong"),
        (PromptTooLong(5, 4, "x"), "input", "the prompt has 5 tokens; x allows 4. Shorten the prompt"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(error: BadRequest, param: str | None, message: str) -> None:
    with pytest.raises(type(error)) as raised, naming_fields(NAMES):
        raise error
    assert (raised.value.param, raised.value.message) == (param, message)
