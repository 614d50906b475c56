"""`kvcellar cluster serve`, as far as it goes without Ray; with it: tests/cluster/test_ray.py."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcellar import BadRequest, ModelNotFound
from kvcellar.cli.cluster import _engine, command


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


def test_a_model_that_is_not_found_is_named_before_anything_is_started() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        CliRunner().invoke(command, ["serve", "no-such-model", "--no-store"], catch_exceptions=False)


def test_without_ray_it_says_what_to_install_and_sets_no_variables() -> None:
    before = dict(os.environ)
    with pytest.raises(BadRequest, match=r"install kvcellar\[cluster\]"):
        CliRunner().invoke(command, ["serve", "--no-store"], catch_exceptions=False)
    assert dict(os.environ) == before


def test_paths_are_those_of_the_directory_in_which_it_was_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "style").mkdir()
    options = {"store": "kept", "draft": "ngram", "adapters": {"style": ["style"]}, "threads": None}
    expected = {"store": str(tmp_path / "kept"), "draft": "ngram", "adapters": {"style": [str(tmp_path / "style")]}}
    assert _engine(options) == expected
