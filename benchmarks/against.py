"""against: the traces of `replay` on caches of transformers, counted in prompt tokens, without a limit."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from benchmarks.replay import KINDS, QUICK, TRACES, WINDOW, Turn, Writer, replay
from benchmarks.row import Given, Lines
from kvcellar.bench.hf_baseline import cropped
from kvcellar.memory.prefix.node import common_prefix

LAYERS = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention"}


def config_of(kind: str) -> Mapping[str, Any]:
    """Two layers: full attention, and one of this kind; both are recurrent where all are."""
    second = LAYERS.get(kind, "linear_attention")
    first = second if kind == "recurrent" else "full_attention"
    layers = {"num_hidden_layers": 2, "layer_types": [first, second]}
    if kind == "sliding":
        return {"model_type": "gemma3_text", "sliding_window": WINDOW, **layers}
    if kind == "chunked":
        return {"model_type": "llama4_text", "attention_chunk_size": WINDOW, **layers}
    return {"model_type": "qwen3_next" if kind in ("hybrid", "recurrent") else "qwen3", **layers}


class KeptCaches:
    """A `DynamicCache` for each conversation, as clients of transformers keep them: cropped to the tokens that the next
    prompt begins with. Where `crop` refuses that, the conversation begins anew."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` gives the kinds of layers; the K/V have one head of size one, without a network."""
        self._config = AutoConfig.for_model(**config)
        self._kept: dict[int, tuple[DynamicCache, list[int]]] = {}

    def serve(self, conversation: int, prompt: Sequence[int], answer: Sequence[int], common: int) -> int:
        """Compute what the cache does not have of a prompt, and its answer but for the last token; returns how many
        tokens of the prompt that were. `common` tokens of the prompt are those that the conversation has."""
        cache, tokens = self._kept.get(conversation, (None, []))
        if cache is None or not cropped(cache, len(tokens) - common):
            cache, common = DynamicCache(config=self._config), 0
        text = [*prompt, *answer[:-1]]
        for new in (len(prompt) - common, len(text) - len(prompt)):
            if new:
                _compute(cache, new)
        attention = any(not isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        assert not attention or cache.get_seq_length() == len(text)
        self._kept[conversation] = cache, text
        return len(prompt) - common

    def tokens(self, conversation: int) -> list[int]:
        """What the cache of a conversation has."""
        return self._kept[conversation][1] if conversation in self._kept else []


def _compute(cache: DynamicCache, new: int) -> None:
    for index, kind in enumerate(cache.layers):
        if isinstance(kind, LinearAttentionLayer):
            cache.update_conv_state(torch.zeros(1, 1, max(4, new)), index)
            cache.update_recurrent_state(torch.zeros(1, 1, 1, 1), index)
        else:
            cache.update(torch.zeros(1, 1, new, 1), torch.zeros(1, 1, new, 1), index)


def in_transformers(turns: Sequence[Turn], kind: str) -> int:
    """Prompt tokens that are computed with a `DynamicCache` for each conversation."""
    caches, computed = KeptCaches(config_of(kind)), 0
    for turn in turns:
        common = common_prefix(caches.tokens(turn.conversation), turn.prompt)
        computed += caches.serve(turn.conversation, turn.prompt, turn.answer, min(common, len(turn.prompt) - 1))
    return computed


def row(given: Given) -> Lines:
    """Prompt tokens computed by both."""
    yield "{:8} {:8} {:>9} {:>9} {:>12} {:>6}".format("trace", "kind", "tokens", "kvcellar", "transformers", "ratio")
    found, scale = dict[str, object](), QUICK if given.quick else 1.0
    for trace, kind in product(TRACES, KINDS):
        ours = replay(trace, kind, scale=scale)
        theirs = in_transformers(list(TRACES[trace](Writer(1, scale))), kind)
        ratio = theirs / ours.computed
        yield f"{trace:8} {kind:8} {ours.tokens:9} {ours.computed:9} {theirs:12} {ratio:6.2f}"
        found[f"{trace} {kind}"] = {"tokens": ours.tokens, "kvcellar": ours.computed, "transformers": theirs}
    return found
