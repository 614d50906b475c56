"""`kvcellar create` from a GGUF file: the model runs as the one that was converted; a bad file is named."""

import json
from pathlib import Path

import pytest

from kvcellar.library.library import Library
from tests.cli.command import kvcellar
from tests.models import gguf_files as gguf
from tests.models.test_gguf_import import rounded

RUN = ("--ids", "5 6 7 8 9", "--max-tokens", "8", "--threads", "1", "--cache-bytes", "32M", "--dtype", "float32")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library of the user; the working directory has the same model twice."""
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    model = rounded("qwen3", max_position_embeddings=2048)
    gguf.convert(model, tmp_path / "work/m.gguf", gguf.F16, extra={"general.sampling.temp": 0.0})
    model.bfloat16().save_pretrained(tmp_path / "work/m")
    (tmp_path / "work/Modelfile").write_text("FROM ./m.gguf\n")
    return Library(tmp_path / "models")


def test_a_model_of_a_gguf_file_runs_as_the_one_it_was_converted_from(library: Library) -> None:
    made = kvcellar("create", "a", "--json")
    assert (made.code, made.err) == (0, "")
    assert json.loads(made.out)["architecture"] == "qwen3"
    expected = kvcellar("run", "./m", *RUN, "--temperature", "0")
    assert expected.code == 0
    assert kvcellar("run", "a", *RUN, "--temperature", "0").out == expected.out
    again = kvcellar("create", "b", "--json")
    assert json.loads(again.out)["id"] == json.loads(made.out)["id"]


def test_it_is_quantised_as_it_is_imported(library: Library) -> None:
    assert kvcellar("create", "a", "--quantize", "int8").code == 0
    assert library.manifest("a").quantized == "int8"


def test_a_bad_file_leaves_nothing(library: Library) -> None:
    file = Path("m.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    ran = kvcellar("create", "a")
    assert ran.code == 1
    assert "line 1" in ran.err
    assert "m.gguf is no GGUF file that can be read" in ran.err
    assert library.names() == ()
