"""Writes an MTP head into the folder of its model: weights, config, manifest and card.

Always true:
  * nothing is written into the folder before the head has been compared with transformers' `MtpModel`;
  * model.safetensors is only read.
"""

import hashlib
import logging
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from .card import render
from .export import FLOAT32_TOLERANCE, write_json
from .head import MtpHead, head_config
from .head_evaluation import measure_head
from .head_training import Exported, HeadTask, NoModel, count_head_parameters
from .network import Weights, hf_config
from .prepare import Prepared
from .release import COMPARED_TOKENS, HEAD_FILE, machine
from .training import Run

log = logging.getLogger(__name__)


@torch.no_grad()
def compare_head(model: Exported, weights: Weights, ids: Tensor, chain: int) -> float:
    """The head in transformers against the trainer's, on ids [1,T], chained from the last entry, in float32. Returns
    the largest difference as a share of the largest output; raises if they differ."""
    head = MtpHead(model.shape, ids.shape[1], chain, torch.float32)
    ours, theirs = ({name: w.float() for name, w in group.items()} for group in (weights, model.weights))
    hidden = head.network.hidden(theirs, ids)
    wanted = head.chain(ours, theirs, ids, hidden)
    config = AutoConfig.for_model(**hf_config(model.shape), **head_config())
    target = AutoModelForCausalLM.from_pretrained(
        model.folder, config=config, dtype=torch.float32, local_files_only=True
    ).eval()
    network = MtpModel(target, 1).eval()
    network.load_state_dict({name.removeprefix("mtp."): w for name, w in ours.items()}, strict=False)
    cache, n = MtpCache(config=network.config), head.entries
    got = network.forward_layer(0, hidden[:, :n], torch.arange(1, n + 1)[None], cache, input_ids=ids[:, 1 : n + 1])
    apart = float((got - wanted[0]).abs().max())
    for step in range(1, chain):
        token, position = ids[:, n + step : n + step + 1], torch.tensor([[n + step]])
        got = network.forward_layer(0, got[:, -1:], position, cache, input_ids=token)
        apart = max(apart, float((got - wanted[step][:, -1:]).abs().max()))
    apart /= max(1.0, float(wanted[0].abs().max()))
    if apart > FLOAT32_TOLERANCE:
        raise ValueError(
            f"the head's outputs differ by {apart:.2e} of the largest; allowed are {FLOAT32_TOLERANCE:.0e}"
        )
    return apart


def described_head(run: Run, task: HeadTask) -> dict[str, Any]:
    """What was trained, and how."""
    progress = run.progress
    return {
        "model_sha256": task.model.digest,
        "parameters": count_head_parameters(task.shape),
        "recipe": asdict(task.recipe),
        "steps_done": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "machine": machine(),
        "torch": torch.__version__,
        "looks": [asdict(look) for look in progress.looks],
    }


def release_head(run: Run, task: HeadTask, prepared: Prepared) -> None:
    """Exports the head as it stands, and measures it."""
    model, stream = task.model, prepared.streams["held_library"]
    weights = {name: weight.bfloat16().contiguous() for name, weight in run.optimiser.masters.items()}
    apart = compare_head(model, weights, stream[:COMPARED_TOKENS].long()[None], task.recipe.chain)
    log.info("difference from transformers: %.1e", apart)
    record = described_head(run, task) | {"acceptance": measure_head(model, weights, stream)}
    content = save(weights, metadata={"format": "pt"})
    record |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (model.folder / HEAD_FILE).write_bytes(content)
    manifest = {**model.manifest, "mtp": record}
    write_json(model.folder / "config.json", hf_config(model.shape) | head_config())
    write_json(model.folder / "manifest.json", manifest)
    (model.folder / "CARD.md").write_text(render(manifest))
    log.info("exported to %s: %s", model.folder / HEAD_FILE, record["acceptance"])


def exported_head(model: Exported) -> Weights:
    """The weights of the head in the model's folder; raises `NoModel` if there is none for this model."""
    if not (model.folder / HEAD_FILE).is_file():
        raise NoModel(f"{model.folder} has no {HEAD_FILE}; train it with --stage head")
    if model.manifest.get("mtp", {}).get("model_sha256") != model.digest:
        raise NoModel(
            f"{HEAD_FILE} in {model.folder} was trained for another model.safetensors; train it with --stage head"
        )
    return load_file(model.folder / HEAD_FILE)
