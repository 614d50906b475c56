"""Every route that has a body, with one that is served; and a tiny engine that serves all of them: it writes texts,
chats and calls of tools, and embeds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvcellar import Engine
from tests.engine.embedding_models import END, saved
from tests.text.templates import THINKER

CONTEXT = 2048
USER = {"role": "user", "content": "hello"}
CONVERSATIONS = "/kvcellar/conversations"


def tiny_engine(folder: Path, name: str = "llama", **settings: Any) -> Engine:
    """A random network of the zoo with a tokenizer, a chat template that has tools, and pooling."""
    saved(folder, name, max_position_embeddings=CONTEXT)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": THINKER}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    how: dict[str, Any] = {"threads": 1, "cache_bytes": 32_000_000, "device": "cpu", **settings}
    return Engine(folder, **how)


@dataclass(frozen=True)
class Api:
    """A route, and a body without the name of the model, which all but conversations need. `streams`: it may be
    `stream`."""

    path: str
    body: Mapping[str, Any]
    streams: bool = False

    def named(self, model: str) -> dict[str, Any]:
        return {**self.body} if self.path == CONVERSATIONS else {"model": model, **self.body}


WHOLE = {"options": {"num_predict": 4}, "stream": False}
APIS: Mapping[str, Api] = MappingProxyType(
    {
        "completions": Api("/v1/completions", {"prompt": "hello", "max_tokens": 4}, True),
        "chat": Api("/v1/chat/completions", {"messages": [USER], "max_tokens": 4}, True),
        "responses": Api("/v1/responses", {"input": [USER], "max_output_tokens": 4}, True),
        "input tokens": Api("/v1/responses/input_tokens", {"input": [USER]}),
        "messages": Api("/v1/messages", {"messages": [USER], "max_tokens": 4}, True),
        "count": Api("/v1/messages/count_tokens", {"messages": [USER]}),
        "ollama chat": Api("/api/chat", {"messages": [USER], **WHOLE}, True),
        "ollama generate": Api("/api/generate", {"prompt": "hello", **WHOLE}, True),
        "embeddings": Api("/v1/embeddings", {"input": "hello"}),
        "ollama embed": Api("/api/embed", {"input": "hello"}),
        "ollama embedding": Api("/api/embeddings", {"prompt": "hello"}),
        "tokenize": Api("/tokenize", {"prompt": "hello"}),
        "detokenize": Api("/detokenize", {"tokens": [104, 105]}),
        "conversations": Api(CONVERSATIONS, {"name": "made"}),
    }
)
