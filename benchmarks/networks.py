"""networks: the cells of a Llama network, for rows without weights, and configs of hybrid networks."""

from kvcellar.bench.network import Size
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.shapes import Plane

RECURRENT = ("lfm2", "qwen3_5_text", "bamba")  # short convolutions; gated delta rules; Mamba 2


def hybrid(kind: str, *, hidden: int, layers: int, head: int) -> dict[str, object]:
    """The config of a network with recurrent layers of one kind, and attention in every fourth layer."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 2,
        "head_dim": head,
        "intermediate_size": 3 * hidden,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_recurrent_config(kind, hidden=hidden, layers=layers, head=head),
    }


def _recurrent_config(kind: str, *, hidden: int, layers: int, head: int) -> dict[str, object]:
    attention, heads = range(3, layers, 4), hidden // head
    if kind == "bamba":
        return {
            "attn_layer_indices": list(attention),
            "attn_rotary_emb": head // 2,
            "mamba_n_heads": 2 * heads,
            "mamba_d_head": head,
            "mamba_d_state": head,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
        }
    recurrent = "conv" if kind == "lfm2" else "linear_attention"
    layer_types = ["full_attention" if layer in attention else recurrent for layer in range(layers)]
    if kind == "lfm2":
        return {"layer_types": layer_types, "block_ff_dim": 3 * hidden, "block_auto_adjust_ff_dim": False}
    return {
        "layer_types": layer_types,
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
    }


def group(size: Size) -> Group:
    """The group "causal" of all layers of a Llama network."""
    planes = (Plane("k", size.kv_heads, size.head_size), Plane("v", size.kv_heads, size.head_size))
    return Group("causal", Causal(), planes, tuple(range(size.layers)), no_shift=None)
