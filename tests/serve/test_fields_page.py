"""docs/openai-fields.md lists the fields that the code has, and no others."""

import json
import re
from pathlib import Path

from kvcellar.serve.fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.messages import MESSAGE_NO_EFFECT, Message
from kvcellar.serve.requests import ChatBody, CommonBody, CompletionBody, StreamOptions

PAGE = (Path(__file__).parents[2] / "docs" / "openai-fields.md").read_text()
TABLES = [  # rows of each table in the order of the page: the names in the first column, and the last column
    [(re.findall(r"`(\w+)`", row.split("|")[1]), row.split("|")[-2].strip()) for row in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
]
COMMON, COMPLETION, CHAT, STREAM, WITHOUT, NOTHING, MESSAGE, MESSAGE_WITHOUT = TABLES


def names(table: list[tuple[list[str], str]]) -> list[str]:
    return [name for row, _ in table for name in row]


def test_implemented_fields_are_on_the_page() -> None:
    common = set(CommonBody.model_fields)
    assert sorted(names(COMMON)) == sorted(common)
    assert sorted(names(COMPLETION)) == sorted(set(CompletionBody.model_fields) - common)
    assert sorted(names(CHAT)) == sorted(set(ChatBody.model_fields) - common)
    assert sorted(names(STREAM)) == sorted(StreamOptions.model_fields)
    assert sorted(names(MESSAGE) + names(MESSAGE_WITHOUT)) == sorted(Message.model_fields)


def test_fields_without_effect_are_on_the_page_with_the_reason() -> None:
    for table, code in ((WITHOUT, NO_EFFECT), (MESSAGE_WITHOUT, MESSAGE_NO_EFFECT)):
        assert {row[0]: why for row, why in table} == dict(code)


def test_neutral_values_are_on_the_page() -> None:
    shown = {row[0]: [json.loads(value) for value in re.findall(r"`([^`]*)`", values)] for row, values in NOTHING}
    assert shown == {name: list(values) for name, values in NEUTRAL.items()}
