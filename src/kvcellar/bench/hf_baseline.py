"""hf_baseline: `generate`, `generate_batch` and `DynamicCache` of transformers, the baselines of the bench."""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvcellar.bench.peers.turns import Turns
from kvcellar.prefix.node import common_prefix

PAGE = 256  # tokens per page in continuous batching
STEP_TOKENS = 512  # most tokens of one of its steps
SPARE = 0.2  # of the pages: it starts no sequence while fewer than 15 % are free


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


def write_network(config: Mapping[str, Any], dtype: torch.dtype, directory: Path) -> int:
    """Write a model directory of `network`. Returns the number of parameters."""
    made = network(config, dtype)
    made.save_pretrained(directory)
    return made.num_parameters()


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new: int,
    step: Callable[[Tensor], None] | None = None,
    cache: DynamicCache | None = None,
) -> Tensor:
    """`model.generate` with its dynamic cache: `new` greedy tokens after each prompt, padded on the left.

    `step` is called with the tokens [B] when every sequence has got one. `cache` has the beginning of a single prompt.
    Returns ids [B,longest+new].
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    if step is not None:
        options["streamer"] = _StepStreamer(step)
    if cache is not None:
        options["past_key_values"] = cache
    return model.generate(ids, attention_mask=mask, **options)  # pyright: ignore[reportCallIssue, reportReturnType]


def generate_batch(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> list[float]:
    """Continuous batching: seconds of each step in which every sequence got a token.

    The number of pages is set to what the prompts need plus those it keeps free; by default it allocates most of the
    machine's memory. Raises `RuntimeError` if it fails, or never serves all prompts at once.
    """
    pages = ceil(sum((len(prompt) + new) // PAGE + 2 for prompt in prompts) / (1 - SPARE))
    outputs = model.generate_batch(  # pyright: ignore[reportCallIssue]
        [list(prompt) for prompt in prompts],
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages, max_batch_tokens=STEP_TOKENS
        ),
        max_new_tokens=new,
        record_timestamps=True,
        warmup=False,
    ).values()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(output.error)
    if len(outputs) != len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} prompts were completed")
    # From the first token of the last sequence to the end of the first one, every step serves all sequences.
    start, end = max(output.timestamps[0] for output in outputs), min(output.timestamps[-1] for output in outputs)
    last = max(outputs, key=lambda output: output.timestamps[0]).timestamps
    seconds = [b - a for a, b in pairwise(last) if start <= a and b <= end]
    if not seconds:
        raise RuntimeError("no step gave a token to every sequence")
    return seconds


class _Stopped(Exception):
    """Ends `generate` from its streamer."""


class Generating:
    """`generate` on a thread of its own, step by step. Where the cache of a single prompt stays, the next single prompt
    begins with what both have in common, if the layers can be cropped."""

    def __init__(self, directory: str, most: int, *, keeps: bool) -> None:
        """`most` tokens may be decoded after a prompt. `keeps`: the cache of a single prompt stays; else `generate`
        makes each."""
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval().requires_grad_(False)
        self._most, self._keeps = most, keeps
        self._cache, self._held = DynamicCache(config=self._model.config), list[int]()
        self._thread: threading.Thread | None = None
        self.turns = Turns(0)

    def start(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Compute the prompts; returns the first token of each."""
        self.turns = Turns(len(prompts))
        cache = self._kept(prompts[0]) if self._keeps and len(prompts) == 1 else None
        self._thread = threading.Thread(target=self._run, args=(prompts, cache, self.turns))
        self._thread.start()
        return self.turns.first()

    def stop(self) -> None:
        assert self._thread is not None
        self.turns.end()
        self._thread.join()

    def _kept(self, prompt: Sequence[int]) -> DynamicCache:
        common = min(common_prefix(self._held, list(prompt)), len(prompt) - 1)
        in_cache = self._cache.get_seq_length()
        if not common or not _cropped(self._cache, in_cache - common):
            self._cache = DynamicCache(config=self._model.config)
        self._held = list(prompt)
        return self._cache

    def _run(self, prompts: Sequence[Sequence[int]], cache: DynamicCache | None, turns: Turns) -> None:
        def step(tokens: Tensor) -> None:
            for number, token in enumerate(tokens.tolist()):
                turns.on_tokens(number, [token])
            if turns.ended:
                raise _Stopped

        try:
            with torch.inference_mode():
                generate(self._model, prompts, self._most, step, cache)
        except _Stopped:
            pass
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            turns.fail(error)


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
        if cache is None or not _cropped(cache, len(tokens) - common):
            cache, common = DynamicCache(config=self._config), 0
        text = [*prompt, *answer[:-1]]
        for new in (len(prompt) - common, len(text) - len(prompt)):
            if new:
                _compute(cache, new)
        assert cache.get_seq_length() in (len(text), 0), "0: the first layer is recurrent"
        self._kept[conversation] = cache, text
        return len(prompt) - common

    def tokens(self, conversation: int) -> list[int]:
        """What the cache of a conversation has."""
        return self._kept[conversation][1] if conversation in self._kept else []


def _cropped(cache: DynamicCache, tokens: int) -> bool:
    """Remove the last tokens. False where a layer refuses: the cache is then of no use."""
    if tokens:
        try:
            cache.crop(-tokens)
        except RuntimeError:  # a window that has moved on, or a recurrent state
            return False
    return True


def _compute(cache: DynamicCache, new: int) -> None:
    for index, kind in enumerate(cache.layers):
        if isinstance(kind, LinearAttentionLayer):
            cache.update_conv_state(torch.zeros(1, 1, max(4, new)), index)
            cache.update_recurrent_state(torch.zeros(1, 1, 1, 1), index)
        else:
            cache.update(torch.zeros(1, 1, new, 1), torch.zeros(1, 1, new, 1), index)
