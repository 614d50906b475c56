"""An invalid key file is an error with the line, never a server without keys; and no message contains a key."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.serve.http.keys import MAX_BYTES, VARIABLE, named_keys, permission_warning
from kvcellar.serve.settings import key_digest

ONE, TWO = "sk-first-key", "sk-second-key"
DIGESTS = (key_digest(ONE), key_digest(TWO))


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "keys.txt"


@pytest.mark.parametrize(
    "content",
    [
        f"{ONE}\n{TWO}\n",
        f"{ONE}\n{TWO}",
        f"\n  {ONE}\t\n\n# of the second team\n   # another comment\n{TWO} \n\n",
        f"{ONE}\r\n{TWO}\r\n",
        f"\ufeff{ONE}\n{TWO}\n",
    ],
    ids=["lines", "no end of line", "spaces and comments", "carriage returns", "byte order mark"],
)
def test_each_line_is_a_key_without_surrounding_whitespace(file, content):
    file.write_bytes(content.encode())
    assert tuple(named_keys(file, {})) == DIGESTS


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\r\n", "# sk-first-key\n", "\ufeff", "\ufeff\n#\n"], ids=ascii)
def test_a_file_without_any_key_is_refused(file, content):
    file.write_bytes(content.encode())
    with pytest.raises(BadRequest, match=f"{file} has no key") as refusal:
        named_keys(file, {VARIABLE: TWO})
    assert refusal.value.param == "api_key_file"


WRONG = {
    "a space inside": (b"sk secret", "a key has no spaces inside"),
    "a tab inside": (b"sk-sec\tret", "a key has no spaces inside"),
    "a control character": (b"sk-sec\x00ret", "visible ASCII"),
    "an escape": (b"\x1b[31msecret", "visible ASCII"),
    "a line separator of Unicode": ("sk-sec\u2028ret".encode(), "no spaces inside"),
    "a form feed": (b"sk-sec\x0cret", "no spaces inside"),
    "a letter beyond ASCII": ("sk-s\u00e9cret".encode(), "visible ASCII"),
    "a byte order mark in the middle": ("\ufeffsk-secret".encode(), "visible ASCII"),
    "not UTF-8": (b"sk-secret\xff", "it is not UTF-8"),
    "UTF-16": ("sk-secret".encode("utf-16"), "it is not UTF-8"),
    "too short": (b"secret", "8 to 1024 characters, this one has 6"),
    "too long": (b"secret" * 200, "8 to 1024 characters, this one has 1200"),
    "twice": (ONE.encode(), "is on line 1 already"),
}


@pytest.mark.parametrize(("line", "why"), WRONG.values(), ids=WRONG)
def test_an_invalid_line_is_reported_without_its_text(file, line, why):
    file.write_bytes(f"{ONE}\n\n".encode() + line + f"\n{TWO}\n".encode())
    with pytest.raises(BadRequest, match=rf"{file}, line 3: .*{why}") as refusal:
        named_keys(file, {})
    assert "secret" not in str(refusal.value)
    assert ONE not in str(refusal.value)


def test_unreadable_files_are_reported(tmp_path, file):
    with pytest.raises(BadRequest, match=f"{file} cannot be read: No such file"):
        named_keys(file, {})
    with pytest.raises(BadRequest, match=f"{tmp_path} cannot be read: Is a directory"):
        named_keys(tmp_path, {})
    file.write_bytes(b"k" * (MAX_BYTES + 1))
    with pytest.raises(BadRequest, match="larger than"):
        named_keys(file, {})


@pytest.mark.parametrize("value", ["", " ", "\t", "\n"])
def test_an_empty_variable_is_refused(value):
    with pytest.raises(BadRequest, match=r"\$KVCELLAR_API_KEY is set but empty"):
        named_keys(None, {VARIABLE: value})


def test_the_variable_is_one_more_key(file):
    assert tuple(named_keys(None, {})) == ()
    assert tuple(named_keys(None, {VARIABLE: f" {TWO} "})) == DIGESTS[1:]
    file.write_text(f"{ONE}\n{TWO}\n")
    assert tuple(named_keys(file, {VARIABLE: TWO})) == DIGESTS
    with pytest.raises(BadRequest, match=r"\$KVCELLAR_API_KEY: a key has no spaces") as refusal:
        named_keys(None, {VARIABLE: "a secret with spaces"})
    assert "secret" not in str(refusal.value)


@given(st.binary(max_size=80))
def test_any_bytes_give_keys_or_an_error(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.txt"
    file.write_bytes(content)
    with suppress(BadRequest):
        assert named_keys(file, {})


@pytest.mark.parametrize(
    ("mode", "danger"), [(0o600, None), (0o640, None), (0o644, "read"), (0o660, "change"), (0o602, "change")]
)
def test_a_file_that_other_users_can_read_or_change_gives_a_warning(file, mode, danger):
    file.write_text(ONE)
    os.chmod(file, mode)
    found = permission_warning(file)
    assert (found is None) == (danger is None)
    assert danger is None or f"can {danger} these keys" in found
