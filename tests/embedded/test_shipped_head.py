"""The shipped MTP head: it is that of its record, it was trained for the shipped model, and its drafts are accepted."""

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kvcellar.engine.models import embedded
from kvcellar.engine.models.heads.mtp_head import load_mtp
from kvcellar.engine.models.load import load
from scripts.embedded_trainer.corpus import Source
from scripts.embedded_trainer.head import head_shapes
from scripts.embedded_trainer.head_training import count_head_parameters
from scripts.embedded_trainer.network import Shape
from scripts.embedded_trainer.tokens import load_tokenizer

HELD_OUT = ("difflib.py", "threading.py", "uuid.py", "reprlib.py")
LINES = slice(40, 80)
TOKENS = 160  # of each file


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return json.loads((embedded.path() / "manifest.json").read_text())


@pytest.fixture(scope="module")
def texts() -> Tensor:
    """Library code that neither the model nor the head was trained on. -> [F,T]"""
    tokenizer = load_tokenizer(embedded.path() / "tokenizer.json")
    library = Path(sysconfig.get_paths()["stdlib"])
    lines = ["\n".join((library / name).read_text().splitlines()[LINES]) for name in HELD_OUT]
    return torch.tensor([tokenizer.encode(text).ids[:TOKENS] for text in lines])


def digest(name: str) -> str:
    return hashlib.sha256((embedded.path() / name).read_bytes()).hexdigest()


def test_the_files_are_those_of_the_record(manifest: dict[str, Any]) -> None:
    record = manifest["mtp"]
    assert digest("mtp.safetensors") == record["sha256"]
    assert (embedded.path() / "mtp.safetensors").stat().st_size == record["bytes"] < 2 << 20
    assert digest("model.safetensors") == record["model_sha256"]
    assert record["steps_done"] == record["recipe"]["steps"]


def test_the_weights_are_the_shapes_in_bfloat16(manifest: dict[str, Any]) -> None:
    shape = Shape(**manifest["run"]["shape"])
    with safe_open(embedded.path() / "mtp.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    assert {name: tuple(weight.shape) for name, weight in found.items()} == head_shapes(shape)
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    assert all(bool(weight.isfinite().all()) for weight in found.values())
    assert sum(weight.numel() for weight in found.values()) == count_head_parameters(shape)
    assert count_head_parameters(shape) == manifest["mtp"]["parameters"]


def test_the_card_has_the_measured_acceptance(manifest: dict[str, Any]) -> None:
    card = (embedded.path() / "CARD.md").read_text()
    assert {measured["temperature"] for measured in manifest["mtp"]["acceptance"]} == {0.0, 0.8}
    for measured in manifest["mtp"]["acceptance"]:
        cells = [*measured["accepted"], measured["on_files"]]
        assert " | ".join(f"{cell:.3f}" for cell in cells) in card


def looked_up(text: list[int]) -> int:
    """The token behind the last occurrence of the longest suffix of 3 to 1 tokens; -1 if there is none."""
    for size in (3, 2, 1):
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[-size:]:
                return text[at + size]
    return -1


@torch.no_grad()
def test_drafts_for_held_out_code_are_the_models_tokens_more_often_than_those_of_a_lookup(texts: Tensor) -> None:
    assert all(Source(name, "", "").held_out for name in HELD_OUT)
    model = load("embedded", dtype="float32").model
    head = load_mtp(model, embedded.path())
    hidden = model.get_decoder()(texts, use_cache=False).last_hidden_state  # [F,T,H]
    chosen = model.lm_head(hidden).argmax(-1)  # [F,T], at p of token p+1
    positions = torch.arange(1, TOKENS)[None]
    out = head.forward_layer(0, hidden[:, :-1], positions, None, input_ids=texts[:, 1:])
    drafts = model.lm_head(out).argmax(-1)  # [F,T-1], at p of token p+2
    accepted = float((drafts == chosen[:, 1:]).float().mean())
    guesses = torch.tensor([[looked_up(row[:end]) for end in range(2, TOKENS + 1)] for row in texts.tolist()])
    found = float((guesses == chosen[:, 1:]).float().mean())
    assert accepted > 0.45
    assert accepted > found + 0.1
