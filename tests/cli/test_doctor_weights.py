"""`kvcellar doctor --weights`: what quantised weights change, before they are chosen."""

import json
import os
from pathlib import Path

import pytest

from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.quantised import QuantisedKernel
from tests.cli.command import kvcellar

SMALL = ("--no-kv-quality", "--cache-bytes", "8M", "--threads", "1")
TEXT = "The cache keeps what was computed, and a later request finds it. " * 12


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        QuantisedKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(f"not compiled here: {error}")


def test_the_harm_on_a_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    ran = kvcellar("doctor", "--weights", "int4", "--text", str(tmp_path / "text.txt"), "--json", *SMALL)
    found = json.loads(ran.out)
    harm = found["weights_harm"]
    assert harm["text"] == "the given text"
    assert 0.01 < harm["kl"] < 0.2
    assert 0.6 < harm["top1"] < 1
    assert any("24 in 4 bits, 1 in 8 bits" in note for note in found["notes"])


def test_a_text_says_nothing_about_dense_weights(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    ran = kvcellar("doctor", "--weights", "dense", "--text", str(tmp_path / "text.txt"), *SMALL)
    assert ran.code == 2
    assert "weights is dense" in ran.err


def test_weights_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    ran = kvcellar("doctor", "--weights", "int3", *SMALL)
    assert ran.code == 2
    assert "weights must be auto, int8, int4, mixed or dense, not 'int3'" in ran.err
