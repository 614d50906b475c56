"""hf_baseline: `generate` and `generate_batch` of transformers, with which the bench compares ours."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, PreTrainedModel

PAGE = 256  # tokens of a page of its continuous batching
STEP_TOKENS = 512  # most tokens of a step of it
SPARE = 0.2  # of its pages: it begins no sequence while fewer than 15 % are free


class _StepStreamer:
    """A streamer for `generate`: calls `step` for each new token, not for the prompt."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self._step()
        self._prompt_seen = True

    def end(self) -> None:
        pass


def network(config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A random network of this config, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, step: Callable[[], None] | None = None
) -> Tensor:
    """`model.generate` with its dynamic cache: `new` greedy tokens behind each prompt, padded on the left.

    `step` is called when a token of every sequence has been drawn. Returns ids [B,longest+new].
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
    return model.generate(ids, attention_mask=mask, **options)  # pyright: ignore[reportCallIssue, reportReturnType]


def generate_batch(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> list[float]:
    """Its continuous batching: seconds of each step in which every sequence got a token.

    It gets as many pages as the prompts need plus those it keeps free; by default it would allocate most of the
    machine's memory. Raises `RuntimeError` if it does not run here, or never serves all of them at once.
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
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} prompts were answered")
    # From the moment that the last sequence has begun until the first one is done, every step serves all of them.
    start, end = max(output.timestamps[0] for output in outputs), min(output.timestamps[-1] for output in outputs)
    last = max(outputs, key=lambda output: output.timestamps[0]).timestamps
    seconds = [b - a for a, b in pairwise(last) if start <= a and b <= end]
    if not seconds:
        raise RuntimeError("no step of it gave a token to every sequence")
    return seconds
