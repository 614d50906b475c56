"""with_vllm: vLLM as a peer: its engine in this process, stepped by hand, with its default settings."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

GIB = 1 << 30


def library(options: Mapping[str, Any]) -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"  # these are read when vLLM is imported
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the CPU time is another process's
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-options["cache_bytes"] // GIB)))
    return f"vLLM {import_module('vllm').__version__}"


class Peer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        import_module("torch").set_num_threads(options["threads"])
        vllm = import_module("vllm")
        self._sampling, self._most = vllm.SamplingParams, options["new"]
        self._engine = vllm.LLM(
            options["model"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=options["longest"] + options["new"],
            max_num_seqs=options["sequences"],
        ).llm_engine
        self.flags = "its defaults"
        self._ids: dict[str, int] = {}  # number of the sequence by request
        self._opened = 0
        self._tokens: list[int] = []  # of each sequence, returned so far

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        how = {"temperature": 0.0} if sampled is None else sampled
        params = self._sampling(**how, max_tokens=self._most, ignore_eos=True, detokenize=False)
        self._ids = {f"{self._opened}-{number}": number for number in range(len(prompts))}
        self._opened += 1
        self._tokens = [0] * len(prompts)
        for (request, _), prompt in zip(self._ids.items(), prompts, strict=True):
            self._engine.add_request(request, {"prompt_token_ids": list(prompt)}, params)
        return self.step()

    def step(self) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in self._tokens]
        while not all(new):
            for output in self._engine.step():
                number = self._ids[output.request_id]
                ids = output.outputs[0].token_ids
                new[number] = list(ids)[self._tokens[number] :]
        self._tokens = [had + len(ids) for had, ids in zip(self._tokens, new, strict=True)]
        return new

    def close(self) -> None:
        self._engine.abort_request(list(self._ids))
        while self._engine.has_unfinished_requests():
            self._engine.step()
