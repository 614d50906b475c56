"""A model that drafts with its own MTP layers: the text is that of plain decoding, and drafts of layers that know the
next token are all accepted, also in later turns and by several outputs at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.speculate.head import HeadDrafter
from kvcellar.frontend.engine import Engine
from tests.engine.speculating import speculates
from tests.models.mtp import model_with_layers, new_layers, saved_beside


@torch.no_grad()
def passing(layer: nn.Module) -> None:
    """Let a decoder layer return its input."""
    for name, weight in layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()


@torch.no_grad()
def knowing(model: PreTrainedModel, layers: MtpModel) -> None:
    """Let the model draw each token from the one before it, and its MTP layers do the same."""
    for layer in [*model.get_decoder().layers, *(one.mtp_block for one in layers.layers)]:
        passing(layer)
    own = [norm for one in layers.layers for norm in (one.enorm, one.hnorm, one.post_norm)]
    for norm in [model.get_decoder().norm, *own]:
        norm.weight.fill_(1.0)
    for one in layers.layers:
        width = one.eh_proj.weight.shape[0]
        one.eh_proj.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], 1))


def saved(path: Path, count: int) -> Path:
    model = model_with_layers("llama", num_mtp_layers=count)
    layers = new_layers(model)
    knowing(model, layers)
    with silence_transformers():
        model.save_pretrained(path)
    stored = {f"mtp.layers.{name}": value for name, value in layers.layers.state_dict().items()}
    save_file(stored, path / "mtp.safetensors")
    return path


def always_drafting(engine: Engine, depth: int) -> HeadDrafter:
    """Let the engine draft in every round, whatever it costs."""
    speculator = engine._built.loop.manager.drafting.speculator
    assert speculator is not None
    assert isinstance(speculator.drafter, HeadDrafter)
    speculates(engine, speculator.drafter, depth)
    return speculator.drafter


@pytest.mark.parametrize("count", [1, 3])
def test_drafts_of_layers_that_know_the_next_token_are_all_accepted(count: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "m", count)
    prompt = [5, 17, 40]
    with Engine(path) as plain:
        expected = plain.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True).token_ids
    with Engine(path, draft="mtp") as engine:
        drafter = always_drafting(engine, 3)
        for _ in range(2):
            result = engine.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
            assert result.token_ids == expected
            assert result.speculation is not None
            assert result.speculation.accepted == result.speculation.drafted >= 27
        engine.check()
        drafter.check()


@pytest.mark.parametrize("name", ["glm4-moe", "mellum", "gemma3"])
def test_turns_and_outputs_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    """The second turn restores the first, for the model and for its MTP layers."""
    path = saved_beside(tmp_path / "m", name)
    texts: dict[str | None, list[list[int]]] = {}
    for draft in (None, "mtp"):
        with Engine(path, draft=draft) as engine:
            if draft is not None:
                drafter = always_drafting(engine, 2)
            prompt, found = [*range(20, 45)], texts.setdefault(draft, [])
            for _ in range(2):
                result = engine.generate(prompt, max_tokens=8, temperature=0, n=2, ignore_eos=True)
                found += [list(choice.token_ids) for choice in result.choices]
                prompt = [*prompt, *found[-1], 7, 8]
            engine.check()
            if draft is not None:
                assert result.speculation is not None
                assert result.speculation.drafted > 0
                drafter.check()
    assert texts["mtp"] == texts[None]
