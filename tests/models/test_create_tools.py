"""Real models are created: checked by their headers alone, quantised, with drafts and adapters, and they run."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.weights.create_tools import CreateTools
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.frontend.engine import Engine
from kvcellar.library.create import create
from kvcellar.library.library import Library, LibraryModel
from kvcellar.library.modelfile import parse
from tests.models import gguf_files as gguf
from tests.models.assistants import ORDERED, VOCAB, saved
from tests.models.lora import ends_with, layers_of
from tests.models.lora import saved as saved_adapter
from tests.zoo import ARCHS

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def library(tmp_path, monkeypatch) -> Library:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    return Library(tmp_path / "models")


def directory(path: Path, arch: str, **fields) -> Path:
    with silence_transformers():
        ARCHS[arch].build(**fields).save_pretrained(path)
    return path


def made(library: Library, name: str, modelfile: str, folder: Path, **options) -> LibraryModel:
    return create(library, name, parse(modelfile), tools=CreateTools(), folders=[folder], **options).model


def tokens(model: str | Path, **options) -> list[int]:
    with Engine(model, dtype="float32", cache_bytes=8_000_000, threads=1, **options) as engine:
        return list(engine.generate([*range(20, 40)], **GREEDY).token_ids)


def test_a_gemma_4_with_its_assistant_is_created_from_directories_and_drafts(library, tmp_path):
    directory(tmp_path / "m", "gemma4-e2b", vocab_size=VOCAB)
    saved(tmp_path / "a", "gemma4_assistant", **ORDERED)
    model = made(library, "gemma", "FROM ./m\nDRAFT ./a\nPARAMETER draft_num_predict 3", tmp_path)
    assert model.draft is not None
    with Engine("gemma", dtype="float32", cache_bytes=8_000_000, threads=1) as engine:
        found = engine.generate([*range(20, 40)], **GREEDY)
    assert found.speculation is not None
    assert list(found.token_ids) == tokens(tmp_path / "m")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"backbone_hidden_size": 80}, "it reads hidden states of 80 values, and the target has 64"),
        ({"text": {"vocab_size": 64}}, "it has 64 tokens, and the target has 100"),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused(library, tmp_path, fields, reason):
    directory(tmp_path / "m", "gemma4-e2b", vocab_size=VOCAB)
    saved(tmp_path / "a", "gemma4_assistant", **fields)
    with pytest.raises(BadRequest, match=rf"\(line 2\): DRAFT ./a: .*{reason}"):
        made(library, "gemma", "FROM ./m\nDRAFT ./a", tmp_path)
    assert not library.names()
    with pytest.raises(BadRequest, match=r"\(line 1\): FROM ./a: transformers cannot build a gemma4_assistant"):
        made(library, "a", "FROM ./a", tmp_path)


def test_drafts_are_checked_as_they_are_at_load(library, tmp_path):
    directory(tmp_path / "m", "llama")
    directory(tmp_path / "small", "llama", hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    (tmp_path / "eagle").mkdir()
    (tmp_path / "eagle/config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (tmp_path / "eagle/model.safetensors").write_bytes(b"")
    model = made(library, "pair", "FROM ./m\nDRAFT ./small", tmp_path)
    assert tokens("pair") == tokens(tmp_path / "m")
    with pytest.raises(BadRequest, match=r"DRAFT ./m: it does not fit the target as a draft. size: the draft has"):
        made(library, "x", "FROM ./small\nDRAFT ./m", tmp_path)
    with pytest.raises(BadRequest, match=r"DRAFT ./eagle: it cannot draft: it is an EAGLE head"):
        made(library, "x", "FROM ./m\nDRAFT ./eagle", tmp_path)
    assert [str(name) for name in library.names()] == [model.name]


def test_weights_of_a_created_model_are_quantised_and_it_runs(library, tmp_path):
    directory(tmp_path / "m", "llama", hidden_size=64, intermediate_size=128)
    directory(tmp_path / "small", "llama", hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    options = {"quantize": "Q8", "draft_quantize": "int4"}
    model = made(library, "pair", "FROM ./m\nDRAFT ./small", tmp_path, **options)
    assert (model.manifest.quantized, model.manifest.draft_quantized) == ("int8", "int4")
    assert model.manifest.report is not None
    assert {name: one["kind"] for name, one in model.manifest.report.items()} == {"model": "int8", "draft": "int4"}
    assert tokens("pair", draft="none") == tokens(model.directory) == tokens("pair")
    assert made(library, "again", "FROM ./m\nDRAFT ./small", tmp_path, **options).id == model.id
    with pytest.raises(ModelRefused, match="quantised"):
        made(library, "x", f"FROM {model.directory}", tmp_path, quantize="int4")


def test_a_gguf_file_is_converted_and_runs(library, tmp_path):
    gguf.convert(ARCHS["llama"].build(), tmp_path / "m.gguf")
    made(library, "a", "FROM ./m.gguf", tmp_path)
    assert tokens("a")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:-1])
    with pytest.raises(BadRequest, match=r"\(line 1\): FROM ./m.gguf: "):
        made(library, "b", "FROM ./m.gguf", tmp_path)
    assert [str(name) for name in library.names()] == ["a:latest"]


def test_adapters_are_checked_and_stored(library, tmp_path):
    directory(tmp_path / "m", "llama")
    layers = layers_of(ARCHS["llama"].build(), ends_with("q_proj", "v_proj"))
    saved_adapter(tmp_path / "good", layers)
    saved_adapter(tmp_path / "bad", layers, rank=4, r=8)
    model = made(library, "a", "FROM ./m\nADAPTER ./good", tmp_path)
    assert len(model.adapters) == 1
    with pytest.raises(BadRequest, match=r"\(line 2\): ADAPTER ./bad: the adapter bad cannot be used"):
        made(library, "b", "FROM ./m\nADAPTER ./bad", tmp_path)
    assert len(library.names()) == 1


@pytest.mark.parametrize("quantize", [None, "int8", "bf16"])
def test_floats_of_eight_bits_without_a_description_are_refused(library, tmp_path, quantize):
    file, name = directory(tmp_path / "m", "llama") / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises((BadRequest, ModelRefused), match=rf"model.safetensors holds {name} as F8_E4M3; float32"):
        made(library, "a", "FROM ./m", tmp_path, quantize=quantize)
    assert not library.names()


def test_a_damaged_directory_is_refused_before_it_is_copied(library, tmp_path):
    directory(tmp_path / "m", "llama")
    weights = tmp_path / "m/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadRequest, match=r"\(line 1\): FROM ./m: model.safetensors is not a whole safetensors file"):
        made(library, "a", "FROM ./m", tmp_path)
    assert not any((library.root / "blobs").iterdir())


def test_without_folders_no_directory_is_looked_at(library, tmp_path, monkeypatch):
    """What is a directory of the working directory and what is nothing have the same message."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    directory(tmp_path / "here1", "llama")
    (tmp_path / "private").mkdir()
    for there, absent in (
        ("here1", "gone1"),
        ("private/../here1", "private/../gone1"),
        ("private/../../x", "nothing/../../x"),
    ):
        texts: list[str] = []
        for name in (there, absent):
            for line in (f"FROM {name}", f"FROM embedded\nDRAFT {name}"):
                with pytest.raises(BadRequest, match="there is no model of that name in the library, and ") as raised:
                    create(library, "a", parse(line), tools=CreateTools())
                texts.append(str(raised.value).replace(name, "NAME"))
        assert texts[:2] == texts[2:]
    assert CreateTools().find("embedded").is_dir()


def test_a_report_without_a_measurement_loads_no_model(library, tmp_path, monkeypatch):
    directory(tmp_path / "m", "llama")
    monkeypatch.setattr(
        "kvcellar.engine.models.quantize.directory.measure_harm", lambda *_, **__: pytest.fail("it measures")
    )
    tools = CreateTools(measure=False)
    model = create(library, "a", parse("FROM ./m"), tools=tools, folders=[tmp_path], quantize="int8").model
    assert model.manifest.quantized == "int8"
