"""What transformers itself leaves unequal or unsupported, and docs/transformers.md: `python -m scripts.theirs`.

A tiny random model of every causal type plays a few checks with transformers alone: its forward, its caches, its
`generate`. Nothing of ours is in the way. Types that are named are printed, and nothing is written.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcellar.models.quiet import quiet
from scripts.theirs_page import Found, Row, render, unheard
from tests.zoo import ARCHS
from tests.zoo_test_support.sweep import NO_MODEL, of_type

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"
TYPES = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NO_MODEL)))
BOUND = 1e-4  # of a difference of logits, relative to max(1, max|logit|)
TEXTS = 3  # in all of them, before a difference is believed: a router's tie may fall either way, once
PROMPT = 24  # tokens, far beyond the windows and chunks of tiny models
NEW = 8  # tokens behind it
VOCAB = range(3, 101)  # without the tokens that mean padding, beginning and end
PADDING = 9
CACHES = ("past_key_values", "cache_params", "state", "mems")
# What a tiny model has to have in common with the released ones for its findings to be theirs, too.
RELEASED: Mapping[str, Mapping[str, Any]] = {"minimax": {"sliding_window": None}, "xlstm": {"hidden_size": 128}}
THEIRS = Path(inspect.getfile(transformers)).parent
STRANGE = (
    # What somebody else's code raises where it does not support what it is asked.
    RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, ImportError,
)  # fmt: skip


class Told(LogitsProcessor):
    """Says what `generate` goes on with: row by row the next token of a text, whatever the model would say."""

    def __init__(self, texts: Sequence[Tensor]) -> None:
        self.texts = torch.stack(list(texts))  # [B,L]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Drafts may reach beyond the texts; what is said there is never asked for."""
        at = min(input_ids.shape[1], self.texts.shape[1] - 1)
        return torch.full_like(scores, -inf).scatter(1, self.texts[:, at : at + 1], 0.0)


class Subject:
    """A model, the same text for every check, and what transformers says when it is asked in its plainest ways."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        draw = torch.Generator().manual_seed(seed)
        low, high = VOCAB.start, VOCAB.stop
        self.text, self.other = torch.randint(low, high, (2, PROMPT + NEW), generator=draw)  # [L] each
        # One that repeats itself, so that looking up what followed before proposes what is right and what is not.
        self.echo = self.text.clone()
        self.echo[10:16], self.echo[20:26], self.echo[28:] = self.text[2:8], self.text[2:8], self.text[4:8]
        accepts = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in CACHES if name in accepts), "past_key_values")

    def cold(self, text: Tensor) -> Tensor:
        """One forward over a text [L], without a cache -> logits [L,V]."""
        return self.model(input_ids=text[None], use_cache=False).logits[0].float()

    def read(self, tokens: Tensor, memory: object = None) -> tuple[Tensor, Any]:
        """A forward over more tokens [T], with the model's own cache -> logits [T,V] and that cache."""
        known = {} if memory is None else {self.cache_name: memory}
        out = self.model(input_ids=tokens[None], use_cache=True, **known)
        kept = next((out[name] for name in CACHES if out.get(name) is not None), memory)
        if kept is None:
            raise LookupError("its forward returns no cache that one could go on from")
        return out.logits[0].float(), kept

    def spoken(self, *texts: Tensor, padded: int = 0, prompt: int = PROMPT, **options: Any) -> tuple[Tensor, Any]:
        """`generate` told to go on as each text [L] does -> logits [B,N,V] of what it would have said, and its cache.

        The last of the texts has `padded` tokens on its left.
        """
        ids = torch.stack([text[:prompt] for text in texts])
        mask = torch.ones_like(ids)
        mask[-1, :padded] = 0
        options = {"max_new_tokens": len(texts[0]) - prompt, "do_sample": False, "use_cache": True} | options
        out = self.model.generate(
            ids,
            attention_mask=mask,
            logits_processor=[Told(texts)],
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        return torch.stack(out.logits, dim=1).float(), out.past_key_values

    @cached_property
    def plain(self) -> Tensor:
        """What `generate` says of the text with the cache it chooses -> logits [N,V]."""
        return self.spoken(self.text)[0][0]


def gap(seen: Tensor, right: Tensor) -> float:
    """The largest difference, relative to max(1, max|logit|); infinite where one is no number."""
    if not seen.isfinite().all():
        return inf
    return float((seen - right).abs().max() / max(1.0, float(right.abs().max())))


# -- the checks: how far is what was seen from what is right? Their docstrings stand on the page. ----------------------


def decoding(on: Subject) -> float:
    """`generate` with the cache that it chooses, and with none."""
    return gap(on.plain, on.spoken(on.text, use_cache=False)[0][0])


def asking(on: Subject) -> float:
    """`generate` without a cache, and one forward over the same tokens."""
    return gap(on.spoken(on.text, use_cache=False)[0][0], on.cold(on.text)[PROMPT - 1 : -1])


def token_by_token(on: Subject) -> float:
    """A prompt, then single tokens with the cache that came back, and one forward over all."""
    logits, memory = on.read(on.text[:PROMPT])
    said = [logits]
    for at in range(PROMPT, PROMPT + NEW):
        logits, memory = on.read(on.text[at : at + 1], memory)
        said.append(logits)
    return gap(torch.cat(said), on.cold(on.text))


def two_pieces(on: Subject) -> float:
    """A text in two forwards, the second with the cache of the first, and in one."""
    first, memory = on.read(on.text[:17])
    rest, _ = on.read(on.text[17:], memory)
    return gap(torch.cat([first, rest]), on.cold(on.text))


def prefill_chunks(on: Subject) -> float:
    """`generate(prefill_chunk_size=7)`, and without that."""
    return gap(on.spoken(on.text, prefill_chunk_size=7)[0][0], on.plain)


def turns(on: Subject) -> float:
    """`generate` with the cache that an earlier `generate` on the beginning gave back, and without."""
    _, memory = on.spoken(on.text[:12], prompt=8)
    return gap(on.spoken(on.text, **{on.cache_name: memory})[0][0], on.plain)


def company(on: Subject) -> float:
    """A forward over two texts of one length, and over each alone."""
    both = on.model(input_ids=torch.stack([on.text, on.other]), use_cache=False).logits.float()
    return max(gap(both[0], on.cold(on.text)), gap(both[1], on.cold(on.other)))


def padding(on: Subject) -> float:
    """`generate` for two texts, one padded on its left, and for each alone."""
    padded = torch.cat([torch.zeros(PADDING, dtype=torch.long), on.other[:-PADDING]])
    both, _ = on.spoken(on.text, padded, padded=PADDING)
    alone, _ = on.spoken(on.other[:-PADDING], prompt=PROMPT - PADDING)
    return max(gap(both[0], on.plain), gap(both[1], alone[0]))


def beams(on: Subject) -> float:
    """Three beams with a cache, and without."""
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    with_cache, without = (on.model.generate(on.text[None, :PROMPT], use_cache=use, **options) for use in (True, False))
    if not torch.equal(with_cache.sequences, without.sequences):
        return inf
    return gap(with_cache.sequences_scores, without.sequences_scores)


def lookup(on: Subject) -> float:
    """`generate(prompt_lookup_num_tokens=4)` on a text that repeats itself, and without."""
    return gap(on.spoken(on.echo, prompt_lookup_num_tokens=4)[0][0], on.spoken(on.echo)[0][0])


def crop(on: Subject) -> float:
    """Tokens read, cropped from the cache and others read, and one forward over what is left."""
    _, memory = on.read(on.text[:10])
    if not isinstance(memory, Cache):
        raise NotImplementedError("its memory is no Cache, and has no crop")
    if not memory.is_croppable:
        raise NotImplementedError("the cache says that it is not croppable")
    memory.activate_past_recording()
    _, memory = on.read(torch.cat([on.text[10:14], on.other[14:17]]), memory)
    memory.crop(-3)
    return gap(on.read(on.text[14:], memory)[0], on.cold(on.text)[14:])


def bare_cache(on: Subject) -> float:
    """A prompt and single tokens with a `DynamicCache()` that was given no config, and one forward over all."""
    first, memory = on.read(on.text[:PROMPT], DynamicCache())
    rest = [on.read(on.text[at : at + 1], memory)[0] for at in range(PROMPT, PROMPT + NEW)]
    return gap(torch.cat([first, *rest]), on.cold(on.text))


def static_cache(on: Subject) -> float:
    """`generate(cache_implementation="static")`, and with the cache that it chooses."""
    return gap(on.spoken(on.text, cache_implementation="static")[0][0], on.plain)


def beginning(on: Subject) -> float:
    """A forward over the first tokens, and one over all of them."""
    return gap(on.cold(on.text[:20]), on.cold(on.text)[:20])


def continuous(on: Subject) -> float:
    """`generate_batch` for two requests: how likely it says its tokens were, and a forward over them."""
    prompts = [on.text[:PROMPT].tolist(), on.other[:10].tolist()]
    answers = on.model.generate_batch(
        prompts,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64, return_logprobs=True
        ),
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        progress_bar=False,
        warmup=False,
    ).values()
    for answer in answers:
        if answer.error is not None:
            raise RuntimeError(answer.error)
    if len(answers) < len(prompts):
        raise RuntimeError(f"it answers {len(answers)} of {len(prompts)} prompts, and does not raise")
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        said = torch.tensor([*prompt, *answer.generated_tokens])
        right = on.cold(said)[len(prompt) - 1 : -1]
        likely = right.log_softmax(-1).gather(1, said[len(prompt) :, None])[:, 0]
        worst = max(worst, float((torch.tensor(answer.logprobs) - likely).abs().max() / right.abs().max().clamp(min=1)))
    return worst if worst <= BOUND else inf  # how far hangs on which requests a step happens to hold


CHECKS: Mapping[str, Callable[[Subject], float]] = {
    "a beginning": beginning,
    "generate with a cache": decoding,
    "generate without a cache": asking,
    "token by token": token_by_token,
    "two pieces": two_pieces,
    "prefill_chunk_size": prefill_chunks,
    "a second turn": turns,
    "a batch": company,
    "left padding": padding,
    "beams": beams,
    "prompt lookup": lookup,
    "crop": crop,
    "DynamicCache()": bare_cache,
    "static cache": static_cache,
    "generate_batch": continuous,  # last, because it changes how the model attends
}


@torch.no_grad()
def look(model_type: str) -> Row:
    """Build a tiny model of the type and play every check with it. Whatever its code raises is a finding."""
    known = [arch for arch in ARCHS.values() if arch.model_type == model_type]
    with quiet(), unheard():
        model = known[0].build(**RELEASED.get(model_type, {})) if known else of_type(model_type)
        subjects = [Subject(model, seed) for seed in range(TEXTS)]
        found = (_found(name, check, subjects) for name, check in CHECKS.items())
        return Row(model_type, tuple(filter(None, found)))


def _found(name: str, check: Callable[[Subject], float], subjects: Sequence[Subject]) -> Found | None:
    gaps: list[float] = []
    for subject in subjects:
        try:
            gaps.append(check(subject))
        except STRANGE as error:
            return _raised(name, error)
        if gaps[-1] <= BOUND:
            return None
    return Found(name, max(gaps))


def _raised(name: str, error: Exception) -> Found:
    """With the innermost function of transformers that it came through."""
    where = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(THEIRS):
            where = f"{path.relative_to(THEIRS).as_posix()}, {frame.f_code.co_qualname}"
    return Found(name, None, f"{type(error).__name__}: {' '.join(str(error).split())}", where)


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    rows: list[Row] = []
    for number, model_type in enumerate(names or TYPES, start=1):
        try:
            rows.append(look(model_type))
        except STRANGE as error:
            rows.append(Row(model_type, (_raised("building it", error),)))
        print(f"{number}/{len(names or TYPES)} {model_type}", file=sys.stderr, flush=True)
        for found in rows[-1].found:
            print(f"{model_type}: {found}", flush=True)
    print(f"{sum(not row.found for row in rows)} of {len(rows)} types are equal in all {len(CHECKS)} checks")
    if not names:
        PAGE.write_text(render(rows, {name: check.__doc__ or "" for name, check in CHECKS.items()}, BOUND, TEXTS))
        print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
