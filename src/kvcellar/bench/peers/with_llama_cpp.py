"""with_llama_cpp: llama.cpp as a peer, through the C functions that llama-cpp-python exports.

A GGUF file of the same weights is beside the model; q8_0 and q4_0 are made from it by llama.cpp's own quantisation. A
context has one K/V cache for each sequence (`kv_unified` off, with which eight ragged ones take 0.69 of the time), as
large as the longest needs. The cache of a single
sequence stays, so that the next prompt begins with what it shares with the one before.
"""

import os
from collections.abc import Mapping, Sequence
from ctypes import byref
from importlib import import_module
from pathlib import Path
from typing import Any

ROUND = 256  # cells
KINDS = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def library(options: Mapping[str, Any]) -> str:
    return f"llama-cpp-python {import_module('llama_cpp').__version__}"


class Peer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        llama_cpp: Any = import_module("llama_cpp")
        self._api, self._numpy, self._threads = llama_cpp, import_module("numpy"), options["threads"]
        self._new: int = options["new"]
        llama_cpp.llama_backend_init()
        file = self._quantised(Path(options["model"]) / "model.gguf", options["precision"])
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(file), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {file}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        defaults = llama_cpp.llama_context_default_params()
        names = ("flash_attn_type", "type_k", "type_v", "n_ubatch")
        self.flags = ", ".join(f"{name} {getattr(defaults, name)}" for name in names)
        self.flags += f"; {llama_cpp.llama_print_system_info().decode()}"
        self._sampler: Any = None
        self._contexts: dict[tuple[int, int], Any] = {}  # by number of sequences, and cells of all
        self._context: Any = None
        self._held: dict[Any, list[int]] = {}  # tokens in the cache of a context of one sequence
        self._last: list[int] = []  # token of each sequence that is not in memory yet
        self._lengths: list[int] = []

    def _quantised(self, file: Path, precision: str) -> Path:
        if precision not in KINDS:
            return file
        made = file.with_suffix(f".{precision}.gguf")
        params = self._api.llama_model_quantize_default_params()
        params.nthread, params.ftype = 1, getattr(self._api, KINDS[precision])
        if self._api.llama_model_quantize(os.fsencode(file), os.fsencode(made), byref(params)):
            raise RuntimeError(f"llama.cpp did not quantise {file} to {precision}")
        return made

    def _made(self, sequences: int, longest: int) -> Any:
        cells = sequences * -(-(longest + self._new) // ROUND) * ROUND
        if sequences == 1:
            cells = max([cells, *(held for count, held in self._contexts if count == 1)])
        if (sequences, cells) not in self._contexts:
            params = self._api.llama_context_default_params()
            params.n_ctx, params.n_seq_max = cells, sequences
            params.n_threads = params.n_threads_batch = self._threads
            made = self._api.llama_init_from_model(self._model, params)
            if not made:
                raise RuntimeError(f"llama.cpp made no context of {cells} cells for {sequences} sequences")
            self._contexts[sequences, cells] = made
        return self._contexts[sequences, cells]

    def _chain(self, sampled: Mapping[str, float]) -> Any:
        """These steps of llama.cpp's default chain, in its order."""
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(sampled["top_k"]))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(sampled["top_p"], 1))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(sampled["temperature"]))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(0))
        return chain

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        self._sampler = None if sampled is None else self._chain(sampled)
        self._context = self._made(len(prompts), max(map(len, prompts)))
        memory = self._api.llama_get_memory(self._context)
        common = 0
        if len(prompts) == 1:
            held = self._held.get(self._context, [])
            (prompt,) = prompts
            while common < min(len(held), len(prompt) - 1) and held[common] == prompt[common]:
                common += 1
            self._api.llama_memory_seq_rm(memory, 0, common, -1)
            self._held[self._context] = list(prompt)
        else:
            self._api.llama_memory_clear(memory, False)
        self._lengths = [len(prompt) for prompt in prompts]
        self._last = [self._prompt(sequence, prompt, common) for sequence, prompt in enumerate(prompts)]
        return [[token] for token in self._last]

    def _prompt(self, sequence: int, prompt: Sequence[int], start: int) -> int:
        """Compute a prompt from that position on; returns the token after it."""
        size = self._api.llama_n_batch(self._context)
        for at in range(start, len(prompt), size):
            chunk = prompt[at : at + size]
            rows = [(token, at + i, sequence, at + i == len(prompt) - 1) for i, token in enumerate(chunk)]
            self._decode(rows)
        return self._drawn(-1)

    def step(self) -> list[list[int]]:
        rows = [(token, self._lengths[i], i, True) for i, token in enumerate(self._last)]
        self._decode(rows)
        self._lengths = [length + 1 for length in self._lengths]
        self._last = [self._drawn(row) for row in range(len(rows))]
        return [[token] for token in self._last]

    def close(self) -> None:
        pass

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute tokens: id, position, sequence, and whether its logits are wanted."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, pos, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        failed = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed} for {len(rows)} tokens")

    def _drawn(self, row: int) -> int:
        if self._sampler is not None:
            return int(self._api.llama_sampler_sample(self._sampler, self._context, row))
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())
