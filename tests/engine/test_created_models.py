"""Models that `create` makes with its real tools are served as what they were made of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar import Engine
from kvcellar.engine.load.in_library import in_library
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights.create_tools import CreateTools
from kvcellar.errors import KvcellarError
from kvcellar.library.create import Created, create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import parse
from tests.engine.test_assistant import target
from tests.models.assistants import ORDERED, saved
from tests.zoo import ARCHS

LIMITS: Any = {"cache_bytes": 16_000_000, "max_sequences": 4, "threads": 1}
GREEDY: Any = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
PROMPT = list(range(20, 40))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    return Library(tmp_path / "models")


def made(library: Library, name: str, text: str, folder: Path, **options: Any) -> Created:
    return create(library, name, parse(text), tools=CreateTools(), folders=[folder], **options)


@pytest.mark.parametrize(
    "quantized",
    [{}, pytest.param({"quantize": "int8", "draft_quantize": "int8"}, marks=pytest.mark.slow)],
    ids=["plain", "int8"],
)
def test_a_target_with_its_assistant_is_created_from_directories_and_runs(quantized, library, tmp_path) -> None:
    target(tmp_path / "target")
    saved(tmp_path / "assistant", "gemma4_assistant", **ORDERED)
    made(library, "gemma", "FROM ./target\nDRAFT ./assistant\n", tmp_path, **quantized)
    with Engine("gemma", draft="none", **LIMITS) as engine:
        wanted = engine.generate(PROMPT, **GREEDY).token_ids
    with Engine("gemma", **LIMITS) as engine:
        found = engine.generate(PROMPT, **GREEDY)
        statistics = engine.stats().speculation
    assert found.token_ids == wanted
    assert statistics is not None
    assert (statistics.drafter, statistics.refused) == ("draft", None)
    assert statistics.rounds > 0


def test_a_model_that_was_created_without_drafts_does_not_load_its_draft(library, tmp_path) -> None:
    target(tmp_path / "target")
    saved(tmp_path / "assistant", "gemma4_assistant", **ORDERED)
    made(library, "gemma", "FROM ./target\nDRAFT ./assistant\nPARAMETER draft_num_predict 0", tmp_path)
    with Engine("gemma", **LIMITS) as engine:
        assert engine.stats().speculation is None


def test_a_draft_that_does_not_fit_is_refused_before_anything_is_stored(library, tmp_path) -> None:
    target(tmp_path / "target")
    saved(tmp_path / "assistant", "gemma4_assistant", backbone_hidden_size=80)
    with pytest.raises(KvcellarError, match="reads hidden states of 80 values, and the target has 64"):
        made(library, "gemma", "FROM ./target\nDRAFT ./assistant\n", tmp_path)
    assert library.names() == ()
    assert not list((library.root / "blobs").iterdir())


@pytest.mark.parametrize("kind", ["int8", "int4", pytest.param("mixed", marks=pytest.mark.slow)])
def test_a_quantized_model_answers_as_its_dequantized_weights_do(kind: str, library, tmp_path) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 200, "head_dim": 32}
    ARCHS["llama"].build(**small).save_pretrained(tmp_path / "source")
    made(library, "small", "FROM ./source\n", tmp_path, quantize=kind)
    found = in_library("small")
    assert found is not None
    dense = load(found.directory, device="cpu", dtype="float32").model
    source = load(tmp_path / "source", device="cpu", dtype="float32").model
    changed = [name for name, one in dense.named_parameters() if not torch.equal(one, source.get_parameter(name))]
    assert len(changed) == 7 * source.config.num_hidden_layers, "not all linear layers were quantized"
    dense.save_pretrained(tmp_path / "dense")
    with (
        Engine("small", dtype="float32", weights="dense", **LIMITS) as one,
        Engine(tmp_path / "dense", dtype="float32", **LIMITS) as other,
    ):
        assert one.generate(PROMPT, **GREEDY).token_ids == other.generate(PROMPT, **GREEDY).token_ids
