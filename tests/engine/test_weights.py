"""Engines whose linear layers have weights of 8 and 4 bits: warm equals cold, and their memory is of no other kind."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar import BadRequest, Engine
from kvcellar.engine.models.load import load
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.quantised import QuantisedKernel
from kvcellar.memory import restore_plan
from kvcellar.memory.restore_plan import Planner
from tests.engine.tiered import acknowledged
from tests.models.lora import ends_with, layers_of, merged
from tests.models.lora import saved as saved_adapter
from tests.zoo import ARCHS, reference_logits

GREEDY: Mapping[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
LIMITS: Mapping[str, Any] = {"cache_bytes": 16_000_000, "max_sequences": 4, "threads": 1}
PROMPT = [3 + i * i % 90 for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        QuantisedKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(f"not compiled here: {error}")


@pytest.fixture(autouse=True)
def always(monkeypatch) -> None:
    """What is stored is restored, however fast this machine computes it again."""
    monkeypatch.setattr(Planner, "speed", lambda self: None)
    monkeypatch.setattr(restore_plan, "SHORTEST", restore_plan.LONGEST)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return ARCHS["llama"].build()


def likely(network: PreTrainedModel, prompt: list[int], found: tuple[int, ...]) -> bool:
    """Whether each token is the most likely one after those before it, or nearly as likely."""
    logits = reference_logits(network, [*prompt, *found])[len(prompt) - 1 : -1]
    gaps = logits.amax(-1) - logits[torch.arange(len(found)), torch.tensor(found)]
    return float(gaps.max()) <= 1e-4 * float(logits.abs().max())


@pytest.mark.parametrize("kind", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen3-moe"])
def test_a_warm_engine_generates_what_a_cold_one_does(name: str, kind: Any) -> None:
    network = ARCHS[name].build()
    alone = load(network, weights=kind).model
    with Engine(network, weights=kind, **LIMITS) as engine:
        cold = engine.generate(PROMPT, **GREEDY)
        assert likely(alone, PROMPT, cold.token_ids)
        warm = engine.generate(PROMPT, **GREEDY)
        assert warm.token_ids == cold.token_ids
        assert warm.usage.cached_tokens == len(PROMPT) - 1
        more = [*PROMPT, *cold.token_ids, 7, 8]
        assert likely(alone, more, engine.generate(more, n=2, **GREEDY).token_ids)
        engine.check()


def test_memory_computed_with_other_products_is_not_found(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "m")

    prompt = [*PROMPT, *PROMPT, *PROMPT]

    def cached(weights: Any) -> int:
        with Engine(tmp_path / "m", weights=weights, store=str(tmp_path / "store"), **LIMITS) as engine:
            found = engine.generate(prompt, **GREEDY).usage.cached_tokens
            acknowledged(engine)
            return found

    assert [cached(kind) for kind in ("int8", "int4", "dense", "auto")] == [0, 0, 0, len(prompt) - 1]
    assert [cached(kind) for kind in ("int8", "int4", "mixed")] == [len(prompt) - 1, len(prompt) - 1, 0]


def test_adapters_add_to_quantised_layers(llama: PreTrainedModel, tmp_path: Path) -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    layers = layers_of(llama, ends_with(*targets))
    path = saved_adapter(tmp_path / "a", layers, target_modules=list(targets))
    changed = merged(llama, path)
    adapted = load(llama, weights="int4").model

    def added(weight: Tensor) -> Any:
        return lambda layer, args, out: out + nn.functional.linear(args[0], weight)

    for name in layers:
        difference: Tensor = changed.get_submodule(name).weight - llama.get_submodule(name).weight  # pyright: ignore
        adapted.get_submodule(name).register_forward_hook(added(difference.detach()))
    with Engine(llama, weights="int4", adapters={"style": path}, **LIMITS) as engine:
        found = engine.generate(PROMPT, adapter="style", **GREEDY)
        assert likely(adapted, PROMPT, found.token_ids)
        plain = engine.generate(PROMPT, adapter="", **GREEDY)
        assert likely(load(llama, weights="int4").model, PROMPT, plain.token_ids)


def test_a_draft_model_keeps_its_weights_and_changes_no_text(llama: PreTrainedModel) -> None:
    target = ARCHS["llama"].build(num_hidden_layers=8, intermediate_size=1024)
    length = {**GREEDY, "max_tokens": 20}
    with Engine(target, weights="int4", draft=llama, draft_depth=3, **LIMITS) as engine:
        drafted = engine.generate(PROMPT, **length)
    with Engine(target, weights="int4", **LIMITS) as engine:
        assert engine.generate(PROMPT, **length).token_ids == drafted.token_ids


def test_other_values_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match="weights must be auto, int8, int4, mixed or dense, not 'int3'"):
        Engine(None, weights="int3")  # pyright: ignore[reportArgumentType]
