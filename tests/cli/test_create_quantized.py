"""`kvcellar create --quantize`: what is stored, printed and computed with."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from kvcellar.engine.models import embedded
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize import measuring
from kvcellar.engine.models.quantize.measuring import measure_harm
from kvcellar.library.library import Library
from tests.cli.test_models import run
from tests.models.quantised import densified, saved
from tests.models.test_quantize import same_network


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library of the user; the working directory has a model `m`, a Modelfile, and a text."""
    for name in ("WINDOWS", "CALIBRATED"):
        monkeypatch.setattr(measuring, name, 2)
    for name in ("LENGTH", "CALIBRATED_LENGTH"):
        monkeypatch.setattr(measuring, name, 32)
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    saved(tmp_path / "m", num_hidden_layers=2)
    (tmp_path / "Modelfile").write_text("FROM ./m\n")
    (tmp_path / "text").write_text("def read(path):\n    return path\n" * 40)
    monkeypatch.chdir(tmp_path)
    return Library(tmp_path / "models")


def types(path: Path) -> set[str]:
    with safe_open(path / "model.safetensors", framework="pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}


@pytest.mark.parametrize(("kind", "stored"), [("fp8", {"BF16", "I8"}), ("int4", {"BF16", "I32", "I64"})])
def test_a_created_model_is_that_of_its_decoded_weights(library: Library, kind: str, stored: set[str]) -> None:
    printed = run("create", "a", "-q", kind).out
    model = library.resolve("a")
    assert types(model.directory) == stored
    assert "same most likely token" in printed
    assert ("fp8 (8-bit integers)" in printed) == (kind == "fp8")
    same_network(model.directory, densified(model.directory, Path("m"), Path("dense")))


def test_the_stored_report_is_what_a_recount_gives(library: Library) -> None:
    run("create", "a", "-q", "mixed", "--calibrate")
    model = library.resolve("a")
    assert model.manifest.report is not None
    report = model.manifest.report["model"]
    assert report["method"] == "gptq"
    assert report["calibration"]["text"] == "sampled from the model"
    assert report["harm"] == measure_harm(Path("m"), model.directory)
    again = json.loads(run("create", "b", "-q", "mixed", "--calibrate", "--json").out)
    assert again["id"] == model.id


def test_a_quantized_draft_has_a_report_of_its_own(library: Library) -> None:
    saved(Path("d"), num_hidden_layers=1, vocab_size=101)
    Path("Modelfile").write_text("FROM ./m\nDRAFT ./d\n")
    printed = run("create", "a", "-q", "int4", "--draft-quantize", "int8", "--calibrate").out
    assert "model: int4 by gptq: " in printed
    assert "draft: int8: " in printed
    model = library.resolve("a")
    assert model.draft is not None
    assert types(model.draft) == {"BF16", "I8"}
    assert load(model.draft).parameters < load(model.directory).parameters


def test_a_text_calibrates(library: Library) -> None:
    (Path("e")).symlink_to(embedded.path())
    Path("Modelfile").write_text("FROM ./e\n")
    assert (
        "calibrated on 64 tokens: the given text"
        in run(*("create", "a", "-q", "int4", "--calibration-text", "text")).out
    )


def test_calibration_needs_codes_of_4_bits(library: Library) -> None:
    assert "add --quantize int4 or mixed" in run("create", "a", "--calibrate", code=2).err
    assert "chooses codes of 4 bits; int8 has none" in run("create", "a", "-q", "int8", "--calibrate", code=1).err
    assert "does not exist" in run("create", "a", "-q", "int4", "--calibration-text", "none", code=2).err
    assert library.names() == ()
