"""The canary reports how each architecture is served, and which ones are lost."""

import pytest
from transformers import PreTrainedModel

from kvcellar.engine.models.build_guest import build_guest as original
from kvcellar.engine.models.guest import Guest
from kvcellar.errors import ModelRefused
from scripts import canary


def test_the_pinned_transformers_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert canary.main(["llama", "bloom", "rwkv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("transformers 5.")
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["llama", "flat", "->", "flat"],
        ["bloom", "solo", "->", "solo"],
        ["rwkv", "refused", "->", "refused"],
    ]
    assert lines[4] == "0 lost"


def test_a_newly_refused_architecture_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_guest(model: PreTrainedModel, *rest: object) -> Guest:
        if model.config.model_type == "llama":
            raise ModelRefused("its cache has another interface")
        return original(model, *rest)

    monkeypatch.setattr(canary, "build_guest", build_guest)
    assert canary.main(["llama", "qwen3"]) == 1
    out = capsys.readouterr().out
    assert "LOST  llama" in out
    assert "its cache has another interface" in out
    assert out.endswith("1 lost: llama\n")


def test_an_architecture_with_wrong_logits_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary.Timeline, "worst_difference", lambda self: 0.5)
    assert canary.main(["llama"]) == 1
    assert "wrong   its logits differ by 5.0e-01" in capsys.readouterr().out


def test_an_architecture_that_cannot_be_built_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: object) -> PreTrainedModel:
        raise AttributeError("no such config field")

    monkeypatch.setattr("tests.zoo.Arch.build", build)
    assert canary.main(["llama"]) == 1
    assert "it cannot be built: AttributeError: no such config field" in capsys.readouterr().out
