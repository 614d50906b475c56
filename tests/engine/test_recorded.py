"""Engines with recorded steps: the same text, with less of torch; what they report; what modules run in their place."""

from pathlib import Path

import pytest
import torch

from kvcellar import BadRequest, Engine
from kvcellar.engine.settings import Settings
from kvcellar.models.recording.saved import Programs
from kvcellar.verify.diagnosis import diagnose
from tests.zoo import ARCHS

SMALL = {"cache_bytes": 2_000_000, "threads": 1}
PROMPT = list(range(3, 24))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recordings are kept here, instead of in the user's cache."""
    monkeypatch.setattr("kvcellar.engine.recorded.programs", lambda _: Programs(tmp_path))
    return tmp_path


def ids(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, max_tokens=12, temperature=0).choices[0].token_ids)


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_text_is_the_same_with_recorded_steps(name: str, kept: Path) -> None:
    model = ARCHS[name].build().to(torch.bfloat16)
    with Engine(model, **SMALL) as plain, Engine(model, record="auto", **SMALL) as engine:
        assert plain.stats().recording.refused == "record is off"
        found = engine.stats().recording
        assert (found.refused, found.executor, found.by_modules) == (None, "native", {})
        assert ids(engine) == ids(plain)
        assert engine.stats().recording.steps > found.steps
    assert len(list(kept.iterdir())) == 1


def test_without_a_compiler_modules_run_and_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with Engine(ARCHS["llama"].build(), record="auto", **SMALL) as engine:
        found = engine.stats().recording
        assert found.refused is not None
        assert "no-compiler" in found.refused
        assert (found.executor, found.steps) == (None, 0)
        assert len(ids(engine)) == 12


def test_a_model_that_runs_solo_is_reported_as_not_recorded() -> None:
    (note,) = [
        note
        for note in diagnose(ARCHS["bloom"].build(), Settings(record="auto", **SMALL), kv_quality=False).notes
        if note.startswith("steps: ")
    ]
    assert note.startswith("steps: by the model's modules (it runs one sequence per forward")


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(BadRequest, match="record must be auto or off"):
        Settings(record="on")  # pyright: ignore[reportArgumentType] - a wrong value
