"""The sweep: a tiny config for every causal model type transformers knows, or the reason why there is none."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo_test_support.tiny import tiny

OWN: dict[str, dict[str, Any]] = {}


def auto_config(model_type: str) -> PreTrainedConfig:
    """A tiny config of this type. Raises what its config class raises where the small sizes do not fit it."""
    return tiny(model_type, **OWN.get(model_type, {}))


def sweep() -> dict[str, PreTrainedConfig | str]:
    """Every causal model type, with its tiny config or the reason why it has none."""
    found: dict[str, PreTrainedConfig | str] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found[model_type] = auto_config(model_type)
        except (ValueError, TypeError, AttributeError, KeyError, ImportError) as reason:
            found[model_type] = f"{type(reason).__name__}: {reason}"
    return found
