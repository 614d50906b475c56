"""embeddings: vectors of texts, by a model whose directory says how it pools hidden states
(`engine/models/weights/config_file.py`).

An embedding is a request that ends with its prompt: it shares steps, memory and adapters with all others, and where the
last token is pooled it begins with what the prefix cache has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from kvcellar.engine.card import EngineCard
from kvcellar.engine.request_options import HowOptions, SubmitOptions
from kvcellar.errors import BadRequest
from kvcellar.events import Pooling, PoolingMode
from kvcellar.frontend.request_builder import RequestBuilder
from kvcellar.frontend.text_codec import TextCodec
from kvcellar.sampling_params import SamplingParams

REFUSED = "model does not do embeddings"
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text, the tokens that were read for it, and how many of these came from memory."""

    vector: tuple[float, ...]
    tokens: int
    cached: int


class Embeddings:
    """Of one engine. May be used from any thread but the engine's."""

    def __init__(self, requests: RequestBuilder, card: EngineCard, codec: TextCodec) -> None:
        self._requests, self._card, self._codec = requests, card, codec
        self._pooling = card.pooling

    @property
    def refused(self) -> str | None:
        """Why the model does not embed; None: it does."""
        return self._pooling if isinstance(self._pooling, str) else None

    def of(
        self, inputs: Sequence[str | Sequence[int]], *, dimensions: int | None = None, **how: Unpack[HowOptions]
    ) -> list[Embedding]:
        """The embeddings of texts or token ids, in order. Blocks. `dimensions`: cut to so many, of a model that was
        trained for it. Raises `BadRequest`, `PromptTooLong`, `EngineClosed`, `EngineFailed`."""
        self.check(dimensions)
        options = SubmitOptions(pooling=self.mode, **how)
        if isinstance(inputs, str):
            raise BadRequest("embeddings are made of a list of texts, or of lists of token ids", "input")
        results = self._requests.results([self.tokens(one) for one in inputs], PARAMS, options)
        return [
            Embedding(self.vector(one.embedded.vector, dimensions), one.usage.prompt_tokens, one.usage.cached_tokens)
            for one in results
            if one.embedded is not None
        ]

    def check(self, dimensions: int | None = None) -> None:
        """Raise `BadRequest` if the model does not embed, or its vectors cannot be cut to so many dimensions."""
        sizes = self._checked().sizes
        if dimensions is None:
            return
        if sizes is not None and dimensions not in sizes:
            can = (
                f"it was trained for {sorted(sizes)}" if sizes else "its config does not declare Matryoshka dimensions"
            )
            raise BadRequest(f"dimensions cannot be {dimensions}: {can}. Leave dimensions out", "dimensions")
        if dimensions < 1:
            raise BadRequest(f"dimensions must be at least 1, not {dimensions}", "dimensions")

    @property
    def mode(self) -> PoolingMode:
        """The `pooling` of the requests of which each gives an embedding, with `PARAMS`. Raises `BadRequest`."""
        return self._checked().mode

    def _checked(self) -> Pooling:
        if isinstance(self._pooling, str):
            raise BadRequest(f"{REFUSED}: {self._pooling}", "model")
        return self._pooling

    def tokens(self, text: str | Sequence[int], *, truncate: bool = False) -> Sequence[int]:
        """The tokens of a text, with what the tokenizer puts around it; token ids as they are. `truncate`: a longer one
        is cut to the context, but not what was put behind it. Raises `BadRequest` and `PromptTooLong`."""
        most = self._card.model.context
        ids = self._codec.encode(text, limit=None if truncate else most) if isinstance(text, str) else text
        if len(ids) <= most or not truncate:
            return ids
        end = len(ids)
        while isinstance(text, str) and end and ids[end - 1] in self._codec.special_ids:
            end -= 1
        behind = ids[max(end, len(ids) - most + 1) :]
        return [*ids[: most - len(behind)], *behind]

    def vector(
        self, pooled: Sequence[float], dimensions: int | None = None, *, normalised: bool | None = None
    ) -> tuple[float, ...]:
        """The embedding of what an `Embedded` has, cut to `dimensions`. `normalised`: of length 1; None: as the model
        says, and where it was cut. Raises `BadRequest` for more dimensions than there are."""
        if dimensions is not None and dimensions > len(pooled):
            raise BadRequest(f"dimensions must be at most {len(pooled)}, not {dimensions}", "dimensions")
        found = tuple(pooled[:dimensions])
        unit = not isinstance(self._pooling, str) and self._pooling.normalised
        if not (unit or dimensions is not None if normalised is None else normalised):
            return found
        length = math.sqrt(math.fsum(value * value for value in found))
        return tuple(value / length for value in found) if length > 0 else found
