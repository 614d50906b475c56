"""Run tests of a checkout of transformers with our caches: `python -m scripts.transformers_tests --tests PATH`.

PATH is test_cache_utils.py, or a test_modeling_*.py; the package `parameterized` is needed. `DynamicCache` in a test,
and the cache of `generate` where it is given none, are then of a memory attached to the network; not with `--theirs`.
"""

import inspect
import sys
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LlamaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcellar import Attached, attach
from kvcellar.engine.models.attached_layers import GrowingLayer
from kvcellar.errors import KvcellarError

TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}


class OurCache(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, DynamicCache)

    def __call__(cls, *_: Any, config: Any = None, **__: Any) -> Any:
        return attach(AutoModelForCausalLM.from_config(config or LlamaConfig(**TINY)).eval()).cache()


class Plugin:
    def __init__(self) -> None:
        self.memories: WeakKeyDictionary[Any, Attached] = WeakKeyDictionary()
        self.calls: Counter[str] = Counter()  # of `generate`, by whose cache it had
        self.plain: Any = GenerationMixin.generate
        GenerationMixin.generate = lambda *args, **kwargs: self.generate(*args, **kwargs)

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
        configs = (one for one in (*args, *kwargs.values()) if isinstance(one, GenerationConfig))
        settings = vars(next(configs, model.generation_config)) | kwargs
        other = settings["cache_implementation"] or settings.get("is_assistant")  # transformers makes a cache itself
        if kwargs.get(name) is None and settings["use_cache"] is not False and not other:
            try:
                memory = self.memories.get(model) or attach(model, cache_bytes=1 << 24)
            except KvcellarError as error:
                self.calls[f"their cache: {error}"] += 1
            else:
                self.memories[model], self.calls["ours"] = memory, self.calls["ours"] + 1
                return model.generate(*args, **{**kwargs, name: memory.cache()})
        return self.plain(model, *args, **kwargs)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for names in (vars(module) for module in {item.module for item in items}):
            layers = [GrowingLayer if one is DynamicLayer else one for one in names.get("ALL_DYNAMIC_LAYERS", ())]
            ours = OurCache("OurCache", (), {})
            names.update({"DynamicCache": ours, "DynamicLayer": GrowingLayer, "ALL_DYNAMIC_LAYERS": layers})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"calls of generate, by cache: {dict(self.calls)}")


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if one not in ("--theirs", "--tests")]
    sys.exit(pytest.main(["-q", "-n0", "-c", "/dev/null", *given], [] if "--theirs" in sys.argv else [Plugin()]))
