"""network: Llama networks with random weights, and a tokenizer of made-up words, as model directories."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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


SMALL = Size(896, 12, 14, 2, 64, 2304, 128_256, 8192)  # 211 million parameters
TINY = Size(64, 2, 4, 2, 16, 128, 512, 4096)  # to test the bench

BRANCH = 0.002  # of the usual size: what a layer adds to the residual stream of a network that repeats its last token
SHARP = 5.6  # standard deviation of logits: a hundred tokens of 128 thousand have 0.95 of the probability
SPACE = "Ġ"  # as byte-level tokenizers write it


def write(size: Size, directory: Path, *, repeats: bool = False, sharp: float = SHARP) -> int:
    """Write a model directory in bfloat16, the same for each call. Returns the number of parameters.

    Logits have the standard deviation `sharp`: those of random weights, 1, are nearly all near ties. With `repeats`,
    layers add so little that the most probable next token is the last one, by a wide margin.
    """
    weights = dict(_weights(size, branch=BRANCH if repeats else 1.0))
    weights["model.norm.weight"] *= sharp
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


def write_tokenizer(vocabulary: int, directory: Path) -> None:
    """Write a byte-level tokenizer; a chat is the texts of its messages."""
    tokens, merges = words(vocabulary)
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def words(vocabulary: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens of a vocabulary, and its merges in order: bytes; words of up to three letters behind a space, and some
    of four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    one, two, three, four = (
        [SPACE + "".join(word) for word in product(ascii_lowercase, repeat=n)] for n in range(1, 5)
    )
    grown = [*one, *two, *three, *four[::3]][: vocabulary - len(alphabet)]  # four[::3]: words begin with any letter
    return [*alphabet, *grown], [(word[:-1], word[-1]) for word in grown]
