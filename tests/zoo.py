"""The zoo: tiny random models of real architectures.

Every model is float32, in eval mode, has a vocabulary of 101 and a context of 256, and is built from its config and a
fixed seed in well under a second. Windows and chunks are 8 wide, far shorter than a test sequence of 40 tokens, and
layers of different kinds alternate. Weights are initialised so that omitting a window, a sink, a soft cap or a position
changes the logits by more than a hundredth of the largest.

    model = ARCHS["gpt-oss"].build()
    logits = reference_logits(model, tokens)  # [L,V]
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.zoo_test_support.initialise import initialise
from tests.zoo_test_support.sweep import auto_config, sweep
from tests.zoo_test_support.tiny import CONTEXT, VOCAB, WINDOW, tiny

__all__ = [
    "ARCHS",
    "ATTENTION",
    "KINDS",
    "RECURRENT",
    "REFUSED_OR_UNUSUAL",
    "WINDOW",
    "Arch",
    "auto_config",
    "layers",
    "reference_logits",
    "sweep",
]

KINDS = {
    "full": "layers that see all earlier positions",
    "sliding": "layers that see the last WINDOW positions",
    "chunked": "layers that see their own block of WINDOW positions",
    "conv": "short convolutions",
    "ssm": "state spaces",
    "linear": "linear attention and other gated recurrences",
    "shared-kv": "layers that read the keys and values of another layer",
    "mla": "latents in the cache, which its own code expands to heads",
    "indexed": "layers that see the top few positions of an index",
    "compressed": "layers that also see summaries of blocks",
    "moe": "experts chosen by a router",
    "alibi": "positions as a bias on the scores",
    "learned-pos": "positions added to the embedding",
    "some-nope": "some layers without positions",
    "nope": "no layer has positions; the order comes from recurrence and causality",
    "rope-scaled": "rotary frequencies stretched by a scheme",
    "sinks": "a learned logit per head in the softmax",
    "token-sinks": "such a logit per head and token",
    "softcap": "scores squashed by tanh",
    "temperature": "queries scaled by their position",
    "own-attention": "attention code that uses neither the attention nor the mask interface",
    "own-cache": "state outside of transformers' cache objects",
}


@dataclass(frozen=True)
class Arch:
    """One architecture. `own` are the config fields that differ from small sizes and from its defaults."""

    name: str
    model_type: str
    kinds: tuple[str, ...]
    own: tuple[tuple[str, Any], ...]
    vocab: int = VOCAB
    context: int = CONTEXT

    def config(self, **changes: object) -> PreTrainedConfig:
        """A new config, which a test may change."""
        return tiny(self.model_type, **dict(self.own) | changes)

    def build(self, **changes: object) -> PreTrainedModel:
        """A new model on the CPU. Changed fields that keep every shape keep every weight, too. Its generation config
        says that decoding is greedy, so that a request without sampling parameters always has the same tokens."""
        seed = zlib.crc32(self.name.encode())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                self.config(**changes), attn_implementation="eager", dtype=torch.float32
            )
        initialise(model, seed)
        model.generation_config.do_sample = False
        return model.eval()


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """One forward over all tokens with the model's eager attention and no cache -> [L,V] float32.

    The attention implementation of the model is restored. Modules whose forward was replaced are called as they are.
    """
    before = model.config._attn_implementation or "eager"
    if before != "eager":
        model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            ids = torch.tensor([tokens], device=model.device)
            return model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        if before != "eager":
            model.set_attn_implementation(before)


NAMES = {
    "F": "full_attention",
    "S": "sliding_attention",
    "C": "chunked_attention",
    "K": "conv",
    "L": "linear_attention",
}


def layers(letters: str) -> list[str]:
    """`SF` -> sliding, full."""
    return [NAMES[letter] for letter in letters]


def _arch(name: str, model_type: str, kinds: str, **own: object) -> Arch:
    return Arch(name, model_type, tuple(kinds.split()), tuple(own.items()))


ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
ROPE_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}  # plain, up to the model's context
ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 3.7, 4.5],
    "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0, 15.0],
}

_ATTENTION = (
    _arch("llama", "llama", "full"),
    _arch("llama-rope-llama3", "llama", "full rope-scaled", rope_parameters=ROPE_LLAMA3),
    _arch("llama-rope-yarn", "llama", "full rope-scaled", rope_parameters=ROPE_YARN),
    _arch("llama-rope-linear", "llama", "full rope-scaled", rope_parameters=ROPE_LINEAR),
    _arch("llama-rope-dynamic", "llama", "full", rope_parameters=ROPE_DYNAMIC),
    _arch("phi3", "phi3", "full", sliding_window=None),
    _arch("phi3-longrope", "phi3", "full rope-scaled", sliding_window=None,
          rope_parameters=ROPE_LONG | {"factor": 2.0}, original_max_position_embeddings=128),
    _arch("phi", "phi", "full"),
    _arch("qwen2", "qwen2", "full", sliding_window=None),
    _arch("qwen2-sliding", "qwen2", "full sliding", use_sliding_window=True, layer_types=layers("FSFS")),
    _arch("qwen2-moe", "qwen2_moe", "full moe", sliding_window=None),
    _arch("qwen3", "qwen3", "full", sliding_window=None),
    _arch("qwen3-moe", "qwen3_moe", "full moe", sliding_window=None),
    _arch("mistral", "mistral", "sliding", num_hidden_layers=3),
    _arch("ministral", "ministral", "full sliding", layer_types=layers("SFSF")),
    _arch("mixtral", "mixtral", "full moe", sliding_window=None),
    _arch("gemma", "gemma", "full"),
    _arch("gemma2", "gemma2", "full sliding softcap", layer_types=layers("SFSF"), query_pre_attn_scalar=16,
          attn_logit_softcapping=2.0, final_logit_softcapping=20.0),
    _arch("gemma3", "gemma3_text", "full sliding", layer_types=layers("SSFSSF"), num_hidden_layers=6,
          query_pre_attn_scalar=16),
    _arch("gemma3n", "gemma3n_text", "full sliding shared-kv", layer_types=layers("SFSFSF"), num_hidden_layers=6,
          num_kv_shared_layers=2, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
    _arch("gemma4-e2b", "gemma4_text", "full sliding shared-kv", layer_types=layers("SFSFSF"), num_hidden_layers=6,
          num_kv_shared_layers=2, global_head_dim=32, use_double_wide_mlp=True, final_logit_softcapping=20.0),
    _arch("gemma4-26b", "gemma4_text", "full sliding moe", layer_types=layers("SSFSSF"), num_hidden_layers=6,
          hidden_size_per_layer_input=0, attention_k_eq_v=True, global_head_dim=32, num_global_key_value_heads=1,
          enable_moe_block=True, num_experts=4, top_k_experts=2, final_logit_softcapping=20.0),
    _arch("gpt-oss", "gpt_oss", "full sliding moe sinks rope-scaled", layer_types=layers("SFSF"),
          rope_parameters=ROPE_YARN | {"truncate": False}),
    _arch("llama4", "llama4_text", "full chunked moe some-nope temperature", layer_types=layers("CCCF"),
          num_experts_per_tok=1, interleave_moe_layer_step=2, floor_scale=8, attn_scale=0.5),
    _arch("llama4-untempered", "llama4_text", "full chunked moe some-nope", layer_types=layers("CCCF"),
          num_experts_per_tok=1, interleave_moe_layer_step=2, attn_temperature_tuning=False),
    _arch("cohere", "cohere", "full", use_qk_norm=True, logit_scale=1.0),
    _arch("cohere2", "cohere2", "full sliding some-nope", layer_types=layers("SSSF"), logit_scale=1.0),
    _arch("olmo", "olmo", "full", clip_qkv=3.0),
    _arch("olmo2", "olmo2", "full"),
    _arch("olmo3", "olmo3", "full sliding", layer_types=layers("SSSF")),
    _arch("olmoe", "olmoe", "full moe"),
    _arch("granite", "granite", "full", embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.7,
          logits_scaling=2.0),
    _arch("granitemoe", "granitemoe", "full moe", embedding_multiplier=3.0, attention_multiplier=0.3,
          residual_multiplier=0.7, logits_scaling=2.0),
    _arch("deepseek-v2", "deepseek_v2", "full mla moe", first_k_dense_replace=1, topk_method="greedy"),
    _arch("deepseek-v3", "deepseek_v3", "full mla moe", first_k_dense_replace=1, n_routed_experts=8, n_group=2,
          topk_group=1),
    _arch("minicpm3", "minicpm3", "full mla", dim_model_base=32, scale_emb=3),
    _arch("glm", "glm", "full"),
    _arch("glm4", "glm4", "full"),
    _arch("glm4-moe", "glm4_moe", "full moe", use_qk_norm=True),
    _arch("glm4-moe-lite", "glm4_moe_lite", "full mla moe"),
    _arch("ernie4.5", "ernie4_5", "full"),
    _arch("ernie4.5-moe", "ernie4_5_moe", "full moe"),
    _arch("smollm3", "smollm3", "full some-nope", sliding_window=None),
    _arch("seed-oss", "seed_oss", "full"),
    _arch("starcoder2", "starcoder2", "sliding"),
    _arch("exaone4", "exaone4", "full sliding some-nope", layer_types=layers("SSSF")),
    _arch("nemotron", "nemotron", "full"),
    _arch("persimmon", "persimmon", "full"),
    _arch("stablelm", "stablelm", "full", use_parallel_residual=True, qk_layernorm=True),
    _arch("gpt-neox", "gpt_neox", "full"),
    _arch("gpt2", "gpt2", "full learned-pos"),
    _arch("opt", "opt", "full learned-pos"),
    _arch("gpt-bigcode", "gpt_bigcode", "full learned-pos"),
    _arch("biogpt", "biogpt", "full learned-pos"),
    _arch("afmoe", "afmoe", "full sliding moe some-nope", layer_types=layers("SSSF")),
    _arch("apertus", "apertus", "full rope-scaled", rope_parameters=ROPE_LLAMA3),
    _arch("arcee", "arcee", "full"),
    _arch("bitnet", "bitnet", "full"),
    _arch("cohere2-moe", "cohere2_moe", "full sliding moe some-nope", layer_types=layers("SSSF"),
          logit_scale=1.0),
    _arch("cwm", "cwm", "full sliding rope-scaled", layer_types=layers("FSSF"), rope_parameters=ROPE_LLAMA3),
    _arch("dbrx", "dbrx", "full moe", attn_config={"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
          ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32}),
    _arch("deepseek-v3.2", "deepseek_v32", "mla moe indexed", first_k_dense_replace=1),
    _arch("diffllama", "diffllama", "full"),
    _arch("doge", "doge", "full", sliding_window=None, keep_window_size=CONTEXT),
    _arch("dots1", "dots1", "full sliding moe", layer_types=layers("SFSF"), first_k_dense_replace=1),
    _arch("exaone-moe", "exaone_moe", "full sliding moe some-nope", layer_types=layers("SSSF"),
          first_k_dense_replace=1),
    _arch("glm-moe-dsa", "glm_moe_dsa", "mla moe indexed", first_k_dense_replace=1, index_topk_pattern="FSFS"),
    _arch("granite-swa", "granite_swa", "full sliding sinks", layer_types=layers("SFSF"), attention_multiplier=0.3),
    _arch("helium", "helium", "full"),
    _arch("hunyuan-dense", "hunyuan_v1_dense", "full"),
    _arch("hunyuan-moe", "hunyuan_v1_moe", "full moe"),
    _arch("hy-v4", "hy_v4", "mla moe indexed sinks"),
    _arch("laguna", "laguna", "full sliding moe", layer_types=layers("SFSF"),
          num_attention_heads_per_layer=[4, 8, 4, 8]),
    _arch("longcat-flash", "longcat_flash", "full mla moe", head_dim=8, num_layers=2),
    _arch("mimo-v2-flash", "mimo_v2_flash", "full sliding moe sinks", layer_types=layers("FSSF")),
    _arch("minimax-m2", "minimax_m2", "full moe"),
    _arch("ministral3", "ministral3", "full temperature rope-scaled", sliding_window=None,
          rope_parameters=ROPE_YARN
          | {"factor": 32.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}),
    _arch("modernbert-decoder", "modernbert-decoder", "full sliding", layer_types=layers("SSFS")),
    _arch("nanochat", "nanochat", "full"),
    _arch("phimoe", "phimoe", "full moe", sliding_window=None),
    _arch("vaultgemma", "vaultgemma", "full sliding softcap", layer_types=layers("SFSF"), query_pre_attn_scalar=16,
          attn_logit_softcapping=2.0, final_logit_softcapping=20.0),
    _arch("youtu", "youtu", "full mla"),
)  # fmt: skip

_RECURRENT = (
    _arch("lfm2", "lfm2", "full conv", layer_types=layers("KKFKF"), num_hidden_layers=5),
    _arch("lfm2-moe", "lfm2_moe", "full conv moe", layer_types=layers("KKFKF"), num_hidden_layers=5,
          num_dense_layers=1),
    _arch("lfm3", "lfm3", "full sliding conv", layer_types=layers("KSFKSF"), num_hidden_layers=6),
    _arch("qwen3-next", "qwen3_next", "full linear moe", layer_types=layers("LLLF")),
    _arch("qwen3.5", "qwen3_5_text", "full linear", layer_types=layers("LLLF")),
    _arch("qwen3.5-moe", "qwen3_5_moe_text", "full linear moe", layer_types=layers("LLLF")),
    _arch("olmo-hybrid", "olmo_hybrid", "full linear", layer_types=layers("LLLF"), linear_num_key_heads=4),
    _arch("kimi-linear", "kimi_linear", "full linear mla moe nope", layer_types=layers("LLLF")),
    _arch("bailing-hybrid", "bailing_hybrid", "full linear mla moe", layer_types=layers("LLLF"),
          first_k_dense_replace=1),
    _arch("mamba", "mamba", "ssm nope"),
    _arch("falcon-mamba", "falcon_mamba", "ssm nope"),
    _arch("mamba2", "mamba2", "ssm nope", num_heads=4, head_dim=32),
    _arch("falcon-h1", "falcon_h1", "full ssm", key_multiplier=0.7, attention_out_multiplier=0.8,
          ssm_multipliers=[0.8, 0.9, 1.1, 1.2, 0.7], ssm_out_multiplier=1.2),
    _arch("jamba", "jamba", "full ssm moe nope", attn_layer_period=3, attn_layer_offset=1, num_hidden_layers=6),
    _arch("bamba", "bamba", "full ssm", attn_layer_indices=[1, 3]),
    _arch("granitemoehybrid", "granitemoehybrid", "full ssm moe nope", layer_types=layers("LFLF"),
          attention_multiplier=0.3, logits_scaling=2.0),
    _arch("nemotron-h", "nemotron_h", "full ssm moe nope",
          layer_types=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "full_attention"]),
    _arch("zamba", "zamba", "full ssm nope", layers_block_type=["linear_attention", "hybrid"] * 2),
    _arch("zamba2", "zamba2", "full ssm", layers_block_type=["linear_attention", "hybrid"] * 2, use_mem_rope=True,
          num_mem_blocks=2),
    _arch("zaya", "zaya", "full sliding conv moe", num_experts_per_tok=1,
          layer_types=["hybrid_sliding", "hybrid"] * 2),
    _arch("inkling", "inkling_text", "full sliding conv moe alibi", layer_types=["hybrid_sliding", "hybrid"] * 2,
          logits_mup_width_multiplier=2.0),
)  # fmt: skip

_UNUSUAL = (
    _arch("phi3-longrope-crossing", "phi3", "full rope-scaled", sliding_window=None,
          rope_parameters=ROPE_LONG | {"factor": 16.0}, original_max_position_embeddings=16),
    _arch("falcon", "falcon", "full own-attention", new_decoder_architecture=True, num_kv_heads=2),
    _arch("falcon-alibi", "falcon", "full alibi own-attention", alibi=True, multi_query=False),
    _arch("gptj", "gptj", "full own-attention"),
    _arch("codegen", "codegen", "full own-attention"),
    _arch("gpt-neo", "gpt_neo", "full sliding learned-pos own-attention", window_size=WINDOW,
          attention_types=[[["global", "local"], 2]]),
    _arch("gpt-neox-japanese", "gpt_neox_japanese", "full own-attention"),
    _arch("xglm", "xglm", "full own-attention"),
    _arch("bloom", "bloom", "full alibi own-attention"),
    _arch("mpt", "mpt", "full alibi own-attention"),
    _arch("inkling2", "inkling2_text", "full sliding conv moe alibi token-sinks",
          layer_types=["hybrid_sliding", "hybrid"] * 2,
          log_scaling_n_floor=8),
    _arch("minimax-m3", "minimax_m3_vl_text", "full moe indexed",
          layer_types=["minimax_m3_sparse", "full_attention"] * 2,
          index_n_heads=2, index_block_size=4, index_topk_blocks=3),
    _arch("deepseek-v4", "deepseek_v4", "sliding compressed moe sinks",
          compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}),
    _arch("minimax-01", "minimax", "full linear moe own-cache", layer_types=layers("LFLF"), block_size=WINDOW),
    _arch("recurrent-gemma", "recurrent_gemma", "sliding linear own-cache", num_hidden_layers=6),
    _arch("rwkv", "rwkv", "linear nope own-cache"),
    _arch("xlstm", "xlstm", "linear nope own-cache"),
    _arch("openai-gpt", "openai-gpt", "full learned-pos own-attention own-cache"),
)  # fmt: skip

ARCHS: dict[str, Arch] = {arch.name: arch for arch in (*_ATTENTION, *_RECURRENT, *_UNUSUAL)}
ATTENTION = tuple(arch.name for arch in _ATTENTION)
RECURRENT = tuple(arch.name for arch in _RECURRENT)
REFUSED_OR_UNUSUAL = tuple(arch.name for arch in _UNUSUAL)
