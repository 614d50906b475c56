"""gguf_rope: rotary embeddings as a GGUF file describes them, as `rope_parameters` of transformers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.errors import ModelRefused
from kvcellar.models.gguf_fields import Fields

_NEAR = 1e-4  # relative: factors are float32
_LOW, _HIGH = 1.0, 4.0  # of all models with llama3 scaling


def rope_parameters(fields: Fields, *, default_theta: float = 10000.0) -> dict[str, Any]:
    """What the fields say, without the tensors of factors."""
    theta = fields.number("rope.freq_base", default_theta)
    if theta <= 0:
        raise fields.wrong("rope.freq_base", theta, "a number above 0 is needed")
    linear = fields.number("rope.scale_linear", 1.0)  # of files before `rope.scaling.factor`
    factor = fields.number("rope.scaling.factor", linear)
    kind = fields.raw("rope.scaling.type") or ("linear" if factor not in (0.0, 1.0) else "none")
    original = fields.raw("rope.scaling.original_context_length")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn") and factor <= 0:
        raise fields.wrong("rope.scaling.factor", factor, "a number above 0 is needed")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        if original is None:
            raise fields.wrong("rope.scaling.original_context_length", None, "YaRN needs it")
        found = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        found["original_max_position_embeddings"] = fields.whole("rope.scaling.original_context_length")
        fields.must_be("rope.scaling.yarn_ext_factor", 1.0)
        fields.must_be("rope.scaling.yarn_log_multiplier", 0.0)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if fields.raw(f"rope.scaling.{key}") is not None:
                found[name] = fields.number(f"rope.scaling.{key}")
        if (scale := fields.number("rope.scaling.attn_factor", 1.0)) != 1.0:
            found["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
        return found
    raise fields.wrong("rope.scaling.type", kind, "none, linear, and yarn are supported")


def llama3_parameters(theta: float, factors: Sequence[float], name: str) -> dict[str, Any]:
    """The llama3 scaling that has these factors: a GGUF file stores them in a tensor, without what they come from."""
    if not all(math.isfinite(one) and one > 0 for one in factors):
        raise ModelRefused(f"{name}: its rope_freqs.weight has a factor that is not a number above 0")
    factor = max(factors)
    for power in range(4, 24):
        found = {
            "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH, "original_max_position_embeddings": 1 << power,
        }  # fmt: skip
        made = _llama3_factors(found, len(factors))
        if all(math.isclose(one, other, rel_tol=_NEAR) for one, other in zip(made, factors, strict=True)):
            return found
    raise ModelRefused(f"{name}: its rope_freqs.weight is not of llama3 scaling, and cannot be followed")


def _llama3_factors(parameters: Mapping[str, Any], count: int) -> list[float]:
    """What each wavelength is multiplied by."""
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    found: list[float] = []
    for index in range(count):
        turns = original / (2 * math.pi * parameters["rope_theta"] ** (index / count))  # within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found
