"""Run tests of transformers with the caches of attached memories in place of its own.

    git clone --depth 1 https://github.com/huggingface/transformers && cd transformers
    python -m scripts.transformers_tests tests/utils/test_cache_utils.py
    python -m scripts.transformers_tests tests/models/llama/test_modeling_llama.py -k generat

It is run there with this repository in PYTHONPATH, and the package `parameterized`. `DynamicCache(config=...)` in a test
is a cache of a memory that is attached to a network of that config, and `generate` without a cache gets one of a memory
that is attached to its model. With `--theirs`, caches are those of transformers, to compare.
"""

import inspect
import sys
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcellar import Attached, attach
from kvcellar.engine.models.attached_layers import GrowingLayer
from kvcellar.errors import KvcellarError

TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}


class OfMemory(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, DynamicCache)

    def __call__(cls, *_: Any, config: Any = None, **__: Any) -> Any:
        network = AutoModelForCausalLM.from_config(config or LlamaConfig(**TINY))
        return attach(network.eval(), cache_bytes=1 << 24).cache()


class OurCache(metaclass=OfMemory):
    """Stands for `DynamicCache` in tests."""


class Plugin:
    def __init__(self) -> None:
        self.memories: WeakKeyDictionary[Any, Attached] = WeakKeyDictionary()
        self.calls: Counter[str] = Counter()  # of `generate`, by whose cache it had
        self.plain: Any = GenerationMixin.generate
        setattr(GenerationMixin, "generate", lambda model, *args, **kwargs: self.generate(model, *args, **kwargs))

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
        settings = vars(kwargs.get("generation_config") or model.generation_config) | kwargs
        if kwargs.get(name) is None and settings["use_cache"] is not False and not settings["cache_implementation"]:
            try:
                memory = self.memories.get(model) or attach(model, cache_bytes=1 << 24)
            except KvcellarError as error:
                self.calls[f"transformers' cache: {error}"] += 1
            else:
                self.memories[model] = memory
                self.calls["our cache"] += 1
                return model.generate(*args, **{**kwargs, name: memory.cache()})
        return self.plain(model, *args, **kwargs)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for names in (vars(module) for module in {item.module for item in items}):
            names.update({"DynamicCache": OurCache, "DynamicLayer": GrowingLayer})
            layers = names.get("ALL_DYNAMIC_LAYERS", ())
            names["ALL_DYNAMIC_LAYERS"] = [GrowingLayer if layer is DynamicLayer else layer for layer in layers]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for why, number in self.calls.most_common():
            terminalreporter.write_line(f"{number:6} calls of generate with {why}")


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if one != "--theirs"]
    sys.exit(pytest.main(["-q", "-n0", "-c", "/dev/null", *given], [] if "--theirs" in sys.argv else [Plugin()]))
