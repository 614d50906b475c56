"""Rounding with sums over what layers read, and the measured effect of fewer bits."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvcellar.engine.models import embedded
from kvcellar.engine.models.load import load
from kvcellar.engine.models.quantize import measuring
from kvcellar.engine.models.quantize.directory import int4_gptq, quantize_directory
from kvcellar.engine.models.quantize.kinds import report_lines
from kvcellar.engine.models.quantize.measuring import (
    Calibration,
    _compare,
    _Differences,
    measure_harm,
    of_text,
    sampled,
)
from kvcellar.engine.models.quantize.rounding import int4_groups
from kvcellar.errors import BadRequest, ModelRefused
from tests.models.quantised import saved, types

TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 40


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter windows than for users."""
    for name in ("WINDOWS", "CALIBRATED"):
        monkeypatch.setattr(measuring, name, 4)
    for name in ("LENGTH", "CALIBRATED_LENGTH"):
        monkeypatch.setattr(measuring, name, 40)


def correlated(seed: int, inputs: int, rows: int) -> Tensor:
    """The sum over inputs whose elements depend on each other, as those of real layers do."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=draw) * torch.rand(inputs, generator=draw) ** 4
    read = torch.randn(rows, inputs, generator=draw) @ mixing
    return read.T @ read


def values(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales.float().repeat_interleave(32, 1)


def error(weight: Tensor, found: tuple[Tensor, Tensor], hessian: Tensor) -> float:
    wrong = (weight - values(*found)).double()
    return float(((wrong @ hessian.double()) * wrong).sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("inputs", [32, 160, 288])
def test_outputs_have_a_smaller_error_than_by_the_rule(seed: int, inputs: int) -> None:
    weight = torch.randn(48, inputs, generator=torch.Generator().manual_seed(seed))
    hessian = correlated(seed, inputs, 4 * inputs)
    found = int4_gptq(weight, hessian)
    assert found is not None
    assert error(weight, found, hessian) < 0.8 * error(weight, int4_groups(weight), hessian)
    assert found[0].min() >= -8
    assert found[0].max() <= 7


def dumb(weight: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """One input after the other, with the inverse of what is left computed anew, in float64."""
    inputs = weight.shape[1]
    weight = weight.copy()
    damped = hessian + 0.01 * hessian.diagonal().mean() * np.eye(inputs)
    out = np.zeros_like(weight)
    for column in range(inputs):
        if column % 32 == 0:
            group = weight[:, column : column + 32]
            largest = np.take_along_axis(group, np.abs(group).argmax(1)[:, None], 1)
            scale = torch.from_numpy(largest / -8).to(torch.bfloat16).double().numpy()[:, 0]
        out[:, column] = np.clip(np.round(weight[:, column] / scale), -8, 7) * scale
        inverse = np.linalg.inv(damped[column:, column:])
        wrong = (weight[:, column] - out[:, column]) / inverse[0, 0]
        weight[:, column:] -= np.outer(wrong, inverse[0])
    return out


def test_codes_are_those_of_the_plain_algorithm() -> None:
    """But for a few where float32 rounds to the other side."""
    weight = torch.randn(32, 160, generator=torch.Generator().manual_seed(5))
    hessian = correlated(5, 160, 700)
    found = int4_gptq(weight, hessian)
    assert found is not None
    expected = dumb(weight.double().numpy(), hessian.double().numpy())
    same = np.isclose(values(*found).numpy(), expected, rtol=1e-3, atol=1e-6)
    assert same.mean() > 0.97


@pytest.mark.parametrize("rows", [1, 16])
def test_fewer_rows_than_inputs_are_enough(rows: int) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    hessian = correlated(6, 64, rows)
    found = int4_gptq(weight, hessian)
    assert found is not None
    assert error(weight, found, hessian) < error(weight, int4_groups(weight), hessian)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_sum_without_numbers_is_of_no_use(value: float) -> None:
    assert (
        int4_gptq(torch.randn(32, 64, generator=torch.Generator().manual_seed(6)), torch.full((64, 64), value)) is None
    )


# -- calibration ------------------------------------------------------------------------------------------------------


def test_sums_are_over_what_each_layer_reads(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", num_hidden_layers=2)
    calibration = Calibration(source, None)
    network = load(source).model
    linear = [name for name, one in network.named_modules() if isinstance(one, nn.Linear)]
    found: dict[str, Tensor] = {}
    for hessians in calibration.hessians([*linear, "model.norm"]):
        found |= {name: one.clone() for name, one in hessians.items() if one is not None}
    assert set(found) == set(linear)
    for name in linear:
        expected: Any = 0
        read: list[Tensor] = []
        handle = network.get_submodule(name).register_forward_pre_hook(
            lambda _, given, read=read: read.append(given[0])
        )
        with torch.inference_mode():
            for ids in calibration.windows.ids:
                network(input_ids=ids[None], use_cache=False)
        handle.remove()
        rows = torch.cat([one[0] for one in read]).float()
        expected = rows.T @ rows
        assert torch.allclose(found[name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_rounds_of_less_memory_give_the_same_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "m", num_hidden_layers=2)
    quantize_directory(source, tmp_path / "one", "int4", method="gptq", measure=False)
    monkeypatch.setattr(measuring, "_BYTES", 1)
    quantize_directory(source, tmp_path / "many", "int4", method="gptq", measure=False)
    one, many = (tmp_path / name / "model.safetensors" for name in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()
    quantize_directory(source, tmp_path / "rule", "int4", measure=False)
    assert one.read_bytes() != (tmp_path / "rule" / "model.safetensors").read_bytes()


def test_experts_are_rounded_by_the_rule_and_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "mixtral", num_hidden_layers=2)
    report = quantize_directory(source, tmp_path / "q", "int4", method="gptq", measure=False)
    names = report["calibration"]["by_the_rule"]
    assert len(names) == 2 * 3 * load(source).model.config.num_local_experts
    assert all(".experts." in name for name in names)
    assert any("tensors by signed-max" in line and names[0] in line for line in report_lines(report))


def test_layers_that_read_too_little_are_rounded_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FEWEST", 10_000)
    source = saved(tmp_path / "m", num_hidden_layers=2)
    report = quantize_directory(source, tmp_path / "q", "int4", method="gptq", measure=False)
    assert len(report["calibration"]["by_the_rule"]) == 14
    quantize_directory(source, tmp_path / "rule", "int4", measure=False)
    assert (tmp_path / "q" / "model.safetensors").read_bytes() == (tmp_path / "rule" / "model.safetensors").read_bytes()


def test_a_text_calibrates_the_embedded_model(tmp_path: Path) -> None:
    report = quantize_directory(embedded.path(), tmp_path / "q", "q4_k_m", method="gptq", calibrate=TEXT, measure=False)
    assert report["calibration"] == {"text": "the given text", "windows": 4, "tokens": 160, "by_the_rule": []}
    assert "calibrated on 160 tokens: the given text" in report_lines(report)
    assert set(types(tmp_path / "q").values()) == {"BF16", "I8", "I32", "I64"}


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"the text has 2 tokens; at least 16 are needed"):
        quantize_directory(embedded.path(), tmp_path / "q", "int4", method="gptq", calibrate="def a")
    source = saved(tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(BadRequest, match="a text cannot be used: the directory has no tokenizer"):
        quantize_directory(source, tmp_path / "q", "int4", method="gptq", calibrate=TEXT)
    with pytest.raises(BadRequest, match="is for the method gptq, not signed-max"):
        quantize_directory(source, tmp_path / "q", "int4", calibrate=TEXT)
    for kind in ("int8", "bf16"):
        with pytest.raises(BadRequest, match=f"gptq chooses codes of 4 bits; {kind} has none"):
            quantize_directory(source, tmp_path / "q", kind, method="gptq")
    assert not (tmp_path / "q").exists()


def test_a_text_is_cut_into_equal_windows() -> None:
    loaded = load("embedded")
    assert loaded.text is not None
    ids = loaded.text.tokenizer.encode(TEXT, add_special_tokens=False).ids
    windows = of_text(loaded, TEXT, 3, 50)
    assert windows.ids.flatten().tolist() == ids[:150]
    assert windows.ids.shape == (3, 50)


@pytest.mark.parametrize("name", ["llama", "lfm2", "gemma3"])
def test_samples_are_the_same_each_time_and_leave_the_random_state(name: str, tmp_path: Path) -> None:
    model = load(saved(tmp_path / "m", name)).model
    before, config = torch.get_rng_state(), model.generation_config
    one, other = sampled(model, 3, 20, seed=1), sampled(model, 3, 20, seed=1)
    assert one.source == "sampled from the model"
    assert torch.equal(one.ids, other.ids)
    assert one.ids.shape == (3, 20)
    assert not torch.equal(one.ids, sampled(model, 3, 20, seed=2).ids)
    assert torch.equal(before, torch.get_rng_state())
    assert model.generation_config is config


# -- harm -------------------------------------------------------------------------------------------------------------


def test_a_recount_gives_the_numbers_of_the_report(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", num_hidden_layers=2)
    report = quantize_directory(source, tmp_path / "q", "int4")
    assert json.loads(json.dumps(report)) == report
    assert report["harm"] == measure_harm(source, tmp_path / "q")
    assert 0 < report["harm"]["kl"]
    assert report["harm"]["tokens"] == 160
    assert any("KL" in line and "perplexity" in line for line in report_lines(report))


def test_equal_weights_do_no_harm(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", num_hidden_layers=2)
    found = quantize_directory(source, tmp_path / "q", "bf16")["harm"]
    assert (found["kl"], found["top1"]) == (0.0, 1.0)
    assert found["perplexity"] == found["source_perplexity"]


def logits(path: Path, ids: Tensor) -> Tensor:
    """[n,L] -> [n,L,V], window by window."""
    model = load(path).model
    with torch.no_grad():
        return torch.cat([model(input_ids=one[None]).logits for one in ids])


def test_numbers_are_those_of_their_definitions(tmp_path: Path) -> None:
    quantize_directory(embedded.path(), tmp_path / "q", "int4", measure=False)
    found = measure_harm(embedded.path(), tmp_path / "q", text=TEXT)
    loaded = load("embedded")
    ids = of_text(loaded, TEXT, 4, 40).ids
    p, q = (logits(path, ids).double().log_softmax(-1) for path in (embedded.path(), tmp_path / "q"))
    nexts = ids[:, 1:, None]
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02)
    assert found["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.02)
    for name, one in (("source_perplexity", p), ("perplexity", q)):
        nats = -float(one[:, :-1].gather(2, nexts).mean())
        assert found[name] == pytest.approx(math.exp(nats), rel=0.02)


def test_weights_that_compute_nan_are_refused(tmp_path: Path) -> None:
    """Their squares are infinite in float16, not the weights."""
    source = saved(tmp_path / "m", num_hidden_layers=2)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 2.0**15 / tensors["model.layers.0.mlp.up_proj.weight"].abs().max()
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 2.0**15
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match="with the new weights it computes NaN"):
        quantize_directory(source, tmp_path / "q", "f16")
    assert not (tmp_path / "q").exists()


def test_what_cannot_be_compared_is_refused_and_a_share_of_zero_is_not() -> None:
    ids, own = torch.tensor([0, 1]), torch.tensor([[0.0, -math.inf], [0.0, 1.0]])
    sums = _Differences()
    _compare(ids, own, own, sums)
    _compare(ids, own, torch.zeros(2, 2), sums)
    assert (sums.kl > 0, math.isfinite(sums.kl), sums.rows) == (True, True, 4)
    nan = torch.tensor([[0.0, math.nan], [0.0, 1.0]])
    for expected, found, why in (
        (own, nan, "with the new weights it computes NaN"),
        (nan, own, "the source computes NaN"),
        (torch.zeros(2, 2), own, "cannot predict tokens"),
    ):
        with pytest.raises(ModelRefused, match=why):
            _compare(ids, expected, found, sums)


def test_fewer_bits_do_more_harm(tmp_path: Path) -> None:
    kl: dict[str, float] = {}
    for kind in ("int8", "mixed", "int4"):
        quantize_directory(embedded.path(), tmp_path / kind, kind, measure=False)
        kl[kind] = measure_harm(embedded.path(), tmp_path / kind, text=TEXT)["kl"]
    assert kl["int8"] < kl["mixed"] < kl["int4"] < 0.2
