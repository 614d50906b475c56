"""The head that a model's `draft` names is found, or refused with what it is and what can be used instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.heads import find_head
from kvcellar.engine.models.heads.mtp_head import MtpHead
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import Loaded, load
from kvcellar.errors import ModelNotFound, ModelRefused
from kvcellar.memory.attention.choose import backends
from tests.models.mtp import saved_beside
from tests.zoo import ARCHS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Guest]:
    loaded = load(saved_beside(tmp_path_factory.mktemp("models") / "target", "llama", num_mtp_layers=1))
    return loaded, build_guest(loaded.model, backends())


def directory(path: Path, **fields: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_the_models_own_head_is_found(target: tuple[Loaded, Guest]) -> None:
    head = find_head("mtp", *target, backends())
    assert isinstance(head, MtpHead)
    assert head.layers == 1


def test_an_ordinary_model_is_no_head(target: tuple[Loaded, Guest], tmp_path: Path) -> None:
    with silence_transformers():
        ARCHS["glm4-moe"].build(num_mtp_layers=1).save_pretrained(tmp_path / "m")
    assert find_head(tmp_path / "m", *target, backends()) is None


def test_a_directory_that_is_not_there_is_not_found(target: tuple[Loaded, Guest], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        find_head(tmp_path / "none", *target, backends())


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3": ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "it is an EAGLE head"),
    "eagle field": ({"model_type": "llama", "eagle_config": {}}, "it is an EAGLE head"),
    "speculators eagle3": ({"speculators_model_type": "eagle3"}, "it is an EAGLE head"),
    "speculators other": ({"speculators_model_type": "new", "speculators_config": {}}, "format of speculators"),
    "dflash": ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "it is a DFlash head"),
    "muse glimmer": ({"model_type": "muse_glimmer_assistant"}, "it is a DFlash head"),
    "medusa": ({"model_type": "medusa", "medusa_num_heads": 4}, "it is Medusa heads"),
    "mlp": ({"model_type": "mlp_speculator"}, "it is an MLP speculator"),
    "mtp": ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, "it is an MTP head without its"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_heads_are_refused_by_name(kind: str, target: tuple[Loaded, Guest], tmp_path: Path) -> None:
    fields, name = OTHERS[kind]
    with pytest.raises(ModelRefused) as refused:
        find_head(directory(tmp_path / "head", **fields), *target, backends())
    assert name in str(refused.value)
    assert "draft='ngram', or the directory of a smaller model" in str(refused.value)


def test_a_refused_own_head_says_what_can_be_used_instead(tmp_path: Path) -> None:
    with silence_transformers():
        ARCHS["qwen3.5"].build().save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m")
    guest = build_guest(loaded.model, backends())
    with pytest.raises(ModelRefused, match=r"m has no MTP head that can be used.*draft='ngram'"):
        find_head("mtp", loaded, guest, backends())


def test_a_network_that_was_given_has_no_head() -> None:
    loaded = load(ARCHS["llama"].build(num_mtp_layers=1))
    with pytest.raises(ModelRefused, match=r"was given as a network.*Load the model from its directory"):
        find_head("mtp", loaded, build_guest(loaded.model, backends()), backends())
