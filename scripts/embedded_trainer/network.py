"""A minimal forward pass of three architectures, with the weight names of transformers.

Always true:
  * `forward` computes what the transformers model of `hf_config` computes from the same weights; exporting checks it;
  * the weights are one flat dict, name -> tensor, in one dtype.

transformers' own modules run here too, but slower: this one joins projections that share their input, keeps attention
to plain matrix products with blocks of the window's size, and never makes a mask larger than a block.

Shapes: B windows, T tokens in each, E width, H query heads, G key heads, R = H / G, D head size, W window.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .tokens import BOS, EOS, PAD

Weights = dict[str, Tensor]

LAYER_KINDS = {"S": "sliding_attention", "F": "full_attention", "C": "conv"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What sets one architecture apart from another, and what it calls its parts."""

    before_mixer: str
    after_mixer: str | None
    before_mlp: str
    after_mlp: str | None
    last_norm: str
    gate: str
    up: str
    down: str
    activation: str  # of the MLP: "gelu" is the tanh form
    norm_adds_one: bool
    scales_embedding: bool
    head_norms: bool
    head_gates: bool
    sliding_theta: float
    full_theta: float
    full_rotates: float  # share of the head that full layers rotate


DIALECTS = {
    "gemma3": Dialect(
        before_mixer="input_layernorm",
        after_mixer="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        last_norm="model.norm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        activation="gelu",
        norm_adds_one=True,
        scales_embedding=True,
        head_norms=True,
        head_gates=False,
        sliding_theta=1e4,
        full_theta=1e5,
        full_rotates=1.0,
    ),
    "lfm3": Dialect(
        before_mixer="operator_norm",
        after_mixer="post_operator_norm",
        before_mlp="ffn_norm",
        after_mlp="post_ffn_norm",
        last_norm="model.embedding_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        activation="silu",
        norm_adds_one=False,
        scales_embedding=False,
        head_norms=True,
        head_gates=True,
        sliding_theta=1e4,
        full_theta=1e4,
        full_rotates=0.5,
    ),
    "llama": Dialect(
        before_mixer="input_layernorm",
        after_mixer=None,
        before_mlp="post_attention_layernorm",
        after_mlp=None,
        last_norm="model.norm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        activation="silu",
        norm_adds_one=False,
        scales_embedding=False,
        head_norms=False,
        head_gates=False,
        sliding_theta=1e4,
        full_theta=1e4,
        full_rotates=1.0,
    ),
}
DEFAULT_LAYERS = {"gemma3": "SSFSSF", "lfm3": "CSCF", "llama": "FFFF"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a network; `layers` has a letter per layer: S sliding, F full, C short convolution."""

    arch: str
    layers: str
    vocabulary: int = 2048
    width: int = 192
    heads: int = 4
    key_heads: int = 2
    head_size: int = 64
    inner: int = 512
    window: int = 128
    kernel: int = 7
    context: int = 4096
    eps: float = 1e-6

    def __post_init__(self) -> None:
        allowed = {"gemma3": "SF", "lfm3": "SFC", "llama": "F"}
        if self.arch not in allowed:
            raise ValueError(f"unknown architecture {self.arch!r}; choose one of {sorted(allowed)}")
        if not self.layers or set(self.layers) - set(allowed[self.arch]):
            raise ValueError(f"layers {self.layers!r}: {self.arch} takes one or more of {allowed[self.arch]!r}")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.key_heads} key heads evenly")

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.arch]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def hf_config(shape: Shape) -> dict[str, Any]:
    """The config.json under which transformers builds the same network."""
    dialect = shape.dialect
    common = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    }
    kinds = [LAYER_KINDS[letter] for letter in shape.layers]
    sliding = {"rope_type": "default", "rope_theta": dialect.sliding_theta}
    full = {"rope_type": "default", "rope_theta": dialect.full_theta}
    match shape.arch:
        case "gemma3":
            return common | {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "rms_norm_eps": shape.eps,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": shape.head_size,
                "sliding_window": shape.window,
                "layer_types": kinds,
                "rope_parameters": {"sliding_attention": sliding, "full_attention": full},
            }
        case "lfm3":
            partial = full | {"rope_type": "proportional", "partial_rotary_factor": dialect.full_rotates}
            return common | {
                "architectures": ["Lfm3ForCausalLM"],
                "model_type": "lfm3",
                "norm_eps": shape.eps,
                "conv_L_cache": shape.kernel,
                "conv_bias": False,
                "sliding_window": shape.window,
                "use_sandwich_norm": True,
                "use_attention_gate": True,
                "layer_types": kinds,
                "rope_parameters": {"sliding_attention": sliding, "full_attention": partial},
            }
        case _:
            return common | {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "rms_norm_eps": shape.eps,
                "hidden_act": "silu",
                "rope_parameters": full,
            }


def mixer_shapes(shape: Shape, letter: str) -> dict[str, tuple[int, ...]]:
    """Name below the layer -> size, of what mixes positions in a layer of this letter."""
    e, d = shape.width, shape.head_size
    if letter == "C":
        return {
            "conv.in_proj.weight": (3 * e, e),
            "conv.conv.weight": (e, 1, shape.kernel),
            "conv.out_proj.weight": (e, e),
        }
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (shape.heads * d, e),
        "self_attn.k_proj.weight": (shape.key_heads * d, e),
        "self_attn.v_proj.weight": (shape.key_heads * d, e),
        "self_attn.o_proj.weight": (e, shape.heads * d),
    }
    if shape.dialect.head_norms:
        sizes |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    if shape.dialect.head_gates:
        sizes["self_attn.g_proj.weight"] = (shape.heads, e)
    return sizes


def layer_shapes(shape: Shape, letter: str) -> dict[str, tuple[int, ...]]:
    """Name below the layer -> size, of a whole layer of this letter."""
    dialect, e = shape.dialect, shape.width
    norms = [dialect.before_mixer, dialect.after_mixer, dialect.before_mlp, dialect.after_mlp]
    sizes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (e,) for norm in norms if norm is not None}
    return (
        sizes
        | mixer_shapes(shape, letter)
        | {
            f"{dialect.gate}.weight": (shape.inner, e),
            f"{dialect.up}.weight": (shape.inner, e),
            f"{dialect.down}.weight": (e, shape.inner),
        }
    )


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> size of every weight, as transformers names it; the tied head has none of its own."""
    e = shape.width
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, e)}
    for i, letter in enumerate(shape.layers):
        sizes |= {f"model.layers.{i}.{name}": size for name, size in layer_shapes(shape, letter).items()}
    sizes[f"{shape.dialect.last_norm}.weight"] = (e,)
    return sizes


def count_parameters(shape: Shape) -> int:
    return sum(math.prod(size) for size in weight_shapes(shape).values())


def initial_weights(shape: Shape, seed: int) -> Weights:
    """Float32 weights to begin with: normal 0.02, the projections back into the residual stream thinner."""
    generator = torch.Generator().manual_seed(seed)
    dialect = shape.dialect
    weights = {}
    for name, size in weight_shapes(shape).items():
        if len(size) == 1:
            weights[name] = torch.zeros(size) if dialect.norm_adds_one else torch.ones(size)
            continue
        spread = 0.02
        if len(size) == 3:
            spread = shape.kernel**-0.5
        elif name.endswith((f"{dialect.down}.weight", "o_proj.weight", "out_proj.weight")):
            spread /= math.sqrt(2 * len(shape.layers))
        weights[name] = spread * torch.randn(size, generator=generator)
    return weights


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and signed sines of the positions of a window."""

    cos: Tensor  # [T,1,D]
    sin: Tensor  # [T,1,D], the first half negated: what multiplies the swapped halves

    @staticmethod
    def of(length: int, head_size: int, theta: float, share: float, dtype: torch.dtype) -> "Rotation":
        turning = int(share * head_size // 2)
        inverse = torch.zeros(head_size // 2)
        inverse[:turning] = 1.0 / theta ** (torch.arange(0, 2 * turning, 2).float() / head_size)
        angle = torch.arange(length).float()[:, None] * inverse  # [T,D/2]
        cos, sin = angle.cos(), angle.sin()
        return Rotation(torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """x [B,T,*,D], rotated by the position of each token."""
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


class MeanSurprise(torch.autograd.Function):
    """Mean of -log softmax at the targets: logits [N,V], targets [N] -> []. Its gradient has the logits' dtype.

    `F.cross_entropy` costs four times this on a CPU, a quarter of a whole step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        chances = logits.float().softmax(-1)
        ctx.save_for_backward(chances, targets)
        ctx.dtype = logits.dtype
        return -chances.gather(1, targets[:, None]).clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        chances, targets = ctx.saved_tensors
        excess = chances.scatter_add(1, targets[:, None], -torch.ones_like(targets, dtype=torch.float32)[:, None])
        return excess.mul_(grads[0] / len(targets)).to(ctx.dtype), None


class Network:
    """The forward pass over windows of one length, in one dtype."""

    def __init__(self, shape: Shape, length: int, dtype: torch.dtype) -> None:
        self.shape, self.length, self.dtype = shape, length, dtype
        d, dialect = shape.head_size, shape.dialect
        self.rotations = {
            "S": Rotation.of(length, d, dialect.sliding_theta, 1.0, dtype),
            "F": Rotation.of(length, d, dialect.full_theta, dialect.full_rotates, dtype),
        }
        barrier = torch.full((length, length), -torch.inf, dtype=dtype) if "F" in shape.layers else torch.empty(0, 0)
        self.barrier = barrier.triu(1)  # [T,T]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [...,E] scaled to unit mean square, then by the weight."""
        scale = weight + 1.0 if self.shape.dialect.norm_adds_one else weight
        return F.rms_norm(x, (x.shape[-1],), scale, self.shape.eps)

    def attend_full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B,G,R,T,D], k and v [B,G,T,D] -> [B,G,R,T,D]; a token sees all before it and itself."""
        b, g, r, t, d = q.shape
        scores = q.reshape(b, g, r * t, d) @ k.transpose(-1, -2)  # [B,G,R*T,T]
        weights = (scores.view(b, g, r, t, t) + self.barrier).softmax(-1)
        return (weights.view(b, g, r * t, t) @ v).view(b, g, r, t, d)

    def attend_sliding(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `attend_full`, but a token sees the last W only: blocks of W queries look at their own block and the one
        before, so the cost grows with T, not with its square."""
        b, g, r, t, d = q.shape
        w = self.shape.window
        blocks = -(-t // w)
        short = blocks * w - t
        q = F.pad(q, (0, 0, 0, short)).view(b, g, r, blocks, w, d).transpose(2, 3).reshape(b, g, blocks, r * w, d)
        k, v = (self.pairs_of_blocks(x, blocks, short) for x in (k, v))  # [B,G,blocks,2W,D]
        scores = (q @ k.transpose(-1, -2)).view(b, g, blocks, r, w, 2 * w)
        weights = (scores + self.window_barrier(blocks)).softmax(-1).view(b, g, blocks, r * w, 2 * w)
        out = (weights @ v).view(b, g, blocks, r, w, d).transpose(2, 3).reshape(b, g, r, blocks * w, d)
        return out[:, :, :, :t]

    def pairs_of_blocks(self, x: Tensor, blocks: int, short: int) -> Tensor:
        """x [B,G,T,D] -> [B,G,blocks,2W,D]: each block behind the one before it; before the first lies nothing."""
        b, g, _, d = x.shape
        w = self.shape.window
        x = F.pad(x, (0, 0, w, short)).view(b, g, blocks + 1, w, d)
        return torch.cat([x[:, :, :-1], x[:, :, 1:]], 3)

    def window_barrier(self, blocks: int) -> Tensor:
        """-> [blocks,1,W,2W]: -inf where a query of a block may not look."""
        w = self.shape.window
        query, key = torch.arange(w)[:, None] + w, torch.arange(2 * w)[None]
        seen = (key <= query) & (query - key < w)  # [W,2W]
        seen = seen.expand(blocks, 1, w, 2 * w).clone()
        seen[0, :, :, :w] = False
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill(~seen, -torch.inf)

    def attention(self, weights: Weights, at: str, x: Tensor, letter: str) -> Tensor:
        """x [B,T,E] -> [B,T,E]"""
        q, k, v = self.projected(weights, at, x, self.rotations[letter])
        attend = self.attend_sliding if letter == "S" else self.attend_full
        return self.merged(weights, at, x, attend(q, k, v))

    def projected(self, weights: Weights, at: str, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,E] -> queries [B,G,R,T,D], scaled, and keys and values [B,G,T,D]; queries and keys are rotated."""
        shape, dialect = self.shape, self.shape.dialect
        b, t, _ = x.shape
        h, g, d = shape.heads, shape.key_heads, shape.head_size
        joined = torch.cat([weights[f"{at}.{part}_proj.weight"] for part in "qkv"])
        q, k, v = F.linear(x, joined).view(b, t, h + 2 * g, d).split([h, g, g], 2)
        if dialect.head_norms:
            q, k = self.norm(q, weights[f"{at}.q_norm.weight"]), self.norm(k, weights[f"{at}.k_norm.weight"])
        q = (rotation.turn(q) * d**-0.5).transpose(1, 2).reshape(b, g, h // g, t, d)
        return q, rotation.turn(k).transpose(1, 2), v.transpose(1, 2)

    def merged(self, weights: Weights, at: str, x: Tensor, out: Tensor) -> Tensor:
        """What the heads of x [B,T,E] return, [B,G,R,T,D], gated and projected -> [B,T,E]"""
        b, t, _ = x.shape
        out = out.reshape(b, self.shape.heads, t, self.shape.head_size).transpose(1, 2)  # [B,T,H,D]
        if self.shape.dialect.head_gates:
            out = out * F.linear(x, weights[f"{at}.g_proj.weight"]).sigmoid()[..., None]
        return F.linear(out.flatten(2), weights[f"{at}.o_proj.weight"])

    def convolution(self, weights: Weights, at: str, x: Tensor) -> Tensor:
        """x [B,T,E] -> [B,T,E]: gated, causal, one short filter per channel, as shifted products."""
        gate_in, gate_out, x = F.linear(x, weights[f"{at}.in_proj.weight"]).chunk(3, -1)
        taps = weights[f"{at}.conv.weight"][:, 0]  # [E,K], the last tap is the token itself
        reach = taps.shape[-1] - 1
        padded = F.pad(gate_in * x, (0, 0, reach, 0))
        mixed = sum((padded[:, i : i + self.length] * taps[:, i] for i in range(reach + 1)), torch.zeros(()))
        return F.linear(gate_out * mixed.to(x.dtype), weights[f"{at}.out_proj.weight"])

    def mlp(self, weights: Weights, at: str, x: Tensor) -> Tensor:
        """x [B,T,E] -> [B,T,E]"""
        dialect = self.shape.dialect
        joined = torch.cat([weights[f"{at}.{dialect.gate}.weight"], weights[f"{at}.{dialect.up}.weight"]])
        gate, up = F.linear(x, joined).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if dialect.activation == "gelu" else F.silu(gate)
        return F.linear(gate * up, weights[f"{at}.{dialect.down}.weight"])

    def block(self, weights: Weights, at: str, x: Tensor, mix: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B,T,E] -> [B,T,E]: the layer named `at`, in which `mix` mixes positions."""
        dialect = self.shape.dialect
        y = mix(self.norm(x, weights[f"{at}.{dialect.before_mixer}.weight"]))
        if dialect.after_mixer is not None:
            y = self.norm(y, weights[f"{at}.{dialect.after_mixer}.weight"])
        x = x + y
        y = self.mlp(weights, at, self.norm(x, weights[f"{at}.{dialect.before_mlp}.weight"]))
        if dialect.after_mlp is not None:
            y = self.norm(y, weights[f"{at}.{dialect.after_mlp}.weight"])
        return x + y

    def layer(self, weights: Weights, index: int, x: Tensor) -> Tensor:
        """x [B,T,E] -> [B,T,E]"""
        letter, at = self.shape.layers[index], f"model.layers.{index}"
        if letter == "C":
            return self.block(weights, at, x, lambda y: self.convolution(weights, f"{at}.conv", y))
        return self.block(weights, at, x, lambda y: self.attention(weights, f"{at}.self_attn", y, letter))

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        """ids [B,T] -> [B,T,E]"""
        x = F.embedding(ids, weights["model.embed_tokens.weight"])
        return x * torch.tensor(self.shape.width**0.5).to(self.dtype) if self.shape.dialect.scales_embedding else x

    def hidden(self, weights: Weights, ids: Tensor) -> Tensor:
        """ids [B,T] -> what the output head reads, [B,T,E]"""
        x = self.embed(weights, ids)
        for index in range(len(self.shape.layers)):
            x = self.layer(weights, index, x)
        return self.norm(x, weights[f"{self.shape.dialect.last_norm}.weight"])

    def forward(self, weights: Weights, ids: Tensor) -> Tensor:
        """ids [B,T] -> logits [B,T,V]"""
        return F.linear(self.hidden(weights, ids), weights["model.embed_tokens.weight"])

    def loss(self, weights: Weights, window: Tensor) -> Tensor:
        """window [B,T+1] -> mean nats per predicted token."""
        logits = self.forward(weights, window[:, :-1])
        return MeanSurprise.apply(logits.flatten(0, 1), window[:, 1:].flatten())
