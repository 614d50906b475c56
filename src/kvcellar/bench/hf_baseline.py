"""hf_baseline: networks of transformers, and `generate` with its `DynamicCache`: the baseline of the bench."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvcellar.bench.peers.turns import Turns
from kvcellar.memory.prefix.node import common_prefix


class _StepStreamer:
    """A streamer for `generate`: calls `step` with the new token [B] of each step, not with the prompt."""

    def __init__(self, step: Callable[[Tensor], None]) -> None:
        self._step = step
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self._step(value)
        self._prompt_seen = True

    def end(self) -> None:
        pass


def network(config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A network with random weights, the same for each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new: int,
    step: Callable[[Tensor], None] | None = None,
    cache: DynamicCache | None = None,
    sampled: Mapping[str, float] | None = None,
) -> Tensor:
    """`model.generate` with its dynamic cache: `new` tokens after each prompt, padded on the left, greedy ones unless
    they are `sampled`.

    `step` is called with the tokens [B] when every sequence has got one. `cache` has the beginning of a single prompt.
    Returns ids [B,longest+new].
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": sampled is not None, **(sampled or {}), "pad_token_id": 0}
    options |= {"max_new_tokens": new, "min_new_tokens": new}
    if step is not None:
        options["streamer"] = _StepStreamer(step)
    if cache is not None:
        options["past_key_values"] = cache
    return model.generate(ids, attention_mask=mask, **options)  # pyright: ignore[reportCallIssue, reportReturnType]


class _Stopped(Exception):
    """Ends `generate` from its streamer."""


class Generating:
    """`generate` on a thread of its own, step by step. Where the cache of a single prompt stays, the next single prompt
    begins with what both have in common, if the layers can be cropped."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Those of `peers/serve.py`. The cache of a single prompt stays if it `reuses`; else `generate` makes each."""
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype="auto").eval().requires_grad_(False)
        self._most, self._keeps = options["new"], options["reuses"]
        self.flags = f"attention {self._model.config._attn_implementation}"
        self._cache, self._held = DynamicCache(config=self._model.config), list[int]()
        self._thread: threading.Thread | None = None
        self._turns = Turns(0)

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        """Compute the prompts; returns the first token of each."""
        self._turns = Turns(len(prompts))
        cache = self._kept(prompts[0]) if self._keeps and len(prompts) == 1 else None
        self._thread = threading.Thread(target=self._run, args=(prompts, cache, sampled, self._turns))
        self._thread.start()
        return self._turns.first()

    def step(self) -> list[list[int]]:
        return self._turns.step()

    def close(self) -> None:
        assert self._thread is not None
        self._turns.end()
        self._thread.join()

    def _kept(self, prompt: Sequence[int]) -> DynamicCache:
        common = min(common_prefix(self._held, list(prompt)), len(prompt) - 1)
        in_cache = self._cache.get_seq_length()
        if not common or not cropped(self._cache, in_cache - common):
            self._cache = DynamicCache(config=self._model.config)
        self._held = list(prompt)
        return self._cache

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        cache: DynamicCache | None,
        sampled: Mapping[str, float] | None,
        turns: Turns,
    ) -> None:
        def step(tokens: Tensor) -> None:
            for number, token in enumerate(tokens.tolist()):
                turns.on_tokens(number, [token])
            if turns.ended:
                raise _Stopped

        try:
            with torch.inference_mode():
                generate(self._model, prompts, self._most, step, cache, sampled)
        except _Stopped:
            pass
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            turns.fail(error)


def cropped(cache: DynamicCache, tokens: int) -> bool:
    """Remove the last tokens. False where a layer refuses: the cache is then of no use."""
    if tokens:
        try:
            cache.crop(-tokens)
        except RuntimeError:  # a window that has moved on, or a recurrent state
            return False
    return True
