"""ollama_options: the `options` of a request to Ollama's routes, as sampling parameters.

Unknown options are ignored, as Ollama does, with a line in the log: a client sends those of all its models.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvcellar.serve.json_text import printable
from kvcellar.serve.ollama_fields import Options
from kvcellar.serve.parsing import validated

log = logging.getLogger("kvcellar.serve")

MOST_NAMED = 8  # unknown options in one line of the log


RENAMED: Mapping[str, str] = MappingProxyType({"repeat_penalty": "repetition_penalty"})
NAMES: Mapping[str, str] = MappingProxyType(
    {own: name for name, own in RENAMED.items()} | {"max_tokens": "num_predict"}
)


def sampling_of(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of `SamplingParams`; None: the model's default. Raises `ApiError`."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if unknown := [name for name in given if name not in Options.model_fields]:
        names = ", ".join(printable(name, 40) for name in unknown[:MOST_NAMED])
        log.warning("options without an effect: %s", names)
    read = validated(Options, {name: value for name, value in given.items() if name not in unknown})
    found = read.model_dump(exclude={"num_predict", "stop", "num_ctx"}, exclude_none=True)
    found = {RENAMED.get(name, name): value for name, value in found.items()}
    if read.num_predict is not None and read.num_predict >= 0:
        found["max_tokens"] = max(read.num_predict, 1)
    if read.stop is not None:
        found["stop"] = (read.stop,) if isinstance(read.stop, str) else tuple(read.stop)
    return found
