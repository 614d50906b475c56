"""against: the traces of `replay` on caches of other systems, counted in prompt tokens, without a limit."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.replay import KINDS, TRACES, WINDOW, Counts, Turn, Writer
from kvcellar.bench.hf_baseline import KeptCaches
from kvcellar.prefix.node import common_prefix

SYSTEMS = ("transformers",)
LAYERS = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention"}


def _config(kind: str) -> Mapping[str, Any]:
    """Two layers: full attention, and one of this kind."""
    second = LAYERS.get(kind, "linear_attention")
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", second]}
    if kind == "sliding":
        return {"model_type": "gemma3_text", "sliding_window": WINDOW, **layers}
    if kind == "chunked":
        return {"model_type": "llama4_text", "attention_chunk_size": WINDOW, **layers}
    return {"model_type": "qwen3_next" if kind == "hybrid" else "qwen3", **layers}


def in_transformers(turns: Sequence[Turn], kind: str) -> int:
    """Prompt tokens that are computed with a `DynamicCache` for each conversation."""
    caches, computed = KeptCaches(_config(kind)), 0
    for turn in turns:
        common = common_prefix(caches.tokens(turn.conversation), turn.prompt)
        computed += caches.serve(turn.conversation, turn.prompt, turn.answer, min(common, len(turn.prompt) - 1))
    return computed


def counted(*, scale: float = 1.0, seed: int = 1) -> dict[tuple[str, str], int]:
    """By trace and kind of model."""
    return {
        (name, kind): in_transformers(list(trace(Writer(seed, scale))), kind)
        for name, trace in TRACES.items()
        for kind in KINDS
    }


def lines(ours: Mapping[tuple[str, str], tuple[Counts, Counts]], theirs: Mapping[tuple[str, str], int]) -> list[str]:
    """The table: prompt tokens computed by both without a limit."""
    head = "{:8} {:8} {:>9} {:>9} {:>12} {:>6}".format("trace", "kind", "tokens", "kvcellar", "transformers", "ratio")
    rows = [
        f"{trace:8} {kind:8} {whole.tokens:9} {whole.computed:9} {theirs[trace, kind]:12} "
        f"{theirs[trace, kind] / whole.computed:6.2f}"
        for (trace, kind), (whole, _) in ours.items()
    ]
    return [head, *rows]
