"""A peer without a model: tokens follow from the prompt alone; OPTIONS may say how it goes wrong. Run by `serve`."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any


def library(options: Mapping[str, Any]) -> str:
    print("a library that prints")  # noqa: T201
    if options["precision"] == "missing":
        raise ModuleNotFoundError("No module named 'engine'")
    return "fake 1.0"


def following(prompt: Sequence[int], count: int) -> list[int]:
    """The first tokens after a prompt, by position."""
    start = sum(prompt)
    return [(start * 31 + i * i) % 1000 for i in range(count)]


class Peer:
    flags = "of a fake"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._how: str = options["precision"]
        self._log = open(os.environ["FAKE_LOG"], "a", buffering=1) if "FAKE_LOG" in os.environ else None
        if self._how == "options":
            self._note(f"threads {options['threads']} {os.environ['OMP_NUM_THREADS']} record {options['record']}")
        self._prompts: list[list[int]] = []
        self._given = 0

    def _note(self, what: str) -> None:
        if self._log is not None:
            self._log.write(f"{self._how} {what}\n")

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        self._note(f"open {prompts}" + (f" {dict(sampled)}" if sampled else ""))
        self._prompts, self._given = [list(prompt) for prompt in prompts], 0
        return self._next()

    def step(self) -> list[list[int]]:
        self._note("step")
        if self._how == "dies":
            print("about to die")  # noqa: T201
            os._exit(3)
        if self._how == "hangs":
            time.sleep(600)
        return self._next()

    def close(self) -> None:
        self._note("close")

    def _next(self) -> list[list[int]]:
        self._given += 1
        wrong = 1 if self._how == "differs" and self._given == 2 else 0
        return [[following(prompt, self._given)[-1] + wrong] for prompt in self._prompts]

    def stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._note("stream")
        began = time.process_time()
        while time.process_time() < began + 0.02:
            pass
        count = len(request["texts"])
        return {"tokens": count * request["new"], "first": [0.1] * count, "gaps": [0.01] * count}

    def lead(self, tokens: Sequence[int], over: int) -> float:
        self._note(f"lead {len(tokens)} {over}")
        return 0.75
