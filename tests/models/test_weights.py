"""Every stored tensor is used, named in a note, or refused; after the load nothing depends on the files."""

import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights import weights_loading as reading
from kvcellar.errors import ModelRefused
from kvcellar.frontend.engine import Engine
from kvcellar.verify.diagnosis import diagnose
from tests.zoo import ARCHS, reference_logits

TOKENS = list(range(3, 40))
Change = Callable[[dict[str, Tensor]], None]


def saved(path: Path, name: str = "llama", **how: Any) -> Path:
    """A model directory of an architecture of the zoo."""
    with silence_transformers():
        ARCHS[name].build().save_pretrained(path, **how)
    return path


def changed(path: Path, change: Change, file: str = "model.safetensors") -> Path:
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})
    return path


def configured(path: Path, **fields: Any) -> Path:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    return path


def with_these(**tensors: Tensor) -> Change:
    return lambda stored: stored.update({name.replace("__", "."): value for name, value in tensors.items()})


def refused(path: Path, **how: Any) -> str:
    with pytest.raises(ModelRefused) as refusal:
        load(path, **how)
    return str(refusal.value)


# -- names ------------------------------------------------------------------------------------------------------------

FOREIGN = {
    "biases": (
        {f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.ones(64) for layer in range(4) for part in "qo"},
        "8 tensors that have no place in it (model.layers.0.self_attn.o_proj.bias, "
        "model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.o_proj.bias and 5 more)",
    ),
    "a reward head": ({"score.weight": torch.ones(1, 64)}, "1 tensors that have no place in it (score.weight)"),
    "layers": ({"model.layers.4.input_layernorm.weight": torch.ones(64)}, "(model.layers.4.input_layernorm.weight)"),
    "a draft": ({"mtp.layers.0.norm.weight": torch.ones(64)}, "(mtp.layers.0.norm.weight)"),
    "a vision tower": ({"vision_tower.blocks.0.weight": torch.ones(4, 4)}, "(vision_tower.blocks.0.weight)"),
    "an adapter": ({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 64)}, "lora_A.weight)"),
    "a scale": ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, "weight_scale_inv)"),
    "an empty tensor": ({"extra": torch.ones(0)}, "(extra)"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_tensor_without_a_place_in_the_network_is_named(what: str, tmp_path: Path) -> None:
    tensors, named = FOREIGN[what]
    message = refused(changed(saved(tmp_path / "m"), lambda stored: stored.update(tensors)))
    assert named in message
    assert "it describes a LlamaForCausalLM, and model.safetensors of m holds" in message
    assert "correct config.json, or the weights" in message


def test_more_stored_layers_than_in_the_config_are_refused(tmp_path: Path) -> None:
    message = refused(configured(saved(tmp_path), num_hidden_layers=2))
    assert "18 tensors that have no place in it (model.layers.2.input_layernorm.weight" in message


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    """Both faults are named: the unexpected head and the missing one."""

    def exchange(stored: dict[str, Tensor]) -> None:
        stored["score.weight"] = stored.pop("lm_head.weight")

    message = refused(changed(saved(tmp_path), exchange))
    assert (
        "1 tensors that have no place in it (score.weight) and nothing for 1 of its parameters (lm_head.weight)"
        in message
    )


IGNORED = {
    "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)},
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    "deepseek-v3": {"model.layers.61.embed_tokens.weight": torch.ones(101, 4)},
    "qwen3.5": {"mtp.fc.weight": torch.ones(4, 4), "model.visual.blocks.0.weight": torch.ones(4)},
}


@pytest.mark.parametrize("name", IGNORED)
def test_tensors_that_the_class_ignores_are_reported(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(changed(saved(tmp_path / "m", name), lambda stored: stored.update(IGNORED[name])))
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(ARCHS[name].build(), TOKENS))
    (note,) = loaded.notes
    assert note.startswith(f"{len(IGNORED[name])} stored tensors are not used: {type(loaded.model).__name__} ignores ")
    assert sorted(IGNORED[name])[0] in note
    assert [record.getMessage() for record in caplog.records if "kvcellar" in record.name] == [f"m: {note}"]


def test_doctor_prints_notes_on_weights(tmp_path: Path) -> None:
    path = changed(saved(tmp_path), with_these(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8)))
    found = diagnose(path, Settings(cache_bytes=10**6), kv_quality=False)
    assert any("inv_freq" in note for note in found.notes)


def test_a_valid_directory_has_no_notes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(saved(tmp_path)).notes == ()
    assert not caplog.records


# -- tied weights -----------------------------------------------------------------------------------------------------


def tied(path: Path, factor: float) -> Path:
    """A directory whose config ties head and embedding, and whose file holds both."""
    with silence_transformers():
        ARCHS["llama"].build(tie_word_embeddings=True).save_pretrained(path)

    def add(stored: dict[str, Tensor]) -> None:
        assert "lm_head.weight" not in stored
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"] * factor

    return changed(path, add)


def test_a_stored_tied_head_with_equal_values_stays_tied(tmp_path: Path) -> None:
    loaded = load(tied(tmp_path, 1.0))
    assert loaded.notes == ()
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_a_stored_tied_head_with_other_values_is_used_and_reported(tmp_path: Path) -> None:
    loaded = load(tied(tmp_path, 2.0))
    assert loaded.notes == ("config.json ties lm_head.weight, but other values are stored for it, and these are used",)
    with silence_transformers():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(theirs, TOKENS))


# -- more than one file -----------------------------------------------------------------------------------------------


def sharded(path: Path) -> list[Path]:
    shards = sorted(saved(path, max_shard_size="100KB").glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first, second, *_ = sharded(tmp_path)
    name = next(iter(load_file(first)))
    changed(tmp_path, lambda stored: stored.update({name: load_file(first)[name] * 2}), second.name)
    assert f"{first.name} and {second.name} both hold {name}" in refused(tmp_path)


def test_two_names_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """transformers adds the prefix of the base model to names that lack it."""

    def again(stored: dict[str, Tensor]) -> None:
        stored["embed_tokens.weight"] = stored["model.embed_tokens.weight"] * 2

    message = refused(changed(saved(tmp_path), again))
    assert (
        "embed_tokens.weight (model.safetensors) and model.embed_tokens.weight (model.safetensors) are both" in message
    )


def test_a_tensor_listed_in_the_index_and_in_no_shard_is_named(tmp_path: Path) -> None:
    name, *_ = load_file(sharded(tmp_path)[1])
    changed(tmp_path, lambda stored: stored.pop(name), sharded(tmp_path / "other")[1].name)
    message = refused(tmp_path)
    assert "model.safetensors.index.json lists 1 tensors that the files of" in message
    assert name in message


def test_weights_files_that_are_not_read_are_reported(tmp_path: Path) -> None:
    shards = sharded(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model-00009-of-00009.safetensors")
    (note,) = load(tmp_path).notes
    assert note.startswith("model-00009-of-00009.safetensors: not read, since ")
    assert shards[0].name in note


def test_shards_beside_a_single_file_are_reported_as_not_read(tmp_path: Path) -> None:
    shards = sharded(tmp_path)
    shutil.copy(saved(tmp_path / "other") / "model.safetensors", tmp_path)
    (note,) = load(tmp_path).notes
    assert note.startswith(", ".join(shard.name for shard in shards[:3]))
    assert note.endswith("not read, since model.safetensors hold the model's weights")


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"]
)
def test_one_nan_or_infinite_value_is_refused(value: float, name: str, tmp_path: Path) -> None:
    def damage(stored: dict[str, Tensor]) -> None:
        stored[name].view(-1)[-1] = value

    message = refused(changed(saved(tmp_path / "m"), damage))
    assert f"model.safetensors of m: 1 tensors hold NaN or infinity as torch.float32: {name}" in message


def test_weights_that_overflow_float16_are_refused_only_in_float16(tmp_path: Path) -> None:
    changed(saved(tmp_path), lambda stored: stored["model.layers.0.mlp.up_proj.weight"].view(-1)[:1].fill_(1e5))
    assert "hold NaN or infinity as torch.float16" in refused(tmp_path, dtype="float16")
    assert load(tmp_path).notes == ()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_eight_bit_weights_are_refused_without_a_quantization_config(dtype: torch.dtype, tmp_path: Path) -> None:
    def narrow(stored: dict[str, Tensor]) -> None:
        stored["model.layers.1.mlp.up_proj.weight"] = stored["model.layers.1.mlp.up_proj.weight"].to(dtype)

    message = refused(changed(saved(tmp_path), narrow))
    assert "model.safetensors holds model.layers.1.mlp.up_proj.weight as " in message


# -- after it was read ------------------------------------------------------------------------------------------------

GONE: dict[str, Callable[[Path], object]] = {
    "overwritten": lambda file: file.write_bytes(os.urandom(file.stat().st_size)),
    "truncated": lambda file: os.truncate(file, 0),
    "deleted": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("how", GONE)
def test_after_a_load_nothing_depends_on_the_files(name: str, how: str, tmp_path: Path) -> None:
    model = load(saved(tmp_path, name)).model
    before = reference_logits(model, TOKENS)
    GONE[how](tmp_path / "model.safetensors")
    assert torch.equal(reference_logits(model, TOKENS), before)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_does_not_depend_on_the_files(pack: bool, dtype: Any, tmp_path: Path) -> None:
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3, "ignore_eos": True}
    with Engine(saved(tmp_path), dtype=dtype, pack=pack, cache_bytes=10**6, threads=1) as engine:
        before = engine.generate(TOKENS, **params)
        engine.clear_cache()
        os.truncate(tmp_path / "model.safetensors", 0)
        after = engine.generate(TOKENS, **params)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_weights_file_stays_mapped_or_open(tmp_path: Path) -> None:
    sharded(tmp_path)
    loaded = load(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if str(tmp_path) in _target(link)]
    assert loaded.parameters > 0


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # of the listing itself, and of threads that end
        return ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_weights_file_stays_open_after_a_refusal(tmp_path: Path) -> None:
    refused(changed(saved(tmp_path), lambda stored: stored.update(extra=torch.ones(3))))
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if str(tmp_path) in _target(link)]


@pytest.mark.parametrize("how", GONE)
def test_a_file_that_changes_while_it_is_read_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, done = reading.Source.__getitem__, []

    def changing(source: Any, index: Any) -> Tensor:
        if not done:
            done.append(GONE[how](tmp_path / "model.safetensors"))
        return original(source, index)

    monkeypatch.setattr(reading.Source, "__getitem__", changing)
    saved(tmp_path)
    message = refused(tmp_path)
    assert "model.safetensors" in message
    assert "while it was read" in message or "is missing from" in message


def test_experts_are_read_when_they_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stored tensor is read once, and few are in memory before they are joined."""
    original, alive, most = reading.Source.__getitem__, [0], [0]

    def counting(source: Any, index: Any) -> Tensor:
        tensor = original(source, index)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        reads.append(id(source))
        weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
        return tensor

    reads: list[int] = []
    monkeypatch.setattr(reading.Source, "__getitem__", counting)
    load(saved(tmp_path, "mixtral"))
    config = ARCHS["mixtral"].config()
    assert len(reads) == len(set(reads)) == len(load_file(tmp_path / "model.safetensors"))
    assert most[0] <= 2 * config.num_local_experts + 1, (
        "more than one layer's experts were in memory before they are joined"
    )


def test_a_load_restores_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    for value in (None, "0", "1"):
        monkeypatch.delenv(reading._READ_AS_NEEDED, raising=False)
        if value is not None:
            monkeypatch.setenv(reading._READ_AS_NEEDED, value)
        load(tmp_path)
        assert os.environ.get(reading._READ_AS_NEEDED) == value


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_in_the_directory_is_refused(tmp_path: Path) -> None:
    (saved(tmp_path) / "adapter_config.json").write_text("{}")
    message = refused(tmp_path)
    assert "adapter_config.json" in message
    assert "adapters={'name': directory}" in message
    (tmp_path / "config.json").unlink()
    assert "adapter_config.json" in refused(tmp_path)
