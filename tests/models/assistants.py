"""Tiny assistants of Gemma 4, in memory and in directories."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.assistant_head import ASSISTANTS, AssistantHead, build_assistant, queries_only
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.memory.attention.choose import backends
from tests.zoo import ARCHS, layers
from tests.zoo_test_support.initialise import initialise

TEXTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 25, "centroid_intermediate_top_k": 6}  # 4 tokens each
VOCAB = 100


def assistant_config(model_type: str, *, text: dict[str, Any] | None = None, **fields: Any) -> Any:
    own = {
        "model_type": TEXTS[model_type],
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": layers("SSF"),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 3,
        "max_position_embeddings": 256,
    }
    return AutoConfig.for_model(model_type, **{"backbone_hidden_size": 64} | fields, text_config=own | (text or {}))


def network(model_type: str, **fields: Any) -> Any:
    config = assistant_config(model_type, **fields)
    queries_only(config)
    model: Any = ASSISTANTS[model_type]._from_config(config, dtype=torch.float32, attn_implementation="eager")
    initialise(model, 3)
    if config.use_ordered_embeddings:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)))
    return model.eval()


@cache
def target() -> Guest:
    """Shared between tests, which must not change it."""
    return build_guest(ARCHS["gemma4-e2b"].build(vocab_size=VOCAB), backends())


@cache
def head_and_reference(model_type: str, *, ordered: bool = False) -> tuple[AssistantHead, Any]:
    """A head, and the same network with transformers' own attention and masks."""
    fields = ORDERED if ordered else {}
    reference = network(model_type, **fields)
    reference.ours = False
    return build_assistant(network(model_type, **fields), target()), reference


def saved(path: Path, model_type: str, **fields: Any) -> Path:
    with silence_transformers():
        network(model_type, **fields).save_pretrained(path)
    return path
