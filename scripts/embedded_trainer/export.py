"""Exports a checkpoint to a folder that transformers and kvcellar load, after comparing both networks.

Always true:
  * nothing is written into the target before the exported weights have been compared with the trainer's.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from .network import Network, Shape, Weights, hf_config
from .prepare import Prepared
from .tokens import BOS, EOS, PAD, SPECIALS

FLOAT32_TOLERANCE = 1e-4  # of the largest logit
BFLOAT16_TOLERANCE = 2e-3  # nats per token, over a few hundred

# Append-only: a message adds lines and never changes what stands before it. Newlines are tokens of their own, so the
# tokens of a conversation are also the first tokens of its continuation, as long as the answer's are those of its text.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set text = message.content -%}
{%- else -%}
{%- set text = (message.content or []) | map(attribute='text') | join('') -%}
{%- endif -%}
{%- if message.role == 'system' -%}
{%- set text = '# ' + text.replace('\\n', '\\n# ') -%}
{%- endif -%}
{{- text if text.endswith('\\n') else text + '\\n' -}}
{%- endfor -%}
"""


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    pad, bos, eos = (SPECIALS[i] for i in (PAD, BOS, EOS))
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, Any]:
    """Without a repetition penalty: it counts the prompt too, and code needs its brackets and newlines again."""
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_model(folder: Path, shape: Shape, masters: Weights, prepared: Prepared) -> None:
    """The files that a loader reads."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.bfloat16().contiguous() for name, weight in masters.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", hf_config(shape))
    write_json(folder / "generation_config.json", generation_config())
    write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    prepared.tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def compare(folder: Path, shape: Shape, masters: Weights, ids: Tensor, tolerance: float) -> dict[str, float]:
    """The exported folder in transformers against the trainer's network, on ids [1,T+1]; raises where they part."""
    rounded = {name: weight.bfloat16() for name, weight in masters.items()}
    length = ids.shape[1] - 1
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    wanted = Network(shape, length, torch.float32).forward({n: w.float() for n, w in rounded.items()}, ids[:, :-1])
    got = theirs(ids[:, :-1], use_cache=False).logits
    apart = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))
    if apart > FLOAT32_TOLERANCE:
        raise ValueError(f"float32 logits differ by {apart:.2e} of the largest; allowed are {FLOAT32_TOLERANCE:.0e}")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
    nats = float(Network(shape, length, torch.bfloat16).loss(rounded, ids))
    logits = theirs(ids[:, :-1], use_cache=False).logits.float()
    their_nats = float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))
    if abs(nats - their_nats) > tolerance:
        raise ValueError(
            f"bfloat16 loss is {nats:.4f} here and {their_nats:.4f} in transformers; allowed are {tolerance}"
        )
    return {"float32_logits": apart, "bfloat16_nats": abs(nats - their_nats)}


def export(
    out: Path, shape: Shape, masters: Weights, prepared: Prepared, ids: Tensor, *, tolerance: float = BFLOAT16_TOLERANCE
) -> dict[str, float]:
    """Writes the model's files into `out`, once they have been compared with the trainer on ids [1,T+1].

    `tolerance` is of the loss in bfloat16, in nats per token; raises where the two networks part.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder, shape, masters, prepared)
        differences = compare(folder, shape, masters, ids, tolerance)
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir()):
            shutil.copyfile(file, out / file.name)
    return differences
