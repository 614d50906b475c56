"""with_transformers: `generate` of transformers with its dynamic cache, as a peer. It runs in our own environment."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def library(options: Mapping[str, Any]) -> str:
    import_module("kvcellar.bench.hf_baseline")
    return f"transformers {import_module('transformers').__version__}"


class Peer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        from kvcellar.bench.hf_baseline import Generating

        import_module("torch").set_num_threads(options["threads"])
        self._generating = Generating(options["model"], most=options["new"], keeps=options["reuses"])

        self.flags = f"attention {self._generating.attention}"

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        return self._generating.start(prompts, sampled)

    def step(self) -> list[list[int]]:
        return self._generating.turns.step()

    def close(self) -> None:
        self._generating.stop()
