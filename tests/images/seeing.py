"""Whole engines on tiny networks that see, and the tokens of the network's own forward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.load import open_vision
from kvcellar.engine.messages import Submission
from kvcellar.engine.models.vision import TYPES
from kvcellar.frontend.output_processor import OutputProcessor
from kvcellar.frontend.result import Collector
from kvcellar.images.image import ImageInput, with_rows
from kvcellar.memory.prefix.node import key_of
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.output import Output, Stops
from tests.zoo_test_support.images import (
    CROSSED,
    END,
    IN_FRONT,
    PLACEHOLDER,
    START,
    WHOLE,
    drawn,
    image_input,
    inputs_of,
    network_of,
    processor_of,
    seen_by,
)

LENGTH = 5  # tokens that are drawn
NEVER = {PLACEHOLDER: -100.0}  # a network's own forward fails where it is not of an image


@dataclass(frozen=True, slots=True)
class Pictures:
    """A network and what its processor makes of two images."""

    model: PreTrainedModel
    one: ImageInput
    two: ImageInput

    @property
    def in_front(self) -> bool:
        """An image is in front of a text, without tokens: its own forward takes no others."""
        return self.model.config.model_type in IN_FRONT

    @property
    def whole(self) -> bool:
        return self.model.config.model_type in WHOLE

    def ids(self, parts: Sequence[list[int] | ImageInput]) -> list[int]:
        """As the network gets them."""
        wrapped = hasattr(self.model.config, "vision_start_token_id")
        start, end = ([START], [END]) if wrapped else ([], [])
        images = [part if isinstance(part, list) else [*start, *[PLACEHOLDER] * part.rows, *end] for part in parts]
        return [token for part in images for token in part]

    def prompt(self, *parts: list[int] | ImageInput) -> list[int]:
        return with_rows(self.ids(parts), PLACEHOLDER, images_in(parts))

    def logits(self, parts: Sequence[list[int] | ImageInput], *drawn_ids: int) -> torch.Tensor:
        """[T,V] of the network's own forward over these parts and tokens that were drawn behind: without a cache, or
        for a forward that lets all tokens in front of the first image see it, with these in its cache."""
        inputs, names = self._inputs(images_in(parts)), signature(self.model.forward).parameters
        inputs = {name: one.to(self.model.dtype) if one.is_floating_point() else one for name, one in inputs.items()}
        ids = [token for token in self.ids(parts) if token != PLACEHOLDER or not self.in_front]
        ids, cached, before = [*ids, *drawn_ids], dict[str, Any](), list[torch.Tensor]()
        text, seen = torch.tensor([ids]), seen_by(self.model, ids, inputs)
        first = ids.index(PLACEHOLDER) if "cross_attention_mask" in seen else 0
        types = (text == PLACEHOLDER).long()
        if self.whole:
            types = (torch.arange(text.shape[1]) >= text.shape[1] - len(drawn_ids)).long()[None]
        given: Mapping[str, Any] = {
            "input_ids": text[:, first:],
            "attention_mask": torch.ones_like(text),
            **dict.fromkeys(TYPES, types),
            **({name: one[:, first:] for name, one in seen.items()} if first else seen),
            **inputs,
        }
        with torch.inference_mode():
            if first:
                made = self.model(input_ids=text[:, :first], use_cache=True)
                before, cached = [made.logits], {"past_key_values": made.past_key_values}
            accepted = {name: one for name, one in given.items() if name in names}
            found = self.model(**accepted, **cached, use_cache=bool(cached))
        logits = torch.cat([*before, found.logits], 1)[0].float().clone()
        logits[:, PLACEHOLDER] = float("-inf")
        return logits

    def _inputs(self, images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
        """Also of a text without images where the own forward needs one: its features have no place in that text, or it
        has no features."""
        names = signature(self.model.forward).parameters
        if images or "pixel_values" not in names:
            return inputs_of(images, 1 if names.keys() & CROSSED else 0)
        if "image_embeds" in names:
            return {"image_embeds": torch.zeros(1, 0, self.model.config.get_text_config().hidden_size)}
        return inputs_of([self.one] if names["pixel_values"].default is Parameter.empty else [])

    def greedy(self, *parts: list[int] | ImageInput) -> list[int]:
        """Of the network's own forward, without a cache."""
        drawn_ids = list[int]()
        for _ in range(LENGTH):
            drawn_ids.append(int(self.logits(parts, *drawn_ids)[-1].argmax()))
        return drawn_ids

    def lacks(self, drawn_ids: Sequence[int], *parts: list[int] | ImageInput) -> float:
        """By how much at most the logit of a drawn token is below the highest one of its row."""
        rows = self.logits(parts, *drawn_ids)[-1 - len(drawn_ids) : -1]
        return float((rows.amax(-1) - rows[torch.arange(len(rows)), torch.tensor(drawn_ids)]).max())


def images_in(parts: Sequence[list[int] | ImageInput]) -> list[ImageInput]:
    return [part for part in parts if isinstance(part, ImageInput)]


def pictures_of(model_type: str, dtype: torch.dtype = torch.float32) -> Pictures:
    model = network_of(model_type, dtype)
    processor = processor_of(model.config)
    return Pictures(model, *(image_input(model, processor, drawn(seed)) for seed in (1, 2)))


@contextmanager
def engine_of(pictures: Pictures, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Engine]:
    """Of a saved network. The self-test gets the first image."""
    pictures.model.save_pretrained(folder)
    sample = pictures.ids([pictures.one]), pictures.one
    patch.setattr(open_vision, "sample_of", lambda *_: sample)
    common = {"cache_bytes": 200_000_000, "context": 2048, "record": "off"}
    with Engine(folder, **common | settings) as engine:
        yield engine


def asked(engine: Engine, pictures: Pictures, *parts: list[int] | ImageInput, **options: Any) -> Collector:
    return submitted(engine, pictures.prompt(*parts), images_in(parts), **options)


def submitted(
    engine: Engine,
    prompt: list[int],
    images: Sequence[ImageInput],
    n: int = 1,
    *,
    adapter: str | None = None,
    namespace: str = "",
    **options: Any,
) -> Collector:
    usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "logprobs": 1}
    params = SamplingParams(n=n, ignore_eos=True, logit_bias=NEVER, **usual | options)
    client, collector = engine._requests.client, Collector(n)
    number = client.number()
    submission = Submission(
        number=number,
        prompt=key_of(prompt),
        params=params,
        seed=1,
        images=tuple(images),
        adapter=adapter,
        namespace=namespace,
    )
    output = OutputProcessor(
        params,
        lambda: Output(None, Stops(())),
        collector.deliver,
        stop=partial(client.stop, number),
        fail=partial(client.fail, number),
        replied=None,
    )
    client.submit(submission, output.receive)
    return collector
