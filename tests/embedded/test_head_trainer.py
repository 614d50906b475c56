"""The trainer of the MTP head: its layer is transformers', chains included; the model it is trained for stays as it is;
its acceptance is that of drafting and verifying."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kvcellar.engine.models import embedded
from scripts.embedded_trainer.card import render
from scripts.embedded_trainer.command import main, options
from scripts.embedded_trainer.export import write_json, write_model
from scripts.embedded_trainer.head import MtpHead, SoftSurprise, head_config, head_shapes, initial_head
from scripts.embedded_trainer.head_evaluation import accepted, agreement, first_accepted
from scripts.embedded_trainer.head_release import compare_head, exported_head, release_head
from scripts.embedded_trainer.head_training import Exported, HeadRecipe, HeadTask, NoModel, exported
from scripts.embedded_trainer.network import Network, Shape, Weights, hf_config, initial_weights
from scripts.embedded_trainer.prepare import Prepared, prepare
from scripts.embedded_trainer.training import OtherRun, Run, read_checkpoint

RECIPE = HeadRecipe(steps=3, step_tokens=128, window=32, long_window=64, warm_up=2)
TEXT = "def name_{i}(path, value):\n    if value is None:\n        return path\n    return [value] * {i}\n\n\n"
SHAPES = {
    "lfm3": Shape(arch="lfm3", layers="CSF", vocabulary=300, width=16, head_size=8, inner=24, window=8),
    "llama": Shape(arch="llama", layers="FF", vocabulary=300, width=16, head_size=8, inner=24),
    "gemma3": Shape(arch="gemma3", layers="SF", vocabulary=300, width=16, head_size=8, inner=24, window=8),
}


def shaken(weights: Weights, seed: int) -> Weights:
    """Weights whose norms are not the identity, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 0.3 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root = tmp_path_factory.mktemp("library")
    (root / "test").mkdir()
    for i in range(60):
        for path in (root / f"module{i}.py", root / "test" / f"test_module{i}.py"):
            path.write_text(f"# {path.stem}: a module\n\n\n" + "".join(TEXT.format(i=j) for j in range(4)))
    return prepare(root, tmp_path_factory.mktemp("work"), 300)


def model_in(folder: Path, prepared: Prepared, arch: str = "lfm3") -> Exported:
    """An exported model that was not trained, with the record of the shipped one."""
    shape = SHAPES[arch]
    record = json.loads((embedded.path() / "manifest.json").read_text())["run"] | {"shape": asdict(shape)}
    write_model(folder, shape, shaken(initial_weights(shape, 1), 2), prepared)
    write_json(folder / "manifest.json", prepared.manifest | {"run": record})
    return exported(folder)


@pytest.fixture(scope="module")
def model(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return model_in(tmp_path_factory.mktemp("model"), prepared)


def run_in(work: Path, model: Exported, prepared: Prepared, recipe: HeadRecipe = RECIPE) -> Run:
    return Run(HeadTask(model, recipe, prepared), work)


@pytest.mark.parametrize("arch", SHAPES)
@pytest.mark.parametrize("chain", [1, 3])
def test_a_chain_is_that_of_transformers(arch: str, chain: int, prepared: Prepared, tmp_path: Path) -> None:
    model = model_in(tmp_path, prepared, arch)
    weights = shaken(initial_head(model.shape, model.weights, 0), 3)
    assert {name: tuple(w.shape) for name, w in weights.items()} == head_shapes(model.shape)
    ids = prepared.streams["held_library"][:30].long()[None]
    assert compare_head(model, weights, ids, chain) <= 1e-4


def test_a_head_that_transformers_computes_otherwise_is_not_exported(
    model: Exported, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(model.shape, eps=0.1)
    monkeypatch.setattr("scripts.embedded_trainer.head_release.hf_config", lambda shape: hf_config(other))
    run = run_in(tmp_path, model, prepared)
    with pytest.raises(ValueError, match="outputs differ"):
        release_head(run, HeadTask(model, RECIPE, prepared), prepared)
    assert not (model.folder / "mtp.safetensors").exists()


def test_every_entry_of_a_chain_equals_the_chain_of_the_text_up_to_it(model: Exported) -> None:
    """Later entries and tokens behind a chain have no influence on it."""
    weights = shaken(initial_head(model.shape, model.weights, 0), 3)
    theirs = {name: w.float() for name, w in model.weights.items()}
    ids = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    whole = MtpHead(model.shape, 24, 3, torch.float32)
    outputs = whole.chain(weights, theirs, ids, whole.network.hidden(theirs, ids))
    for length in (9, 16):
        part = MtpHead(model.shape, length, 3, torch.float32)
        cut = ids[:, :length]
        for ours, all_of_it in zip(
            part.chain(weights, theirs, cut, part.network.hidden(theirs, cut)), outputs, strict=True
        ):
            torch.testing.assert_close(ours, all_of_it[:, : length - 3], rtol=1e-4, atol=1e-4)


def test_a_step_s_loss_is_the_cross_entropy_to_the_model_s_distribution_of_its_token(model: Exported) -> None:
    weights = shaken(initial_head(model.shape, model.weights, 0), 3)
    theirs = {name: w.float() for name, w in model.weights.items()}
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    head, embedding = MtpHead(model.shape, 20, 2, torch.float32), theirs["model.embed_tokens.weight"]
    hidden = head.network.hidden(theirs, ids)
    target = Network(model.shape, 20, torch.float32).forward(theirs, ids).softmax(-1)
    for step, (loss, out) in enumerate(
        zip(head.losses(weights, theirs, ids), head.chain(weights, theirs, ids, hidden), strict=True)
    ):
        logs = (out @ embedding.T).log_softmax(-1)
        wanted = torch.stack([target[:, entry + 1 + step] for entry in range(head.entries)], 1)
        torch.testing.assert_close(loss, -(wanted * logs).sum(-1).mean())


def test_soft_surprise_is_cross_entropy_with_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, requires_grad=True)
    wanted = torch.randn(7, 11, generator=generator).softmax(-1)
    torch.nn.functional.cross_entropy(logits, wanted).backward()
    expected, logits.grad = logits.grad, None
    loss = SoftSurprise.apply(logits, wanted)
    loss.backward()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, wanted))
    torch.testing.assert_close(logits.grad, expected)


def test_a_run_that_was_stopped_and_went_on_equals_one_that_was_not(
    model: Exported, prepared: Prepared, tmp_path: Path
) -> None:
    run_in(tmp_path / "whole", model, prepared).train()
    run_in(tmp_path / "parts", model, prepared).train(until=2)
    run_in(tmp_path / "parts", model, prepared).train()
    whole, parts = (read_checkpoint(tmp_path / name)[1] for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_for_another_model_is_refused(model: Exported, prepared: Prepared, tmp_path: Path) -> None:
    run_in(tmp_path, model, prepared).train(until=1)
    with pytest.raises(OtherRun, match="another model"):
        run_in(tmp_path, replace(model, digest="other"), prepared)


def test_training_brings_the_head_s_distribution_near_the_model_s(
    model: Exported, prepared: Prepared, tmp_path: Path
) -> None:
    task = HeadTask(model, replace(RECIPE, steps=25, step_tokens=256), prepared)
    run = Run(task, tmp_path)
    with torch.no_grad():
        before = task.held_out(run.working)
    run.train()
    assert run.progress.looks[-1].held_out_nats < before - 0.3


def test_what_is_exported_is_the_trained_head_beside_the_same_model(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fewer in {"CONTINUED_TOKENS": 12, "PROMPTS": 4, "CONTEXT_TOKENS": 16}.items():
        monkeypatch.setattr(f"scripts.embedded_trainer.head_evaluation.{name}", fewer)
    model = model_in(tmp_path / "model", prepared)
    before = {path.name: path.read_bytes() for path in model.folder.iterdir()}
    with pytest.raises(NoModel, match="has no mtp"):
        exported_head(model)
    run = run_in(tmp_path / "work", model, prepared)
    run.train()
    release_head(run, HeadTask(model, RECIPE, prepared), prepared)
    after = {path.name: path.read_bytes() for path in model.folder.iterdir()}
    assert after.keys() - before.keys() == {"CARD.md", "mtp.safetensors"}
    assert {name for name, content in before.items() if after[name] != content} == {"config.json", "manifest.json"}
    again = exported(model.folder)
    assert json.loads(after["config.json"]) == hf_config(model.shape) | head_config()
    assert again.manifest["mtp"]["sha256"] == hashlib.sha256(after["mtp.safetensors"]).hexdigest()
    assert again.manifest["mtp"]["model_sha256"] == model.digest == again.digest
    weights = exported_head(again)
    assert all(torch.equal(weights[name], w.bfloat16()) for name, w in run.optimiser.masters.items())
    with pytest.raises(NoModel, match="another model"):
        exported_head(replace(again, digest="other"))


def greedy(model: Exported, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """ids [B,T] -> [B,T+tokens]"""
    weights = {name: w.float() for name, w in model.weights.items()}
    for _ in range(tokens):
        logits = Network(model.shape, ids.shape[1], torch.float32).forward(weights, ids)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


def drafted(model: Exported, weights: Weights, ids: torch.Tensor, depth: int) -> torch.Tensor:
    """The obvious way: ids [B,T] -> [B,depth], each draft an input of the next."""
    theirs = {name: w.float() for name, w in model.weights.items()}
    for step in range(depth):
        padded = torch.nn.functional.pad(ids, (0, depth - 1 - step))
        head = MtpHead(model.shape, padded.shape[1], depth, torch.float32)
        outputs = head.chain(weights, theirs, padded, head.network.hidden(theirs, padded))
        ids = torch.cat([ids, (outputs[step][:, -1:] @ theirs["model.embed_tokens.weight"].T).argmax(-1)], 1)
    return ids[:, -depth:]


def test_acceptance_at_temperature_0_is_that_of_drafting_and_verifying(model: Exported) -> None:
    weights = shaken(initial_head(model.shape, model.weights, 0), 3)
    start, tokens, depth = 8, 12, 3
    prompts = torch.randint(3, 300, (6, start), generator=torch.Generator().manual_seed(0))
    text = greedy(model, prompts, tokens)
    lengths = [0] * (depth + 1)  # how many rounds accepted at least so many drafts
    for end in range(start, start + tokens - depth + 1):
        right = drafted(model, weights, text[:, :end], depth) == text[:, end : end + depth]
        for row in right.tolist():
            for count in range(next((i for i, same in enumerate([*row, False]) if not same)) + 1):
                lengths[count] += 1
    rates = accepted(model, weights, text, start, 0.0, depth)
    wanted = [lengths[i + 1] / max(lengths[i], 1e-9) for i in range(depth)]
    assert rates == pytest.approx(wanted)
    assert lengths[0] > 40


def test_acceptance_on_any_text_is_that_of_a_draft_behind_each_token(model: Exported) -> None:
    weights = shaken(initial_head(model.shape, model.weights, 0), 3)
    text = torch.randint(3, 300, (4, 14), generator=torch.Generator().manual_seed(0))
    same = [
        drafted(model, weights, text[:, :end], 1) == greedy(model, text[:, :end], 1)[:, -1:] for end in range(2, 15)
    ]
    assert first_accepted(model, weights, text, 0.0) == pytest.approx(float(torch.cat(same).float().mean()))


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_the_expected_acceptance_of_sampled_tokens_is_the_overlap_of_the_distributions(temperature: float) -> None:
    q, p = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(11)[:, None].expand(11, 5)
    chances = agreement(q.expand(11, 5, 11), p.expand(11, 5, 11), tokens, temperature)  # of each token
    drawn = (p / temperature).softmax(-1)
    overlap = torch.minimum(drawn, (q / temperature).softmax(-1)).sum(-1)
    torch.testing.assert_close((chances.T * drawn).sum(-1), overlap)


def test_a_card_names_the_head_where_there_is_one(model: Exported) -> None:
    embedded_manifest = json.loads((embedded.path() / "manifest.json").read_text())
    without = {name: part for name, part in embedded_manifest.items() if name != "mtp"}
    assert "MTP head" not in render(without)


def test_the_command_line_has_its_stages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = options("").parse_args(["--stage", "head", "--head-steps", "7"])
    assert (parsed.stage, parsed.head_steps) == ("head", 7)
    for given, why in (
        (["--no-export"], "name one --stage"),
        (["--measure"], "goes with --stage head"),
        (["--stage", "head", "--out", "/nowhere"], "no model to train a head for"),
    ):
        monkeypatch.setattr("sys.argv", ["train_embedded.py", *given])
        with pytest.raises(SystemExit):
            main("")
        assert why in capsys.readouterr().err
