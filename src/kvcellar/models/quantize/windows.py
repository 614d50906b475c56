"""windows: token sequences to calibrate on and to measure with: samples of the model itself, or a given text.

The same model gives the same windows on one machine: the seed is fixed, and the caller's random state is restored.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvcellar.errors import BadRequest
from kvcellar.models.build_guest import MODEL_ERRORS
from kvcellar.models.input_limits import context_of, random_tokens
from kvcellar.models.load import Loaded

SHORTEST = 16  # tokens of a window


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids [n,L], and where they are from."""

    ids: Tensor
    source: str


def sampled(model: PreTrainedModel, count: int, length: int, *, seed: int) -> Windows:
    """Windows that the model samples at temperature 1, each after a random token. Where transformers cannot generate
    with it, all tokens are random."""
    length = min(length, context_of(model))
    draw = torch.Generator().manual_seed(seed)
    first = torch.tensor([random_tokens(model, 1, draw) for _ in range(count)])
    if length > 1:
        before = model.generation_config
        model.generation_config = GenerationConfig()  # that of the directory may limit what is sampled
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode():
                torch.manual_seed(seed)
                own = GenerationConfig(
                    do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1, pad_token_id=0
                )
                generate: Any = model.generate
                ids = generate(
                    first.to(model.device),
                    generation_config=own,
                    attention_mask=torch.ones_like(first).to(model.device),
                )
            if isinstance(ids, Tensor) and ids.shape == (count, length):
                return Windows(ids.cpu(), "sampled from the model")
        except MODEL_ERRORS:  # reported by the source of the windows
            pass
        finally:
            model.generation_config = before
    ids = torch.tensor([random_tokens(model, length, draw) for _ in range(count)])
    return Windows(ids, "random tokens, since transformers cannot sample from the model")


def of_text(loaded: Loaded, text: str, count: int, length: int) -> Windows:
    """The first tokens of a text, as at most so many windows of at most so many tokens. Raises `BadRequest`."""
    if loaded.text is None:
        raise BadRequest(f"a text cannot be used: {loaded.without_text}. Leave it out to sample from the model")
    ids = loaded.text.tokenizer.encode(text, add_special_tokens=False).ids[: count * length]
    length = min(length, context_of(loaded.model), len(ids))
    if length < SHORTEST:
        raise BadRequest(f"the text has {len(ids)} tokens; at least {SHORTEST} are needed")
    whole = len(ids) // length * length
    return Windows(torch.tensor(ids[:whole]).view(-1, length), "the given text")
