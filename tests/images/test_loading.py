"""Weights of types that see, saved from the class with images and from the one for text alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcellar.engine.models.load import load
from tests.zoo_test_support.images import config_of, network_of
from tests.zoo_test_support.initialise import initialise

TEXT = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen3_5"])
def test_weights_of_the_class_with_images(model_type: str, tmp_path: Path) -> None:
    model = network_of(model_type)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path).model
    found, stored = dict(loaded.named_parameters()), dict(model.named_parameters())
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "qwen3_5"])
def test_weights_of_the_class_for_text(model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type).get_text_config(decoder=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    initialise(model, 0)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path).model
    loaded.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=TEXT).logits, model(input_ids=TEXT).logits)
