"""Adapters that `peft` itself has written, against its own forward. Skipped where peft is not installed: what the
adapters mean is also tested against merged weights (`test_adapted.py`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar.engine.models.load import sharing_weights
from tests.models.test_adapted import Steps, guest_of, texts_of
from tests.zoo import ARCHS, reference_logits

peft: Any = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about transformers

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "names": ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 16}),
    "rslora": ("llama", {"target_modules": "all-linear", "r": 3, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": r".*\.(q|k|o)_proj",
            "exclude_modules": r".*\.0\..*",
            "rank_pattern": {"q_proj": 2, r"layers\.[12]\.self_attn\.k_proj": 6},
            "alpha_pattern": {"o_proj": 3},
        },
    ),
    "layers": ("llama", {"target_modules": ["up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "hybrid": ("lfm2", {"target_modules": ["in_proj", "out_proj", "q_proj", "w2"]}),
    "experts": ("qwen3-moe", {"target_modules": ["q_proj", "o_proj"]}),
    "solo": ("falcon", {"target_modules": ["query_key_value", "dense"]}),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_computes_what_peft_computes(kind: str, tmp_path: Path) -> None:
    name, fields = CONFIGS[kind]
    model = ARCHS[name].build()
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        theirs = peft.get_peft_model(sharing_weights(model), config)
    theirs.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    steps = Steps(guest_of(model, [tmp_path / "a"]), texts_of([12, 9]), {0: 1, 1: 0})
    steps.step(s0=5, s1=4)
    steps.step(s1=5, s0=7)
    for seq, network in ((0, theirs.eval()), (1, model)):
        with torch.no_grad():
            expected = network(input_ids=torch.tensor([steps.texts[seq]]), use_cache=False).logits[0]
        found, scale = torch.cat(steps.logits[seq]), max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= 1e-4 * scale
    plain = reference_logits(model, steps.texts[0])
    assert float((torch.cat(steps.logits[0]) - plain).abs().max()) > 1e-3
