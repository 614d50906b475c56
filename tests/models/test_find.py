"""A name is found in the local Hugging Face cache, even if fetched in part, or the missing files are named."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights.find import find
from kvcellar.errors import ModelNotFound, ModelRefused
from kvcellar.frontend.engine import Engine
from tests.cli.command import kvcellar
from tests.zoo import ARCHS, reference_logits

COMMIT, OTHER = "a" * 40, "b" * 40
NAMES = ("owner/tiny", "gpt2", "owner.x/tiny-1.5_b", "tiny-1.5_b")
BESIDE = ("README.md", ".gitattributes", "pytorch_model.bin", "merges.txt", "onnx/model.onnx", "adapter_config.json")
TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a repository."""
    path = tmp_path_factory.mktemp("repository")
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(path, max_shard_size="200KB")
    Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5}')
    return path


Fetch = Callable[..., Path]


@pytest.fixture
def fetched(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """Lay out a cache as huggingface_hub does after it fetched all of the repository but `without`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def fetch(name: str, without: Iterable[str] = BESIDE, *, revision: str = "main", commit: str = COMMIT) -> Path:
        store = tmp_path / f"models--{name.replace('/', '--')}"
        blobs, snapshot = store / "blobs", store / "snapshots" / commit
        for folder in (blobs, snapshot, store / "refs", store / "trees"):
            folder.mkdir(parents=True, exist_ok=True)
        (store / "refs" / revision).write_text(commit)
        listing = {}
        for file in whole.iterdir():
            listing[file.name] = {"size": file.stat().st_size, "blob_id": file.name}
            if file.name not in without:
                shutil.copy(file, blobs / file.name)
                (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
        listing |= {other: {"size": 1, "blob_id": other} for other in BESIDE}
        (store / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
        return snapshot

    return fetch


@pytest.mark.parametrize("name", NAMES)
def test_a_partly_fetched_snapshot_is_found_and_served(name: str, fetched: Fetch) -> None:
    snapshot = fetched(name)
    assert find(name) == (name, snapshot)
    loaded = load(name)
    assert loaded.name == name
    assert torch.equal(
        reference_logits(loaded.model, list(range(3, 40))), reference_logits(ARCHS["llama"].build(), list(range(3, 40)))
    )
    assert loaded.text is not None
    assert loaded.text.chat_template is not None
    assert loaded.defaults["temperature"] == 0.5


def test_a_snapshot_without_a_file_listing_is_found_and_served(fetched: Fetch, tmp_path: Path) -> None:
    snapshot = fetched("owner/tiny")
    shutil.rmtree(tmp_path / "models--owner--tiny" / "trees")
    assert find("owner/tiny") == ("owner/tiny", snapshot)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", *TEXT])
def test_a_missing_config_or_tokenizer_file_is_named(file: str, fetched: Fetch) -> None:
    fetched("gpt2", {*BESIDE, file})
    with pytest.raises(ModelRefused, match=f"gpt2 in the local Hugging Face .* lacks .*{file}.*`kvcellar pull gpt2`"):
        find("gpt2")


def test_without_any_tokenizer_file_it_is_served_with_token_ids(fetched: Fetch) -> None:
    fetched("gpt2", {*BESIDE, *TEXT})
    loaded = load("gpt2")
    assert (loaded.text, loaded.without_text) == (None, "the directory has no tokenizer")


def test_a_missing_shard_of_a_snapshot_is_named(fetched: Fetch, whole: Path) -> None:
    shard = sorted(whole.glob("model-*.safetensors"))[1].name
    fetched("owner/tiny", {*BESIDE, shard})
    with pytest.raises(ModelRefused, match=f"lists {shard}, which is missing"):
        load("owner/tiny")


def test_a_deleted_blob_is_named(fetched: Fetch, tmp_path: Path) -> None:
    fetched("owner/tiny", ())
    shard = sorted((tmp_path / "models--owner--tiny" / "blobs").glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelRefused, match=f"lists {shard.name}, which is missing"):
        load("owner/tiny")


def test_a_snapshot_without_weights_is_refused(fetched: Fetch, whole: Path) -> None:
    fetched("gpt2", {*BESIDE, *(file.name for file in whole.glob("model*"))})
    with pytest.raises(ModelRefused, match=r"has neither model\.safetensors nor"):
        load("gpt2")


def test_only_the_main_revision_is_used(fetched: Fetch) -> None:
    fetched("gpt2", revision="v1", commit=OTHER)
    with pytest.raises(ModelNotFound, match=r"no main revision of a model of that name .* `kvcellar pull gpt2`"):
        find("gpt2")
    snapshot = fetched("gpt2")
    assert find("gpt2") == ("gpt2", snapshot)


def test_a_revision_is_a_part_of_the_name(fetched: Fetch) -> None:
    snapshot = fetched("gpt2", revision="v1", commit=OTHER)
    assert find("gpt2@v1") == ("gpt2@v1", snapshot)
    assert find(f"gpt2@{OTHER}") == (f"gpt2@{OTHER}", snapshot)
    for missing in ("gpt2@v2", "gpt2@main", f"gpt2@{COMMIT}"):
        with pytest.raises(ModelNotFound, match=f"no {missing.partition('@')[2]} revision"):
            find(missing)


def test_a_directory_of_that_name_is_preferred(
    fetched: Fetch, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched("gpt2")
    shutil.copytree(whole, tmp_path / "here" / "gpt2")
    monkeypatch.chdir(tmp_path / "here")
    assert find("gpt2") == ("gpt2", (tmp_path / "here" / "gpt2").resolve())


def test_engine_and_command_accept_a_name_without_an_owner(fetched: Fetch) -> None:
    fetched("gpt2")
    with Engine("gpt2", cache_bytes=10**6, threads=1) as engine:
        assert engine.model.name == "gpt2"
        assert engine.generate([5, 6, 7], max_tokens=3, temperature=0, ignore_eos=True).token_ids
    ran = kvcellar("run", "gpt2", "5 6 7", "--ids", "--max-tokens", "3", "--cache-bytes", "1M", "--threads", "1")
    assert (ran.code, ran.err) == (0, "")
    missing = kvcellar("run", "gpt3", "5 6 7")
    assert missing.code == 1
    assert "no main revision of a model of that name" in missing.err
