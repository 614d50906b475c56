"""The trainer: its network is transformers', a resumed run is an uninterrupted one, its corpus keeps to its rules."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.embedded_trainer.command import options
from scripts.embedded_trainer.corpus import carries_own_notice, gather, own_notice
from scripts.embedded_trainer.evaluation import loops, parses
from scripts.embedded_trainer.export import export
from scripts.embedded_trainer.network import MeanSurprise, Shape, Weights, initial_weights
from scripts.embedded_trainer.optimiser import Optimiser, Recipe, orthogonal
from scripts.embedded_trainer.prepare import Prepared, prepare
from scripts.embedded_trainer.tokens import BOS, EOS, column_zero
from scripts.embedded_trainer.training import ModelTask, OtherRun, Run, read_checkpoint

HEAD = "# {name}: a module of a small library\n\n\n"
BODY = "def {name}_{i}(path, value):\n    if value is None:\n        return path\n    return [value] * {i}\n\n\n"


def tiny(arch: str = "gemma3", layers: str = "SF") -> Shape:
    return Shape(
        arch=arch, layers=layers, vocabulary=300, width=16, heads=4, key_heads=2, head_size=8, inner=24, window=8
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of sixty modules and their tests; some are held out by the hash of their path."""
    root = tmp_path_factory.mktemp("library")
    (root / "test").mkdir()
    for i in range(60):
        for path in (root / f"module{i}.py", root / "test" / f"test_module{i}.py"):
            name = path.stem
            path.write_text(HEAD.format(name=name) + "".join(BODY.format(name=name, i=j) for j in range(4)))
    return root


@pytest.fixture(scope="module")
def prepared(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(library, tmp_path_factory.mktemp("work"), 300)


RECIPE = Recipe(steps=3, step_tokens=128, window=32, long_window=64, warm_up=2)


def run_in(work: Path, prepared: Prepared, recipe: Recipe = RECIPE) -> Run:
    return Run(ModelTask(tiny(), recipe, prepared), work)


def shaken(shape: Shape) -> Weights:
    """Weights whose norms are not the identity, so that leaving one out shows."""
    weights, generator = initial_weights(shape, 1), torch.Generator().manual_seed(2)
    return {name: w + 0.3 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


@pytest.mark.parametrize(("arch", "layers"), [("gemma3", "SFS"), ("lfm3", "CSCF"), ("llama", "FF")])
@pytest.mark.parametrize("length", [5, 8, 21, 32])
def test_what_is_exported_is_the_network_that_was_trained(
    arch: str, layers: str, length: int, prepared: Prepared, tmp_path: Path
) -> None:
    shape = tiny(arch, layers)
    ids = prepared.streams["held_library"][: length + 1].long()[None]
    # so few tokens do not average the rounding out
    differences = export(tmp_path, shape, shaken(shape), prepared, ids, tolerance=0.05)
    assert differences["float32_logits"] <= 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_nothing_is_exported_when_transformers_means_another_network(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.embedded_trainer.export.hf_config", lambda shape: _with_other_window(shape))
    shape = tiny()
    ids = prepared.streams["held_library"][:33].long()[None]
    with pytest.raises(ValueError, match="float32 logits differ"):
        export(tmp_path / "out", shape, shaken(shape), prepared, ids)
    assert not (tmp_path / "out").exists()


def _with_other_window(shape: Shape) -> dict[str, object]:
    from scripts.embedded_trainer.network import hf_config

    return hf_config(replace(shape, window=shape.window // 2))


def test_a_run_that_was_stopped_and_went_on_equals_one_that_was_not(prepared: Prepared, tmp_path: Path) -> None:
    run_in(tmp_path / "whole", prepared).train()
    run_in(tmp_path / "parts", prepared).train(until=2)
    resumed = run_in(tmp_path / "parts", prepared)
    assert resumed.progress.step == 2
    resumed.train()
    (one, whole), (two, parts) = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert one["progress"]["running"] == two["progress"]["running"]
    assert one["progress"]["looks"][-1]["held_out_nats"] == two["progress"]["looks"][-1]["held_out_nats"]


def test_a_finished_run_trains_no_further(prepared: Prepared, tmp_path: Path) -> None:
    run_in(tmp_path, prepared).train()
    before = read_checkpoint(tmp_path)[1]
    again = run_in(tmp_path, prepared)
    again.train()
    assert again.progress.step == RECIPE.steps
    assert all(torch.equal(before[name], tensor) for name, tensor in read_checkpoint(tmp_path)[1].items())


def test_a_checkpoint_of_another_recipe_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    run_in(tmp_path, prepared).train(until=1)
    with pytest.raises(OtherRun, match=r"'rate': \(0.018, 0.5\)"):
        run_in(tmp_path, prepared, replace(RECIPE, rate=0.5))


def test_a_checkpoint_of_another_corpus_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    run_in(tmp_path, prepared).train(until=1)
    with pytest.raises(OtherRun, match="another corpus"):
        run_in(tmp_path, replace(prepared, stamp="other"))


def test_training_lowers_the_loss_on_text_held_out(prepared: Prepared, tmp_path: Path) -> None:
    run = run_in(tmp_path, prepared, replace(RECIPE, steps=25, step_tokens=512))
    run.train()
    assert run.progress.looks[-1].held_out_nats < 0.8 * math.log(300)


def test_the_rate_rises_then_falls_to_its_last_share() -> None:
    recipe = Recipe(steps=100, rate=1.0, warm_up=10, last_rate=0.02)
    rates = [recipe.rate_at(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_an_optimiser_step_clears_the_gradients_and_rounds_the_masters() -> None:
    optimiser = Optimiser(initial_weights(tiny(), 0), RECIPE)
    working = optimiser.working()
    before = {name: weight.detach().clone() for name, weight in working.items()}
    for weight in working.values():
        weight.grad = torch.ones_like(weight)
    norm = optimiser.step(working)
    assert norm == pytest.approx(sum(w.numel() for w in working.values()) ** 0.5, rel=1e-3)
    assert all(weight.grad is None for weight in working.values())
    assert all(torch.equal(working[name], optimiser.masters[name].bfloat16()) for name in working)
    assert all(not torch.equal(working[name], before[name]) for name in working)


@pytest.mark.parametrize("size", [(3, 16, 40), (2, 40, 16), (1, 12, 12)])
def test_orthogonal_brings_singular_values_near_one(size: tuple[int, int, int]) -> None:
    made = orthogonal(torch.randn(size, generator=torch.Generator().manual_seed(0))).float()
    values = torch.linalg.svdvals(made)
    assert made.shape == size
    assert 0.3 < float(values.min())
    assert float(values.max()) < 1.5


def test_mean_surprise_is_cross_entropy_with_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, requires_grad=True)
    targets = torch.randint(11, (7,), generator=generator)
    torch.nn.functional.cross_entropy(logits, targets).backward()
    wanted, logits.grad = logits.grad, None
    loss = MeanSurprise.apply(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets))
    torch.testing.assert_close(logits.grad, wanted)


def test_windows_begin_at_a_line_or_anywhere_and_follow_from_the_seed(prepared: Prepared) -> None:
    mixture = prepared.mixture(0.5)
    batch = mixture.batch(64, 24, seed=3)
    assert torch.equal(batch, mixture.batch(64, 24, seed=3))
    assert not torch.equal(batch, mixture.batch(64, 24, seed=4))
    behind_bos = batch[batch[:, 0] == BOS]
    assert 16 < len(behind_bos) < 52
    firsts = [prepared.tokenizer.decode([int(row[1])]) for row in behind_bos]
    assert not any(text.startswith((" ", "\n")) for text in firsts)


def test_without_the_library_s_tests_all_windows_come_from_the_library(library: Path, tmp_path: Path) -> None:
    prepared = prepare(library, tmp_path, 300, with_tests=False)
    assert not len(prepared.streams["tests"])
    assert prepared.mixture(0.0).batch(4, 24, seed=1).shape == (4, 24)


def test_column_zero_is_where_lines_without_indent_begin(prepared: Prepared) -> None:
    stream = torch.tensor([BOS, *prepared.tokenizer.encode("a\n b\n\nc\n", add_special_tokens=False).ids, EOS])
    texts = [prepared.tokenizer.decode([int(stream[at])]) for at in column_zero(prepared.tokenizer, stream)]
    assert texts == ["a", "c"]


@pytest.mark.parametrize(
    ("head", "own"),
    [
        ("# Copyright (c) 2001 by Somebody Else.", True),
        ("# Copyright 1999, Bioreason, Inc.", True),
        ("# Copyright (c) 2001-2006 Python Software Foundation", False),
        ("# Copyright (c) 1999 Somebody.\n# Licensed to PSF under a Contributor Agreement.", False),
        ("# Permission to use, copy, modify is granted", True),
        ("# All rights reserved.", True),
        ("\n" * 100 + "# Copyright (c) 2001 by Somebody Else.", False),
        ('"""The copyright of a file."""', False),
    ],
)
def test_files_with_a_foreign_notice_are_found(head: str, own: bool) -> None:
    assert carries_own_notice(head + "\n\nimport os\n") == own


def test_notices_are_quoted_as_far_as_they_speak_of_rights() -> None:
    line = "# Copyright (c) 2003 by Somebody <mail>\n"
    grant = "#\n# Permission to use this is granted\n# to all who quote it.\n"
    assert own_notice("import os\n" + line + "# a remark\n") == "Copyright (c) 2003 by Somebody <mail>"
    quoted = own_notice(line + grant + "\nimport os  # not a notice\n")
    assert quoted == "Copyright (c) 2003 by Somebody <mail>\n\nPermission to use this is granted\nto all who quote it."
    assert own_notice("# Copyright (C) 2001 Python Software Foundation\n" + grant) == ""


def test_the_corpus_leaves_out_tables_packages_and_build_paths(tmp_path: Path) -> None:
    text = "# a plain module, long enough to be read\n" + "value = [name for name in names if name]\n" * 8
    kept = ["plain.py", "test/test_plain.py", "json/tool.py"]
    left = [
        "site-packages/x.py", "encodings/cp1.py", "pydoc_data/topics.py", "html/entities.py", "ensurepip/_bundled/x.py",
        "_sysconfigdata_x.py", "config-3.11-x/python-config.py", "notes.txt",
    ]  # fmt: skip
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "short.py").write_text("pass\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" + text.encode())
    (tmp_path / "table.py").write_text("table = [\n" + "0x1234, 0x5678,\n" * 40 + "]\n")
    (tmp_path / "foreign.py").write_text("# Copyright (c) 2001 by Somebody Else.\n" + text)
    corpus = gather(tmp_path)
    pools = (corpus.library, corpus.tests, corpus.held_library, corpus.held_tests)
    assert sorted(source.path for pool in pools for source in pool) == sorted(kept)
    assert corpus.dropped == ("foreign.py",)
    without = gather(tmp_path, with_tests=False)
    assert not without.tests
    assert not without.held_tests


def test_prepared_tokens_are_read_back_for_the_same_files(library: Path, tmp_path: Path) -> None:
    first = prepare(library, tmp_path, 300)
    stamp = (tmp_path / "tokens.safetensors").stat().st_mtime_ns
    again = prepare(library, tmp_path, 300)
    assert (tmp_path / "tokens.safetensors").stat().st_mtime_ns == stamp
    assert first.manifest == again.manifest
    assert all(torch.equal(first.streams[name], again.streams[name]) for name in first.streams)


def test_a_shape_that_no_architecture_has_is_refused() -> None:
    with pytest.raises(ValueError, match="llama takes one or more of 'F'"):
        tiny("llama", "SF")
    with pytest.raises(ValueError, match="unknown architecture"):
        tiny("mamba", "F")
    with pytest.raises(ValueError, match="cannot share"):
        replace(tiny(), key_heads=3)


def test_loops_and_bodies_are_recognised() -> None:
    assert loops([5, 1, 2, 3] + [7, 8, 9] * 16)
    assert not loops(list(range(60)))
    assert not loops([1] * 20)
    assert parses("class A:\n    def f(self):\n", "        return 1\n\n    def g(self):\n")
    assert not parses("def f():\n", "    return (\n\nx = 1\n")
    assert not parses("def f():\n", "    return 1\n")


def test_the_command_line_has_its_options() -> None:
    parsed = options("").parse_args(["--arch", "lfm3", "--steps", "7", "--minutes", "1.5"])
    assert (parsed.arch, parsed.steps, parsed.minutes) == ("lfm3", 7, 1.5)
    with pytest.raises(SystemExit):
        options("").parse_args(["--steps", "0"])
