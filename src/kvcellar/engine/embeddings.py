"""embeddings: vectors of texts, by a model whose directory says how it pools hidden states (`models/pooling.py`).

An embedding is a request that ends with its prompt: it shares steps, memory and adapters with all others, and where the
last token is pooled it begins with what the prefix cache has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Unpack

from kvcellar.engine.batches import together
from kvcellar.engine.card import ModelCard
from kvcellar.engine.client import EngineClient
from kvcellar.engine.request import HowOptions, SubmitOptions
from kvcellar.engine.result import Collector, Ticket
from kvcellar.engine.text_codec import TextCodec
from kvcellar.errors import BadRequest, EngineClosed
from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams

REFUSED = "model does not do embeddings"
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class Host(Protocol):
    """What it uses of the engine."""

    @property
    def model(self) -> ModelCard: ...
    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]: ...
    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket: ...


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text, the tokens that were read for it, and how many of these came from memory."""

    vector: tuple[float, ...]
    tokens: int
    cached: int


class Embeddings:
    """Of one engine. May be used from any thread but the engine's."""

    def __init__(self, engine: Callable[[], Host | None], client: EngineClient, codec: TextCodec) -> None:
        """`engine` is a weak reference, because an engine that nothing refers to is closed at once."""
        self._find, self._client, self._codec = engine, client, codec
        self._pooling = client.card.pooling

    @property
    def _engine(self) -> Host:
        if (engine := self._find()) is None:
            raise EngineClosed("the engine is closed; open a new one")
        return engine

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
        self._client.check_caller()
        if isinstance(inputs, str):
            raise BadRequest("embeddings are made of a list of texts, or of lists of token ids", "input")
        collectors: list[Collector] = []

        def start(ids: Sequence[int]) -> tuple[Collector, Ticket]:
            collector = Collector(1)
            ticket = self.submit(ids, deliver=collector.deliver, **how)
            collectors.append(collector)
            return collector, ticket

        starts = [partial(start, self.tokens(one)) for one in inputs]
        results = together(starts, self._client.card.max_waiting)
        found = zip((one.embedded for one in collectors), results, strict=True)
        return [
            Embedding(self.vector(event.vector, dimensions), one.usage.prompt_tokens, one.usage.cached_tokens)
            for event, one in found
            if event is not None
        ]

    def check(self, dimensions: int | None = None) -> None:
        """Raise `BadRequest` if the model does not embed, or its vectors cannot be cut to so many dimensions."""
        pooling = self._pooling
        if isinstance(pooling, str):
            raise BadRequest(f"{REFUSED}: {pooling}", "model")
        if dimensions is None:
            return
        sizes = pooling.sizes
        if sizes is not None and dimensions not in sizes:
            can = (
                f"it was trained for {sorted(sizes)}" if sizes else "its config does not declare Matryoshka dimensions"
            )
            raise BadRequest(f"dimensions cannot be {dimensions}: {can}. Leave dimensions out", "dimensions")
        if dimensions < 1:
            raise BadRequest(f"dimensions must be at least 1, not {dimensions}", "dimensions")

    def tokens(self, text: str | Sequence[int], *, truncate: bool = False) -> Sequence[int]:
        """The tokens of a text, with what the tokenizer puts around it; token ids as they are. `truncate`: a longer one
        is cut to the context, but not what was put behind it. Raises `BadRequest` and `PromptTooLong`."""
        most = self._engine.model.context
        ids = self._engine.encode(text, limit=None if truncate else most) if isinstance(text, str) else text
        if len(ids) <= most or not truncate:
            return ids
        end = len(ids)
        while isinstance(text, str) and end and ids[end - 1] in self._codec.special_ids:
            end -= 1
        behind = ids[max(end, len(ids) - most + 1) :]
        return [*ids[: most - len(behind)], *behind]

    def submit(
        self,
        ids: Sequence[int],
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        """As `Engine.submit`: one `Embedded`, then `Finished` and `Done`."""
        self.check()
        assert not isinstance(self._pooling, str)
        how["pooling"] = self._pooling.mode
        return self._engine.submit(ids, PARAMS, deliver=deliver, **how)

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
