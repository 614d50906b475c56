"""A warm answer equals a cold one bit for bit, in the model's own type: log-probabilities are compared as they are."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar import Engine
from kvcellar.memory import restore_plan
from kvcellar.memory.restore_plan import Planner
from tests.engine.mixes import tokens
from tests.engine.test_store import acknowledged
from tests.own_layers import need_own_layers
from tests.zoo import ARCHS

KINDS = ("llama", "gemma3", "gpt-oss", "qwen3-moe", "lfm2", "mamba2")  # full, sliding, sinks, experts, recurrent
ASKED: Any = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 20}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is restored, however fast this machine computes it again."""
    monkeypatch.setattr(Planner, "speed", lambda self: None)
    monkeypatch.setattr(restore_plan, "SHORTEST", restore_plan.LONGEST)


def opened(path: Path, store: Path | None, dtype: str, **settings: Any) -> Engine:
    limits: Any = {"cache_bytes": 16_000_000, "context": 512, "max_sequences": 8, "threads": 1}
    return Engine(path, store=None if store is None else str(store), dtype=dtype, **limits | settings)


def answer(result: Any) -> tuple[Any, Any]:
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_an_answer_has_the_same_bits_from_the_tree_in_a_batch_in_chunks_and_after_a_restart(
    name, dtype, tmp_path
) -> None:
    need_own_layers(getattr(torch, dtype))
    ARCHS[name].build(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    draw = random.Random(name)
    prompts = [tokens(draw, n) for n in (150, 80, 110)]  # longer than what is too short to be stored
    with opened(tmp_path / "model", None, dtype) as engine:
        cold = []
        for prompt in prompts:
            engine.clear_cache()
            cold.append(answer(engine.generate(prompt, **ASKED)))
        again = engine.generate(prompts[-1], **ASKED)
        assert again.usage.cached_tokens > 0
        assert answer(again) == cold[-1], "from the prefix tree"
    with opened(tmp_path / "model", tmp_path / "store", dtype, step_tokens=32) as engine:
        together = engine.generate(prompts, **ASKED)
        assert [answer(result) for result in together] == cold, "in a batch, prompts in chunks of 32 tokens"
        acknowledged(engine)
    with opened(tmp_path / "model", tmp_path / "store", dtype) as engine:
        restored = [engine.generate(prompt, **ASKED) for prompt in prompts]
        assert all(result.usage.cached_tokens > 0 for result in restored)
        assert [answer(result) for result in restored] == cold, "from the store, after a restart"
