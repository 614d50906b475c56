"""defaults: the sampling parameters of requests that set none."""

from collections.abc import Mapping
from typing import Any

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.sample.params import SamplingParams, check_ids


def default_sampling(defaults: Mapping[str, Any], *, vocab_size: int, model: str) -> SamplingParams:
    """Those of a model: from the library, else from its files, else those of `SamplingParams`. Raises `ModelRefused` if
    they name tokens that it does not have: each request would."""
    params = SamplingParams(**defaults)
    try:
        check_ids(params, vocab_size)
    except BadRequest as error:
        raise ModelRefused(f"the default sampling parameters of {model} cannot be followed: {error}") from error
    return params
