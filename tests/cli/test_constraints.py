"""`kvcellar run` with a schema, a regular expression, choices or a grammar."""

import json
import re
from pathlib import Path

import pytest

from kvcellar.constraint import MAX_SOURCE_BYTES
from tests.cli.command import kvcellar

RUN = ("run", "--raw", "--threads", "1", "--cache-bytes", "32M", "--temperature", "1", "--seed", "1")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_each_option_constrains_the_answer(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar").write_text('root ::= "<" [a-c]{2,3} ">"')
    found = kvcellar(*RUN, "--json-schema", str(tmp_path / "schema"), "embedded", "x = ")
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out)["a"] in range(10)
    found = kvcellar(*RUN, "--grammar", str(tmp_path / "grammar"), "embedded", "x = ")
    assert re.fullmatch("<[a-c]{2,3}>\n", found.out)
    found = kvcellar(*RUN, "--regex", "[0-9]{3}", "embedded", "x = ")
    assert re.fullmatch("[0-9]{3}\n", found.out)
    found = kvcellar(*RUN, "--choice", "yes, it is", "--choice", "no", "embedded", "x = ")
    assert found.out in ("yes, it is\n", "no\n")


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--json-schema", b"{", "'--json-schema': .*made of JSON"),
        ("--json-schema", b'{"not": {}}', "'--json-schema': .*Unimplemented keys: .\"not\"."),
        ("--json-schema", b"\xff", "'--json-schema': .*not UTF-8 text: byte 0"),
        ("--grammar", b"nothing", "'--grammar': .*neither Lark"),
        ("--grammar", b"a" * (MAX_SOURCE_BYTES + 1), "'--grammar': .*262144 are allowed"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_an_error_of_its_option(
    tmp_path: Path, option: str, content: bytes, says: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    found = kvcellar(*RUN, option, str(tmp_path / "file"), "embedded", "x")
    assert (found.code, found.out) == (2, "")
    assert re.search(says, found.err)


def test_only_one_of_them_may_be_given() -> None:
    found = kvcellar(*RUN, "--regex", "a", "--choice", "b", "embedded", "x")
    assert (found.code, found.out) == (2, "")
    assert "give one of --json-schema, --regex, --choice and --grammar" in found.err
