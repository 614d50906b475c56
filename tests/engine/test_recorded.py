"""Engines with recorded steps: the same text, with less of torch; what they report; what modules run in their place."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar import BadRequest, Engine
from kvcellar.engine.load.recorded import without_preparing
from kvcellar.engine.load.settings import RECORD, Settings
from kvcellar.engine.recording.saved import Programs
from kvcellar.verify.diagnosis import diagnose
from tests.engine.test_adapters import adapter, held, running
from tests.models.lora import ends_with, layers_of, saved
from tests.zoo import ARCHS

SMALL: dict[str, Any] = {"cache_bytes": 4_000_000, "threads": 1}
PROMPT = list(range(3, 24))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recordings are kept here, instead of in the user's cache."""
    monkeypatch.setattr("kvcellar.engine.load.recorded.programs", lambda _: Programs(tmp_path))
    return tmp_path


def ids(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, max_tokens=12, temperature=0).choices[0].token_ids)


@pytest.mark.parametrize(
    "name", ["gemma3", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "deepseek-v3"))]
)
def test_text_is_the_same_with_recorded_steps(name: str, kept: Path) -> None:
    model = ARCHS[name].build().to(dtype=torch.bfloat16)
    with Engine(model, record="off", **SMALL) as plain, Engine(model, record="auto", **SMALL) as engine:
        assert plain.stats().recording.refused == "record is off"
        found = engine.stats().recording
        assert (found.refused, found.executor, found.by_modules) == (None, "native", {})
        assert ids(engine) == ids(plain)
        assert engine.stats().recording.steps > found.steps
    assert len(list(kept.iterdir())) == 1


def test_steps_with_adapters_are_recorded(tmp_path: Path) -> None:
    """Beside rows of another adapter and of none, in one step, and after an adapter was replaced."""
    model = ARCHS["llama"].build()
    paths = [adapter(model, tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    texts: list[list[tuple[int, ...]]] = []
    for record in RECORD:
        with Engine(model, record=record, adapters={"a": paths[0], "b": paths[1]}, **SMALL) as engine:
            found: list[tuple[int, ...]] = []
            before = engine.stats().recording  # adapters were tested, with hooks
            for _ in range(2):
                with held(engine):
                    made = [running(engine, PROMPT, 8, adapter=name) for name in ("a", "b", None)]
                found += [tuple(one.result().choices[0].token_ids) for one in made]
                after = engine.stats().recording
                assert after.by_modules == before.by_modules
                assert after.steps > before.steps or record == "off"
                engine.adapters.add("a", paths[2])
                before = engine.stats().recording
            texts.append(found)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4, "adapters change texts"


class OwnClass(torch.nn.Linear):
    """A linear layer with code of its own, which is not packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2 / 2


@pytest.mark.parametrize(("name", "target"), [("gpt2", "c_attn"), ("llama", "q_proj")])
def test_layers_that_are_not_packed_have_their_adapters(name: str, target: str, tmp_path: Path) -> None:
    """GPT-2's layers are transposed. The code of a class of its own is a part of the program, which calls no layer."""
    model = ARCHS[name].build()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OwnClass
    layers, turned = layers_of(model, ends_with(target)), name == "gpt2"
    path = saved(tmp_path / "one", layers, target_modules=[target], fan_in_fan_out=turned, strength=1.0)
    texts: list[tuple[int, ...]] = []
    for record in RECORD:
        with Engine(model, record=record, pack=False, adapters={"one": path}, **SMALL) as engine:
            steps = engine.stats().recording.steps
            for use in ("one", ""):
                result = engine.generate(PROMPT, max_tokens=8, temperature=0, adapter=use)
                texts.append(tuple(result.choices[0].token_ids))
            found = engine.stats().recording
            assert found.steps > steps or record == "off"
            apart = "adapters of layers with code of their own" in found.by_modules
            assert apart == (name == "llama" and record == "auto")
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1], "the adapter changes the text"


def test_a_draft_model_is_recorded_and_preparing_its_steps_is_no_part_of_what_they_cost() -> None:
    model, small = ARCHS["llama"].build(), ARCHS["llama"].build(num_hidden_layers=1)
    how = {**SMALL, "cache_bytes": 8_000_000}
    with (
        Engine(model, record="off", **how) as plain,
        Engine(model, draft=small, record="auto", **how) as engine,
    ):
        assert ids(engine) == ids(plain)
        drafts = engine._built.drafts
        assert drafts is not None
        assert drafts.guest is not None
        guests = [engine._built.guest, drafts.guest]
        recordings = [guest.recording for guest in guests if guest.recording is not None]
        assert len(recordings) == 2
        assert all(recording.steps > 0 for recording in recordings)
        prepared = sum(recording.executor.seconds for recording in recordings)
        assert prepared > 0
        assert without_preparing(lambda: 100.0, guests)() == 100.0 - prepared
        ids(engine)
        assert sum(recording.executor.seconds for recording in recordings) >= prepared


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


@pytest.mark.parametrize(("linear", "note"), [(True, "attended to as they are stored, in 4"), (False, "expanded to")])
def test_a_diagnosis_says_how_latents_are_read(linear, note) -> None:
    model = ARCHS["minicpm3"].build()
    if not linear:
        attention: Any = model.model.layers[0].self_attn
        own = attention.expand_kv
        attention.expand_kv = lambda latent, tail: own(latent.abs(), tail)
    notes = diagnose(model, Settings(**SMALL), kv_quality=False).notes
    assert next(one for one in notes if one.startswith("latents: ")).startswith(f"latents: {note}")
