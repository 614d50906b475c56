"""Tiny models of the zoo with a tokenizer and a chat template, for chats."""

import json
from pathlib import Path
from typing import Any

from kvcellar import Engine
from tests.text import made
from tests.text.templates import CHATML
from tests.zoo import ARCHS

CONTEXT = 4096


def chat_engine(folder: Path, name: str, *, template: str = CHATML, **settings: Any) -> Engine:
    tokenizer = made.byte_level()
    end = tokenizer.token_to_id("</s>")
    model = ARCHS[name].build(vocab_size=tokenizer.get_vocab_size(), eos_token_id=end, max_position_embeddings=CONTEXT)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return Engine(folder, **{"threads": 1, "cache_bytes": 64_000_000, "device": "cpu", **settings})


def unspoken(engine: Engine) -> list[int]:
    """Tokens that are not a part of plain words: a random model would draw halves of characters and control tokens."""
    return [
        token
        for token in range(engine.model.vocab_size)
        if not (text := engine.token_bytes(token)).isalpha() or engine.decode([token]) != text.decode()
    ]
