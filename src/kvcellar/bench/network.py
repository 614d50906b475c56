"""network: Llama networks with random weights, as model directories."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a Llama network. Output weights are tied to the embedding, as in most small models."""

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    context: int

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
        }


SMALL = Size(896, 12, 14, 2, 64, 2304, 32_000, 8192)  # 125 million parameters
LARGER = Size(896, 24, 14, 2, 64, 4864, 151_936, 8192)  # 494 million parameters
TINY = Size(64, 2, 4, 2, 16, 128, 512, 1024)  # to test the bench

BRANCH = 0.002  # of the usual size: what a layer adds to the residual stream of a network that repeats its last token


def write(size: Size, directory: Path, *, repeats: bool = False) -> int:
    """Write a model directory in bfloat16, the same for each call. Returns the number of parameters.

    With `repeats`, layers add so little that the most probable next token is the last one, by a wide margin.
    """
    weights = dict(_weights(size, branch=BRANCH if repeats else 1.0))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(size.config()))
    return sum(weight.numel() for weight in weights.values())


def _weights(size: Size, branch: float) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = size.query_heads * size.head_size, size.kv_heads * size.head_size

    def drawn(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)).to(torch.bfloat16)

    yield "model.embed_tokens.weight", drawn(size.vocabulary, size.hidden)
    yield "model.norm.weight", torch.ones(size.hidden, dtype=torch.bfloat16)
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        yield at + "self_attn.q_proj.weight", drawn(queries, size.hidden)
        yield at + "self_attn.k_proj.weight", drawn(keys, size.hidden)
        yield at + "self_attn.v_proj.weight", drawn(keys, size.hidden)
        yield at + "self_attn.o_proj.weight", drawn(size.hidden, queries, branch)
        yield at + "mlp.gate_proj.weight", drawn(size.intermediate, size.hidden)
        yield at + "mlp.up_proj.weight", drawn(size.intermediate, size.hidden)
        yield at + "mlp.down_proj.weight", drawn(size.hidden, size.intermediate, branch)
        yield at + "input_layernorm.weight", torch.ones(size.hidden, dtype=torch.bfloat16)
        yield at + "post_attention_layernorm.weight", torch.ones(size.hidden, dtype=torch.bfloat16)
