"""MTP layers on our memory compute what transformers' own forward of them computes; their weights are checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.heads.mtp_head import MtpHead, build_mtp_head, described, load_mtp
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.mtp import (
    FAMILIES,
    head_and_reference,
    model_with_layers,
    new_layers,
    own_forward,
    saved_beside,
    saved_with_layer,
)
from tests.models.timeline import BOUND, relative
from tests.zoo import ARCHS

LENGTHS = {1: 40, 2: 9, 3: 21}  # several windows, one, and between
FIRST = {1: 0, 2: 0, 3: 6}  # the position of the first pair: sequence 3 begins behind what was restored


def texts_of(head: MtpHead) -> tuple[dict[int, list[int]], dict[int, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    texts = {seq: torch.randint(3, 100, (n + head.layers,), generator=draw).tolist() for seq, n in LENGTHS.items()}
    return texts, {seq: torch.randn(n, head.hidden_size, generator=draw) for seq, n in LENGTHS.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_transformers_own_in_any_batch_and_after_parts_of_steps(name: str) -> None:
    """In turns, each sequence gets a number of rows of which some are kept; what is not kept had other tokens."""
    head, _, reference = head_and_reference(name)
    texts, hidden = texts_of(head)
    expected = {seq: own_forward(reference, texts[seq], hidden[seq], FIRST[seq]) for seq in texts}
    memory = head.memory({group.name: 200 for group in head.shape.groups})
    turn = 0
    while going := [seq for seq in texts if memory.length(seq) < LENGTHS[seq]]:
        spans = {seq: Span(at := memory.length(seq), min(at + 3 + 2 * seq + turn % 4, LENGTHS[seq])) for seq in going}
        kept = {seq: max(1, len(span) - (seq + turn) % 3) for seq, span in spans.items()}
        plan = memory.begin(Batch(tuple(Feed(seq, span) for seq, span in spans.items())))
        out = torch.cat([hidden[seq][span.start : span.end] for seq, span in spans.items()])
        for layer in range(head.layers):
            ids, places, row = list[int](), list[int](), 0
            for seq, span in spans.items():
                known = texts[seq][1 + layer + span.start :][: kept[seq]]
                ids += known + [7] * (len(span) - len(known))
                places += [FIRST[seq] + 1 + layer + slot for slot in range(span.start, span.end)]
            out = head.forward(memory, plan, layer, ids, out, places)
            logits = head.logits(out)
            for seq, span in spans.items():
                ours = logits[row : row + kept[seq]]
                assert relative(ours, expected[seq][layer][span.start : span.start + kept[seq]]) <= BOUND
                row += len(span)
        memory.commit(kept)
        memory.check()
        turn += 1
    memory.clear()
    assert all(memory.free()[group.name] == 200 for group in head.shape.groups)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_other_positions_or_tokens_give_other_rows(name: str) -> None:
    """What the test above compares depends on both: a shift of one row's position is seen, and one token."""
    head, _, reference = head_and_reference(name)
    texts, hidden = texts_of(head)
    expected = own_forward(reference, texts[2], hidden[2])[0]
    memory = head.memory({group.name: 20 for group in head.shape.groups})
    ids, places = texts[2][1:10], list(range(1, 10))
    for other_ids, other_places in (
        (ids, [*places[:4], *(p + 3 for p in places[4:])]),
        ([ids[0], 99, *ids[2:]], places),
    ):
        plan = memory.begin(Batch((Feed(2, Span(0, 9)),)))
        rows = head.logits(head.forward(memory, plan, 0, other_ids, hidden[2], other_places))
        memory.abandon()
        assert relative(rows, expected) > 10 * BOUND


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe", "bailing-hybrid"])
def test_layers_stored_behind_the_last_one_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    types = ["linear_attention"] * 3 + ["full_attention"] * 2
    path = saved_with_layer(tmp_path / "m", name, **({"layer_types": types} if name == "bailing-hybrid" else {}))
    loaded = load(path)
    embedding = loaded.model.get_input_embeddings().weight.clone()
    found = load_mtp(loaded.model, path)
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding)
    loaded.model.config.name_or_path = str(path)
    loaded.model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.4\..*"}  # the released ones have 61 or 92
    with silence_transformers(), described(loaded.model):
        theirs = MtpModel.from_pretrained(loaded.model)
    assert found.layers.state_dict().keys() == theirs.layers.state_dict().keys()
    for key, value in theirs.layers.state_dict().items():
        assert torch.equal(found.layers.state_dict()[key], value), key
    assert found.embed_tokens is loaded.model.get_input_embeddings()
    guest = build_guest(loaded.model, backends())
    assert build_mtp_head(load_mtp(guest.model, path), guest, backends()).layers == 1


@pytest.mark.parametrize("name", ["lfm3", "mellum", "llama"])
def test_layers_of_a_file_beside_the_model_are_loaded(name: str, tmp_path: Path) -> None:
    path = saved_beside(tmp_path / "m", name)
    loaded = load(path)
    assert not loaded.notes
    stored = load_file(path / "mtp.safetensors")
    found = load_mtp(loaded.model, path).layers.state_dict()
    assert {f"mtp.layers.{name}" for name in found} == stored.keys()
    assert all(torch.equal(stored[f"mtp.layers.{name}"], value) for name, value in found.items())


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    loaded = load(path)
    with pytest.raises(ModelRefused) as refusal:
        load_mtp(loaded.model, path)
    return str(refusal.value)


def changed(path: Path, **tensors: Tensor | None) -> Path:
    """With other tensors in mtp.safetensors; None removes one. `__` stands for a dot."""
    stored = load_file(path / "mtp.safetensors")
    for name, value in tensors.items():
        key = f"mtp.layers.0.{name.replace('__', '.')}"
        if value is None:
            del stored[key]
        else:
            stored[key] = value
    save_file(stored, path / "mtp.safetensors")
    return path


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"eh_proj__weight": None}, "describes 39232 values of MTP layers; mtp.safetensors holds 31040"),
    "shape": ({"eh_proj__weight": torch.ones(64, 190)}, "another shape for 1 of its parameters"),
    "foreign": ({"lora__weight": torch.ones(2)}, "no place for (mtp.layers.0.lora.weight)"),
    "nan": ({"enorm__weight": torch.full((64,), torch.nan)}, "NaN or infinity in 1 tensors"),
    "integers": ({"enorm__weight": torch.ones(64, dtype=torch.int8)}, "mtp.layers.0.enorm.weight as I8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_the_layers_are_named(fault: str, tmp_path: Path) -> None:
    tensors, reason = FAULTS[fault]
    assert reason in refused(changed(saved_beside(tmp_path / "m", "llama", num_mtp_layers=1), **tensors))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = saved_with_layer(tmp_path / "m", "glm4-moe")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.4.eh_proj.weight"]
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    assert "model.safetensors holds nothing for 1 of its parameters (layers.0.eh_proj.weight)" in refused(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = saved_beside(tmp_path / "m", "llama")
    (path / "mtp.safetensors").write_bytes(b"\0" * 100)
    assert "mtp.safetensors is not a whole safetensors file" in refused(path)


def test_more_layers_than_the_file_has_are_not_allocated(tmp_path: Path) -> None:
    path = saved_beside(tmp_path / "m", "llama", num_mtp_layers=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_mtp_layers": 9}))
    assert "values of MTP layers; mtp.safetensors holds" in refused(path)
    (path / "config.json").write_text(json.dumps(config | {"num_mtp_layers": 9999}))
    assert "num_mtp_layers is 9999; mtp.safetensors holds" in refused(path)


def test_a_config_without_layers_is_refused_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with silence_transformers():
        ARCHS["qwen3.5"].build().save_pretrained(path)
    assert "no weights of one were found" in refused(path)
    stored = load_file(path / "model.safetensors") | {"mtp.fc.weight": torch.ones(4, 4)}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    message = refused(path)
    assert "model.safetensors holds 1 tensors of a head (mtp.fc.weight)" in message
    assert "has num_mtp_layers None: transformers builds no MTP layers for it" in message


def test_a_config_with_layers_and_no_weights_is_refused(tmp_path: Path) -> None:
    path = saved_beside(tmp_path / "m", "llama")
    (path / "mtp.safetensors").unlink()
    assert "names 3 MTP layers, and neither model.safetensors nor a file mtp.safetensors holds" in refused(path)


def test_a_head_whose_logits_are_not_the_targets_is_refused() -> None:
    """gemma2 bounds its logits by a tanh, which transformers' MTP model leaves out."""
    model = ARCHS["gemma2"].build(num_mtp_layers=1, mtp_layer_types=["full_attention"])
    guest = build_guest(model, backends())
    with pytest.raises(ModelRefused, match="Gemma2ForCausalLM scales or bounds its hidden states or logits"):
        build_mtp_head(new_layers(guest.model), guest, backends())


def test_layers_that_keep_a_state_or_bias_their_scores_are_refused() -> None:
    guest = build_guest(ARCHS["inkling"].build(num_mtp_layers=1), backends())
    with pytest.raises(ModelRefused, match=r"MTP layers of InklingForCausalLM cannot be run: .*position_bias"):
        build_mtp_head(new_layers(guest.model), guest, backends())


def test_layers_that_differ_from_their_own_forward_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = build_guest(model_with_layers("llama"), backends())
    forward = MtpHead.forward
    monkeypatch.setattr(MtpHead, "forward", lambda *given: forward(*given) * 1.01)
    with pytest.raises(ModelRefused, match=r"rows differ by .* from its own forward"):
        build_mtp_head(new_layers(guest.model), guest, backends())
