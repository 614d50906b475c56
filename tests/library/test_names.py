"""Names of the library are a strict grammar: none leaves the library."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.library.names import ModelName
from kvcellar.places import NoPlace, models

HOSTILE = [
    "", ".", "..", "/", "a/", "/a", "../x", "a/..", "a/../b", "a/b/c", "a:b:c", "a:", ":b", "a:b/c", "-rf", ".a", "_a",
    "a..b", "a.", "a/b.", "a:b.", "a b", "a\n", "a\0b", "é", "e\u0301", "C:\\x", "a\\b", "~", "~/a", "a" * 81,
    "a:" + "b" * 81, "embedded", "Embedded:1", "embedded-vision", "x.json",
    "a/x.JSON", "😀", "a/b:c.json", "a\u2024b", "a%2e%2e",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(BadRequest):
        ModelName.parse(text)


@pytest.mark.parametrize(
    ("text", "whole"),
    [("a", "a:latest"), ("a:B", "a:B"), ("o/n", "o/n:latest"), ("O-1/n_2.x:7b-q4.K_M", "O-1/n_2.x:7b-q4.K_M")],
)
def test_a_name_has_a_tag(text, whole):
    assert str(ModelName.parse(text)) == whole
    assert ModelName.parse(whole) == ModelName.parse(text)


@given(st.text(alphabet="aA0.-_/:\\~ \0é\n", max_size=12) | st.text(max_size=12))
@example("con")
@example("a/a.json")
def test_no_name_leaves_the_library(text):
    try:
        name = ModelName.parse(text)
    except BadRequest:
        return
    parts = Path(name.path).parts
    assert 2 <= len(parts) <= 3
    assert not any(part.startswith((".", "/", "~")) or part in ("", "..") for part in parts)
    assert name.path.isascii()
    assert ModelName.parse(str(name)) == name
    assert [part.endswith(".json") for part in parts] == [False] * (len(parts) - 1) + [True], (
        "a file has no name inside"
    )


def test_where_the_library_is(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert models(home) == tmp_path / ".local/share/kvcellar/models"
    assert models({**home, "XDG_DATA_HOME": "/x"}) == Path("/x/kvcellar/models")
    assert models({**home, "XDG_DATA_HOME": "/x", "KVCELLAR_MODELS": "/y/z"}) == Path("/y/z")


@pytest.mark.parametrize("named", ["relative", "./x", "~/m", "/"])
def test_a_library_has_an_absolute_path_below_the_root(named):
    with pytest.raises(NoPlace, match="KVCELLAR_MODELS"):
        models({"HOME": "/", "KVCELLAR_MODELS": named})
