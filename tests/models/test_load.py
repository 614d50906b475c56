"""Loading any directory gives a network or an error with the reason, and runs no code from it."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights import weights_files
from kvcellar.engine.models.weights.config_file import MOST_JSON, config_fields
from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.repository import MOST_TEXT
from kvcellar.sampling_params import SamplingParams
from tests.zoo import ARCHS, auto_config, reference_logits

TOKENS = list(range(3, 40))
OTHER_CODE = (  # config keys that name code
    "_attn_implementation_internal", "_attn_implementation", "attn_implementation", "_experts_implementation_internal",
    "experts_implementation",
)  # fmt: skip


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid directory, with a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "llama"
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


@pytest.fixture
def place(llama: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if a network is built."""

    def never(*args: Any, **kw: Any) -> Any:
        pytest.fail("a network was built")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", never)


def refused(path: Path, **how: Any) -> str:
    with pytest.raises(ModelRefused) as refusal:
        load(path, **how)
    return str(refusal.value)


def configured(path: Path, **fields: Any) -> Path:
    """With these fields in its config; None removes one."""
    file = path / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return path


def sparse(file: Path, size: int) -> None:
    with file.open("wb") as out:
        out.truncate(size)


def reweighted(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# -- what is good -----------------------------------------------------------------------------------------------------


def test_a_valid_directory_gives_network_end_ids_defaults_and_tokenizer(place: Path) -> None:
    (place / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": [7, 9, -1]})
    )
    loaded = load(place)
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(ARCHS["llama"].build(), TOKENS))
    assert loaded.name == "model"
    assert loaded.end_ids == {7, 9}
    assert loaded.defaults["temperature"] == 0.5
    assert loaded.text is not None
    assert loaded.text.tokenizer.encode("w5 w6").ids == [5, 6]
    assert loaded.parameters == sum(weight.numel() for weight in ARCHS["llama"].build().parameters())


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gemma3n", "deepseek-v3", "gpt2", "llama4", "dbrx", "mamba2"])
def test_weights_that_transformers_renames_or_joins_are_loaded(name: str, tmp_path: Path) -> None:
    model = ARCHS[name].build()
    with silence_transformers():
        model.save_pretrained(tmp_path)
    assert torch.equal(reference_logits(load(tmp_path).model, TOKENS), reference_logits(model, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHS)
def test_every_architecture_loads_the_same_weights_as_transformers(name: str, tmp_path: Path) -> None:
    with silence_transformers():
        ARCHS[name].build().save_pretrained(tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = load(tmp_path).model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_sharded_weights_are_loaded(place: Path, tmp_path: Path) -> None:
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(
        reference_logits(load(tmp_path / "shards").model, TOKENS), reference_logits(load(place).model, TOKENS)
    )


def test_symlinked_weights_are_loaded(place: Path, tmp_path: Path) -> None:
    (place / "model.safetensors").rename(tmp_path / "blob")
    (place / "model.safetensors").symlink_to(tmp_path / "blob")
    assert load(place).parameters > 0


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_the_requested_one_else_the_configs_else_that_of_the_weights(place: Path, key: str) -> None:
    configured(place, dtype=None)
    assert load(place).model.dtype == torch.float32
    reweighted(place, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    assert load(place).model.dtype == torch.bfloat16
    assert load(configured(place, **{key: "float16"})).model.dtype == torch.float16
    assert load(place, dtype="float32").model.dtype == torch.float32


def test_a_given_network_shares_its_weights() -> None:
    model = ARCHS["llama"].build()
    loaded = load(model)
    held = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert {name: weight.data_ptr() for name, weight in loaded.model.named_parameters()} == held
    assert (loaded.path, loaded.text) == (None, None)


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = [
    "", ".x", "missing", "owner/missing", "a/b/../../c", "../../no/such/place", "/no/such/place", "C:\\x", "-rf",
    "mis..sing/mod--el", "a..b/c", "owner/name.git", "owner/" + "x" * 97, "x" * 300, "x" * 10_000, "é/ü", "🦙",
    "a b/c",
    "~unknown-user/x", "nul\0byte", "line\nbreak", "owner/name/", "owner//name", "\ud800", "huggingface.co/a/b",
    "https://huggingface.co/a/b", "owner/name@main", "datasets/a", "models--a--b", "a/..", "%2e%2e/x",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
def test_a_name_without_a_model_is_not_found(name: str, unbuilt: None) -> None:
    with pytest.raises(ModelNotFound) as missing:
        load(name)
    assert len(str(missing.value)) < 6000


@pytest.mark.parametrize(
    "model", [5, b"embedded", True, ["embedded"], {}, torch.nn.Linear(2, 2), torch.zeros(2)], ids=type
)
def test_other_types_are_refused_by_name(model: Any, unbuilt: None) -> None:
    with pytest.raises(BadRequest, match="a directory, a name, or a model of transformers, not ") as refused:
        load(model)
    assert refused.value.param == "model"


def test_a_file_is_not_a_model(place: Path, unbuilt: None) -> None:
    assert "is a file; a model is a directory" in refused(place / "model.safetensors")


def test_circular_links_are_not_found(place: Path, unbuilt: None) -> None:
    (place / "loop").symlink_to(place / "loop")
    with pytest.raises(ModelNotFound):
        load(place / "loop")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("config.json", "has no config.json"), ("model.safetensors", "has neither model.safetensors nor")],
)
def test_broken_links_and_directories_are_not_taken_for_files(
    place: Path, name: str, reason: str, unbuilt: None
) -> None:
    (place / name).unlink()
    (place / name).symlink_to(place / name)
    assert reason in refused(place)
    (place / name).unlink()
    (place / name).mkdir()
    assert reason in refused(place)


# -- config.json ------------------------------------------------------------------------------------------------------


def test_a_directory_without_config_json_is_refused(tmp_path: Path, unbuilt: None) -> None:
    assert "has no config.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"   ", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"model_type": "llama"} trailing', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b"[]", "holds a list, not an object"),
        (b"null", "holds a NoneType, not an object"),
        (b'"llama"', "holds a str, not an object"),
        (b"1" * 5000, "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 400 + b"1" + b"}" * 400, "of type None"),
        (b'{"model_type": "llama", "a":' + b'{"a":' * 400 + b"1" + b"}" * 401, "nested deeper"),
        (b"{}", "no causal language model of type None"),
        (b'{"model_type": 5}', "of type 5"),
        (b'{"model_type": ["llama"]}', "of type ['llama']"),
        (b'{"model_type": "no-such"}', "of type 'no-such'"),
        (b'{"model_type": "vit"}', "of type 'vit'"),
        (b'{"model_type": "../llama"}', "of type '../llama'"),
    ],
    ids=range(19),
)
def test_an_invalid_config_json_is_refused(place: Path, text: bytes, reason: str, unbuilt: None) -> None:
    (place / "config.json").write_bytes(text)
    assert reason in refused(place)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; a whole number from 1 to 10000"),
        ({"num_hidden_layers": 5000}, "the weights files hold 39 tensors in all"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": [4]}, "does not fit llama"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "do"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings is 1000000000"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"vocab_size": 102}, "is [101, 64] in the weights and [102, 64] by the config"),
        ({"vocab_size": 2**30}, "is [101, 64] in the weights and [1073741824, 64] by the config"),
        ({"hidden_size": 128}, "by the config"),
        ({"hidden_size": 2**19}, "by the config"),
        ({"num_hidden_layers": 5}, "it describes"),
        ({"rope_theta": 10**30}, "which is no valid size"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
        ({"parts": [{"n_layer": 10**9}]}, "n_layer is 1000000000"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000; at most 131072 are supported"),
        ({"hidden_act": "no-such"}, "cannot build a llama"),
        ({"hidden_act": 5}, "does not fit llama"),
        ({"rope_parameters": {"rope_type": "no-such", "rope_theta": 1.0}}, "a"),
        ({"rms_norm_eps": "small"}, "does not fit llama"),
        ({"dtype": "load"}, "its weights are"),
        ({"dtype": "int8"}, "its weights are torch.int8; name a dtype"),
        ({"quantization_config": {"quant_method": "hqq"}}, "its weights are quantised (hqq)"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "its weights are quantised (gptq)"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_a_config_with_impossible_values_is_refused_before_anything_is_built(
    place: Path, fields: dict[str, Any], reason: str, unbuilt: None
) -> None:
    assert reason in refused(configured(place, **fields))


def test_other_names_for_the_number_of_layers_are_limited_too(tmp_path: Path, unbuilt: None) -> None:
    with silence_transformers():
        ARCHS["gpt2"].build().save_pretrained(tmp_path)
    assert "n_layer is 1000000000" in refused(configured(tmp_path, n_layer=10**9))


def test_a_config_of_a_gigabyte_is_refused_unread(place: Path, unbuilt: None) -> None:
    sparse(place / "config.json", 1 << 30)
    assert f"config.json has {1 << 30} bytes; {MOST_JSON} are allowed" in refused(place)


def test_code_in_the_directory_is_never_run(place: Path) -> None:
    code = f"open({str(place / 'ran')!r}, 'w')"
    for name in ("modeling_own", "configuration_own", "tokenization_own", "custom_generate/generate"):
        (place / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (place / name).with_suffix(".py").write_text(code)
    own = {"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_own.T", None]}, "tokenizer_class": "T"}
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    loaded = load(configured(place, auto_map=own))
    assert type(loaded.model).__module__.startswith("transformers.")
    assert "which is never run" in refused(configured(place, model_type="own"))
    assert not (place / "ran").exists()


@pytest.mark.parametrize("key", OTHER_CODE)
def test_a_config_cannot_choose_the_attention_implementation(place: Path, key: str) -> None:
    loaded = load(configured(place, **{key: "other/kernel"}))
    assert loaded.model.config._attn_implementation in ("sdpa", "eager")
    assert "other/kernel" not in str(vars(loaded.model.config))


@pytest.mark.parametrize("key", OTHER_CODE)
def test_a_nested_config_cannot_choose_the_attention_implementation(key: str, tmp_path: Path) -> None:
    with silence_transformers():
        AutoModelForCausalLM.from_config(auto_config("gemma3")).save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    loaded = load(configured(tmp_path, text_config=text | {key: "other/kernel"}))
    assert loaded.model.config.text_config._attn_implementation in ("sdpa", "eager")
    assert "other/kernel" not in str(vars(loaded.model.config.text_config))


def test_a_config_cannot_name_another_weights_file(place: Path) -> None:
    with (place / "adapter_model.bin").open("wb") as out:
        pickle.dump(_Bomb(str(place / "ran")), out)
    loaded = load(configured(place, transformers_weights="adapter_model.bin"))
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(ARCHS["llama"].build(), TOKENS))
    assert not (place / "ran").exists()


@pytest.mark.parametrize(
    "fields", [{"return_dict": False}, {"torchscript": True}, {"output_attentions": True}], ids=str
)
def test_a_config_cannot_change_the_type_of_the_output(place: Path, fields: dict[str, Any]) -> None:
    assert build_guest(load(configured(place, **fields)).model, backends()).mode == "flat"


# -- weights ----------------------------------------------------------------------------------------------------------


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_refused_unread(place: Path, name: str, unbuilt: None) -> None:
    (place / "model.safetensors").unlink()
    with (place / name).open("wb") as out:
        pickle.dump(_Bomb(str(place / "ran")), out)
    message = refused(place)
    assert name in message
    assert "can run code when they are read; convert them to safetensors" in message
    assert not (place / "ran").exists()


def test_a_directory_without_weights_is_refused(place: Path, unbuilt: None) -> None:
    (place / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(place)


def header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of the weights file, not its data."""
    raw = (path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    fields = json.loads(raw[8 : 8 + length])
    change(fields)
    text = json.dumps(fields).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def changed_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change_file(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return change_file


def first(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["model.norm.weight"]


DAMAGED: dict[str, Callable[[Path], None]] = {
    "empty": changed_bytes(lambda raw: b""),
    "seven bytes": changed_bytes(lambda raw: raw[:7]),
    "garbage": changed_bytes(lambda raw: bytes(range(256)) * 8),
    "text": changed_bytes(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "zeros": changed_bytes(lambda raw: bytes(len(raw))),
    "half": changed_bytes(lambda raw: raw[: len(raw) // 2]),
    "last byte missing": changed_bytes(lambda raw: raw[:-1]),
    "a byte more": changed_bytes(lambda raw: raw + b"x"),
    "header longer than the file": changed_bytes(lambda raw: struct.pack("<Q", len(raw)) + raw[8:]),
    "header of 2^63": changed_bytes(lambda raw: struct.pack("<Q", 1 << 63) + raw[8:]),
    "header too short": changed_bytes(lambda raw: struct.pack("<Q", 9) + raw[8:]),
    "header not JSON": changed_bytes(lambda raw: raw[:8] + b"x" + raw[9:]),
    "overlapping": lambda path: header(path, lambda fields: first(fields).update(data_offsets=[0, 256])),
    "out of range": lambda path: header(path, lambda fields: first(fields).update(data_offsets=[1 << 60, 1 << 61])),
    "backwards": lambda path: header(path, lambda fields: first(fields).update(data_offsets=[256, 0])),
    "product overflows": lambda path: header(path, lambda fields: first(fields).update(shape=[1 << 62, 1 << 62])),
    "negative shape": lambda path: header(path, lambda fields: first(fields).update(shape=[-64])),
    "wrong type for its size": lambda path: header(path, lambda fields: first(fields).update(dtype="F64")),
    "unknown type": lambda path: header(path, lambda fields: first(fields).update(dtype="Q4")),
    "tensor left out": lambda path: header(path, lambda fields: fields.pop("model.norm.weight")),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_safetensors_file_is_refused(place: Path, how: str, unbuilt: None) -> None:
    DAMAGED[how](place)
    assert "model.safetensors is not a whole safetensors file" in refused(place)


def test_a_safetensors_file_without_tensors_is_refused(place: Path, unbuilt: None) -> None:
    save_file({}, place / "model.safetensors")
    assert "the weights files hold 0 tensors" in refused(place)


def test_more_tensors_than_a_model_can_have_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, unbuilt: None
) -> None:
    monkeypatch.setattr(weights_files, "MOST_TENSORS", 3)
    monkeypatch.setattr(weights_files, "Stored", None)  # no record is made
    with pytest.raises(ModelRefused, match=r"model.safetensors has \d+ tensors; a model may have 3 in all files"):
        load(place)


def test_a_missing_tensor_is_named(place: Path) -> None:
    reweighted(place, lambda tensors: tensors.pop("model.norm.weight"))
    assert "parameters; the files hold" in refused(place)
    reweighted(
        place, lambda tensors: tensors.update(spare=torch.zeros(64))
    )  # so that the number of elements is sufficient
    assert "nothing for 1 of its parameters (model.norm.weight)" in refused(place)


def test_a_tensor_of_another_shape_is_named(place: Path, unbuilt: None) -> None:
    reweighted(place, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    assert "model.norm.weight is [65] in the weights and [64] by the config" in refused(place)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "is no index of weights files"),
        ("[" * 100_000, "is no index of weights files"),
        ("[]", "is no index of weights files"),
        ("{}", "is no index of weights files"),
        ('{"weight_map": []}', "lists no weights files"),
        ('{"weight_map": {}}', "lists no weights files"),
        ('{"weight_map": {"a": ["x"]}}', "lists no weights files"),
        ('{"weight_map": {"a": null}}', "lists no weights files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": "..\\\\model.safetensors"}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": ".."}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": ""}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "which is no safetensors file of its directory"),
        ('{"weight_map": {"a": "nul\\u0000.safetensors"}}', "is missing"),
        (
            '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            "lists model-00001-of-00002.safetensors, which is missing",
        ),
    ],
    ids=range(16),
)
def test_an_index_of_other_than_its_own_shards_is_refused(place: Path, index: str, reason: str, unbuilt: None) -> None:
    (place / "model.safetensors").rename(place.parent / "model.safetensors")
    (place / "model.safetensors.index.json").write_text(index)
    assert reason in refused(place)


def test_a_single_file_beside_an_index_is_the_one_checked_and_read(place: Path) -> None:
    """With both a single file and an index, transformers reads the single file."""
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    assert load(place).parameters > 0
    DAMAGED["half"](place)
    assert "model.safetensors is not a whole" in refused(place)


def test_a_missing_shard_is_named(tmp_path: Path, unbuilt: None) -> None:
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].unlink()
    assert f"lists {shards[1].name}, which is missing" in refused(tmp_path)


def test_nan_weights_of_a_given_network_are_refused_by_the_self_test() -> None:
    """NaN in a file is refused while it is loaded."""
    network = ARCHS["llama"].build()
    torch.nn.init.constant_(network.get_parameter("model.norm.weight"), torch.nan)
    with pytest.raises(ModelRefused, match="its logits are not finite: the weights are damaged"):
        build_guest(network, backends())


def test_weights_larger_than_memory_are_refused(place: Path, monkeypatch: Any, unbuilt: None) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3}[name])
    assert "this machine has 12288 bytes of memory in all" in refused(place)


# -- text -------------------------------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_is_loaded(place: Path) -> None:
    for file in place.glob("tokenizer*"):
        file.unlink()
    loaded = load(place)
    assert (loaded.text, loaded.without_text) == (None, "the directory has no tokenizer")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\0\0\0", '{"model": 5}'], ids=range(7)
)
def test_a_model_with_a_broken_tokenizer_is_loaded_with_the_reason(place: Path, text: str) -> None:
    (place / "tokenizer.json").write_text(text)
    loaded = load(place)
    assert loaded.text is None
    assert "transformers cannot build its tokenizer" in loaded.without_text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.4.0.0.json"])
def test_a_tokenizer_that_ends_the_process_of_its_trial_is_refused_before_transformers_reads_it(
    place: Path, name: str, monkeypatch: Any
) -> None:
    """The config may choose another file than `tokenizer.json`."""
    pattern = {"Regex": "[" * 100_000 + "a" + "]" * 100_000}
    nested = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    written = json.loads((place / "tokenizer.json").read_text()) | {"pre_tokenizer": nested}
    (place / name).write_text(json.dumps(written))
    (place / "tokenizer_config.json").write_text(json.dumps({"fast_tokenizer_files": [name]}))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    assert "its tokenizer is not used: it ends the process that builds it" in refused(place)


def test_what_transformers_builds_of_all_files_is_tried_as_well(place: Path, monkeypatch: Any) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(place / "tokenizer.json")))
    made.backend_tokenizer.normalizer = Prepend("a" * 65)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **_options: made)
    assert "its tokenizer is not used: its normalizers can make 65 bytes of one" in refused(place)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "vocab.json", "tokenizer.model", "merges.txt"]
)
def test_a_tokenizer_of_a_gigabyte_is_not_read(place: Path, name: str) -> None:
    sparse(place / name, 1 << 30)
    loaded = load(place)
    assert loaded.text is None
    assert loaded.without_text == f"{name} has {1 << 30} bytes; {MOST_TEXT} are allowed"


# -- generation_config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_an_invalid_generation_config_is_refused(place: Path, text: str, unbuilt: None) -> None:
    (place / "generation_config.json").write_text(text)
    assert "generation_config.json" in refused(place)


def test_a_generation_config_of_a_gigabyte_is_refused_unread(place: Path, unbuilt: None) -> None:
    sparse(place / "generation_config.json", 1 << 30)
    assert "generation_config.json has" in refused(place)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"}, {"temperature": [1]}, {"top_p": True}, {"temperature": {"__float__": "NaN"}},
        {"eos_token_id": "end"}, {"eos_token_id": [[2]]}, {"eos_token_id": 2.5}, {"eos_token_id": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_generation_fields_of_wrong_types_are_refused(place: Path, fields: dict[str, Any]) -> None:
    (place / "generation_config.json").write_text(json.dumps({"do_sample": True, **fields}))
    (name,) = fields
    assert name in refused(place)


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        ({"do_sample": True, "top_k": -1}, {"top_k": 0}),
        ({"do_sample": True, "top_k": 50.0, "temperature": 0.5}, {"top_k": 50, "temperature": 0.5}),
        ({"do_sample": True, "typical_p": 0.0, "min_p": 0}, {"typical_p": 1.0, "min_p": 0}),
        ({"do_sample": True, "top_p": 0, "top_k": 9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.3}, {"temperature": 0.0, "repetition_penalty": 1.3}),
        ({"do_sample": False, "temperature": 0.7, "top_k": -1}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": -1}, {"temperature": 0.7, "top_k": 0}),
        ({"top_p": 0, "top_k": 9}, {"temperature": 0.0}),
        ({}, {}),
    ],
    ids=str,
)
def test_generation_fields_are_interpreted_as_in_transformers_but_that_sampling_is_the_default(
    place: Path, fields: dict[str, Any], defaults: dict[str, Any]
) -> None:
    (place / "generation_config.json").write_text(json.dumps(fields))
    found = load(place).defaults
    assert found == defaults
    assert all(type(found[name]) is type(value) for name, value in defaults.items())
    SamplingParams(**found)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"do_sample": True, "top_k": -2}, "top_k"),
        ({"do_sample": True, "top_k": 1.5}, "top_k"),
        ({"do_sample": True, "temperature": 10**400}, "temperature"),
        ({"do_sample": True, "top_p": 1.5}, "top_p"),
        ({"do_sample": True, "top_p": -1}, "top_p"),
        ({"do_sample": True, "temperature": -0.1}, "temperature"),
        ({"do_sample": False, "repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "much"}, "repetition_penalty"),
        ({"do_sample": "false"}, "do_sample"),
    ],
    ids=str,
)
def test_generation_values_out_of_range_are_refused_before_anything_is_built(
    place: Path, fields: dict[str, Any], name: str, unbuilt: None
) -> None:
    (place / "generation_config.json").write_text(json.dumps(fields))
    reason = refused(place)
    assert "generation_config.json" in reason
    assert name in reason


# -- where ------------------------------------------------------------------------------------------------------------


def test_an_absent_device_is_refused_before_anything_is_built(place: Path, unbuilt: None) -> None:
    assert f"torch sees {torch.cuda.device_count()} CUDA devices" in refused(place, device="cuda:99")
    with pytest.raises(BadRequest, match="there is no device 'banana'"):
        load(place, device="banana")


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_the_default_config_of_every_type_is_within_the_size_limits(model_type: str, tmp_path: Path) -> None:
    with silence_transformers():
        try:
            config = CONFIG_MAPPING[model_type]()
        except StrictDataclassClassValidationError as error:
            pytest.skip(f"transformers itself refuses its default config: {error}")
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert config_fields(tmp_path)["model_type"] == config.model_type


@pytest.mark.parametrize("experts", [16_384, 1 << 17])
def test_experts_that_are_rows_of_an_embedding_may_be_many(experts: int, tmp_path: Path) -> None:
    place = tmp_path / "doge"
    with silence_transformers():
        ARCHS["doge"].build(num_experts=experts).save_pretrained(place)
    assert type(load(place).model).__name__ == "DogeForCausalLM"
    message = refused(configured(place, num_experts=(1 << 17) + 1))
    assert "num_experts is 131073; at most 131072 are supported" in message
