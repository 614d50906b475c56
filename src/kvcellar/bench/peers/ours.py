"""ours: an `Engine` as a peer, through `submit`, with the default settings: the precision is the setting `weights`."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

AS_STORED = "bf16"  # the precision of the weights file
MOST = 20  # most probable tokens that are compared


def library(options: Mapping[str, Any]) -> str:
    """Imports torch and the module of the model too, which are not ours."""
    kind = json.loads((Path(options["model"]) / "config.json").read_text())["model_type"]
    name = import_module("transformers.models.auto.configuration_auto").model_type_to_module_name(kind)
    import_module(f"transformers.models.{name}.modeling_{name}")
    return f"kvcellar {import_module('kvcellar').__version__}"


class Peer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        from kvcellar.bench.peers.turns import Turns
        from kvcellar.frontend.engine import Engine

        precision: str = options["precision"]
        how: dict[str, Any] = {} if precision == AS_STORED else {"weights": precision}
        how |= {} if options["record"] is None else {"record": options["record"]}
        self._engine = Engine(
            Path(options["model"]),
            device="cpu",
            threads=options["threads"],
            cache_bytes=options["cache_bytes"],
            max_sequences=options["sequences"],
            **how,
        )
        self._turns_of, self._turns, self._tickets = Turns, Turns(0), list[Any]()
        self.flags = f"weights {how.get('weights', 'as stored')}, record {how.get('record', 'auto')}"

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        from kvcellar.sampling_params import SamplingParams

        how: Any = {"temperature": 0.0} if sampled is None else sampled
        params = SamplingParams(ignore_eos=True, **how)
        self._turns = self._turns_of(len(prompts))
        self._tickets = [
            self._engine.submit(prompt, params, deliver=partial(self._on_event, self._turns, number))
            for number, prompt in enumerate(prompts)
        ]
        return self._turns.first()

    @staticmethod
    def _on_event(turns: Any, number: int, event: Any) -> None:
        from kvcellar.events import Delta, Failed

        if isinstance(event, Failed):
            turns.fail(event.error)
        if isinstance(event, Delta):
            turns.on_tokens(number, event.token_ids)

    def step(self) -> list[list[int]]:
        return self._turns.step()

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
        self._turns.end()
        self._engine.stats()  # waits until the engine's thread has cancelled them

    def stream(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Texts are continued on as many threads as there are streams, as a program would do it."""
        how: dict[str, Any] = {"temperature": 0.0} if request["greedy"] else {}  # else the defaults of the model
        first, gaps = list[float](), list[float]()

        def one(text: str) -> int:
            at, count, times = time.perf_counter(), 0, list[float]()
            for delta in self._engine.stream(text, max_tokens=request["new"], ignore_eos=True, **how):
                times.append(time.perf_counter() - at)
                at, count = at + times[-1], count + len(delta.token_ids)
            first.append(times[0])
            gaps.extend(times[1:])
            return count

        with ThreadPoolExecutor(request["streams"]) as threads:
            return {"tokens": sum(threads.map(one, request["texts"])), "first": first, "gaps": gaps}

    def lead(self, tokens: Sequence[int], over: int) -> float:
        """By how much the log-probability of the most probable next token exceeds that of `over`; where that is not
        among the first few, the lead over the last of these, which is less."""
        result = self._engine.generate(list(tokens), max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=MOST)
        assert result.choices[0].logprobs is not None
        top = dict(result.choices[0].logprobs[0].top)
        return max(top.values()) - top.get(over, min(top.values()))
