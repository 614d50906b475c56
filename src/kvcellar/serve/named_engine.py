"""named_engine: an engine under the name of one model that it serves, with what that model has of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

from kvcellar.engine.cache_client import CacheClient
from kvcellar.engine.card import ModelCard
from kvcellar.engine.conversations import Conversations
from kvcellar.engine.embeddings import Embeddings
from kvcellar.engine.request import SubmitOptions
from kvcellar.engine.result import Ticket
from kvcellar.engine.served_engine import ServedEngine
from kvcellar.engine.stats import EngineStats
from kvcellar.engine.variants import Variant
from kvcellar.events import Event
from kvcellar.sample.params import SamplingParams


class NamedEngine:
    """A `ServedEngine`. `adapter` is that of requests which name none."""

    def __init__(self, engine: ServedEngine, name: str, conversations: Conversations, variant: Variant) -> None:
        self._engine = engine
        self.adapter, self.render, self.replies = variant.adapter, variant.render, variant.replies
        own = {"default_sampling": variant.default_sampling, "chat_template": variant.template}
        self.model: ModelCard = replace(engine.model, name=name, has_chat=variant.template is not None, **own)
        self.conversations = conversations

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def starting(self) -> bool:
        return self._engine.starting

    @property
    def cache_bytes(self) -> int:
        return self._engine.cache_bytes

    @property
    def cache(self) -> CacheClient:
        return self._engine.cache

    @property
    def embeddings(self) -> Embeddings:
        """Those of all models of the engine."""
        return self._engine.embeddings

    @property
    def last_stats(self) -> EngineStats:
        return self._engine.last_stats

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def encode(self, text: str, *, special: bool | None = None, limit: int | None = None) -> list[int]:
        return self._engine.encode(text, special=special, limit=limit)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._engine.decode(ids, special=special)

    def token_bytes(self, token: int) -> bytes:
        return self._engine.token_bytes(token)

    def written(self, token: int) -> str:
        return self._engine.written(token)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        deliver: Callable[[Event], None],
        **how: Unpack[SubmitOptions],
    ) -> Ticket:
        if how.get("adapter") is None:
            how["adapter"] = self.adapter
        return self._engine.submit(prompt_ids, params, deliver=deliver, **how)
