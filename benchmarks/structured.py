"""structured: what masks of constrained answers cost beside a decode step, in one run.

The network has the sizes of the others here and a vocabulary of 128 thousand, of bytes and made-up words. Masks are
those of texts that match a schema, with tokens drawn at random from the allowed ones; their time is that of a draw
beyond one without masks, and of `accept`: all that a constraint adds to a step.
Both are CPU time, measured in turn: of a step that of its thread, of masks that of all threads, as others compute them.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.decoding import decode
from benchmarks.interleave import in_rounds
from benchmarks.row import Given, Lines
from kvcellar.bench.network import SMALL, TINY, Size, write
from kvcellar.constraint import Constraint
from kvcellar.engine.sample.draw import Draws, edit
from kvcellar.engine.sample.matcher import Matcher
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.frontend.engine import Engine
from kvcellar.sampling_params import SamplingParams

CACHE_BYTES = 1 << 30
MAX_SHARE = 0.05  # of a step, for each token
SECONDS = 10.0  # that a mask may take
END = "<|end|>"
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 1, "maxLength": 60},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "country": {"enum": ["DE", "FR", "IT", "JP", "US"]},
    },
    "required": ["street", "zip", "country"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 40}, "address": {"$ref": "#/$defs/address"}},
            "required": ["name", "address"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 200},
                    "count": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
                },
                "required": ["text", "count", "price"],
                "additionalProperties": False,
            },
            "maxItems": 20,
        },
        "note": {"type": "string"},
    },
    "required": ["id", "customer", "lines"],
    "additionalProperties": False,
    "$defs": {"address": ADDRESS},
}


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of what is measured."""

    size: Size = SMALL
    sequences: tuple[int, ...] = (1, 8)
    prompt: int = 64
    steps: int = 16  # of a burst
    rounds: int = 7


SMALLEST = Extent(TINY, sequences=(2,), prompt=16, steps=3, rounds=1)  # to test the bench


class Found(NamedTuple):
    """Medians of CPU time, and of the ratio in each turn."""

    compile_ms: float  # the schema, with the tokenizer read already
    step_ms: float
    mask_ms: float  # of all sequences of a step
    share: float  # masks over steps


def structured(extent: Extent, directory: Path) -> dict[int, Found]:
    """By sequences in a step."""
    write(extent.size, directory)
    write_tokenizer(extent.size.vocabulary, directory)
    found: dict[int, Found] = {}
    with Engine(directory, cache_bytes=CACHE_BYTES, threads=1, draft="none", context=1024) as engine:
        grammars, draws = engine._built.intake.grammars, engine._built.guest.draws  # pyright: ignore[reportPrivateUsage]
        grammars.matcher(Constraint.json_object())  # reads the tokenizer
        began = time.thread_time()
        matcher = grammars.matcher(Constraint.json_schema(ORDER))
        compiled = time.thread_time() - began
        for sequences in extent.sequences:
            draw = random.Random(0)
            prompts = [[draw.randrange(256) for _ in range(extent.prompt)] for _ in range(sequences)]
            texts = [_Text(matcher, extent.size.vocabulary, number) for number in range(sequences)]
            steps, masks = in_rounds(
                extent.rounds,
                lambda prompts=prompts: _per_step(engine, prompts, extent.steps),
                lambda texts=texts: _masks(draws, texts, extent),
            )
            shares = [mask / step for step, mask in zip(steps, masks, strict=True)]
            of_step, of_masks = 1e3 * statistics.median(steps), 1e3 * statistics.median(masks)
            found[sequences] = Found(1e3 * compiled, of_step, of_masks, statistics.median(shares))
    return found


class _Text:
    """A text that is written at random, and begun again where it is complete."""

    def __init__(self, start: Matcher, vocabulary: int, seed: int) -> None:
        self._start, self._vocabulary, self._random = start, vocabulary, random.Random(seed)
        self.sampler = self._begun()

    def _begun(self) -> Sampler:
        params = replace(GREEDY, constraint=Constraint.json_schema(ORDER))
        return Sampler(
            params,
            seed=0,
            index=0,
            prompt_ids=(),
            vocab_size=self._vocabulary,
            end_ids=frozenset({self._vocabulary - 1}),
            matcher=self._start.copy(),
        )

    def next(self, scores: torch.Tensor) -> int:
        """One of the tokens whose scores [V] are finite."""
        allowed = scores.isfinite().nonzero()[:, 0]
        return int(allowed[self._random.randrange(len(allowed))])

    def follow(self, token: int) -> None:
        if self.sampler.ends_with(token):
            self.sampler = self._begun()
            return
        self.sampler.accept(token)
        if (matcher := self.sampler.matcher) is not None:
            matcher.wait(SECONDS)


def _per_step(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> float:
    burst = decode(engine, prompts, steps)
    return burst.seconds / burst.steps


def _masks(draws: Draws, texts: Sequence[_Text], extent: Extent) -> float:
    """CPU seconds per step of what constraints add to it."""
    spent = 0.0
    logits = torch.zeros(len(texts), extent.size.vocabulary)
    plain = Sampler(GREEDY, seed=0, index=0, prompt_ids=(), vocab_size=extent.size.vocabulary, end_ids=frozenset())
    for _ in range(extent.steps):
        samplers = [text.sampler for text in texts]
        clock = [time.process_time()]
        for each in ([plain] * len(texts), samplers):
            draws.draw(logits, each, [0] * len(each))
            clock.append(time.process_time())
        spent += (clock[2] - clock[1]) - (clock[1] - clock[0])
        drawn = [text.next(row) for text, row in zip(texts, edit(logits, samplers), strict=True)]
        began = time.process_time()
        for text, token in zip(texts, drawn, strict=True):
            text.follow(token)
        spent += time.process_time() - began
    return spent / extent.steps


def write_tokenizer(vocabulary: int, directory: Path) -> None:
    """A byte-level tokenizer with the last id as the end of text, and the network's config with that end."""
    tokens = [*pre_tokenizers.ByteLevel.alphabet()][: vocabulary - 1]
    tokens = sorted(tokens) + list(_words(vocabulary - 1 - len(tokens)))
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    made.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": vocabulary - 1}))


def _words(count: int) -> Iterator[str]:
    """So many different ones: numbers, punctuation, and words of one to four syllables, with and without a space and a
    capital before them."""
    made = dict.fromkeys(
        (*map(str, range(10, 1000)), *("".join(pair) for pair in product('"{}[],:._-/\\', repeat=2)), "Ġ" * 4, "ĊĠĠ")
    )
    draw = random.Random(0)
    syllables = ["".join(one) for one in product("bcdfgklmnprstvw", "aeiou", ("", "n", "r", "s"))]
    while len(made) < count:
        word = "".join(draw.choices(syllables, k=draw.randrange(1, 5)))
        made[draw.choice(("", "Ġ")) + (word.capitalize() if draw.random() < 0.2 else word)] = None
    yield from list(made)[:count]


def row(given: Given) -> Lines:
    found = structured(SMALLEST if given.quick else Extent(), given.directory)
    for sequences, one in found.items():
        of_token = one.share / sequences
        met = "ok" if of_token <= MAX_SHARE else f"over the aim of {MAX_SHARE:.0%}"
        yield (
            f"{sequences} sequences: step {one.step_ms:.2f} ms, masks {one.mask_ms:.3f} ms: {one.share:.1%} of it, "
            f"{of_token:.1%} for each token: {met}; the schema was compiled in {one.compile_ms:.1f} ms"
        )
    return {str(sequences): one._asdict() for sequences, one in found.items()}
