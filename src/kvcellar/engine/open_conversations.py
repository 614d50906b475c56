"""open_conversations: named conversations are kept in the directory of the store, or, without one, in memory."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from kvcellar.engine.card import ModelCard
from kvcellar.engine.conversations import Conversations, TokenSource
from kvcellar.engine.settings import Settings, conversation_bytes
from kvcellar.engine.store_key import cipher_of, secret_of
from kvcellar.places import NoPlace, cache
from kvcellar.tiers.archive import DiskArchive, MemoryArchive
from kvcellar.tiers.identity import FileDigests

log = logging.getLogger("kvcellar.engine")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_conversations(settings: Settings, model: ModelCard) -> Conversations:
    """Nothing is read or written yet."""
    tokenizer = None
    if settings.store is not None and model.path is not None:
        tokenizer = _tokenizer(model.path)
    if settings.store is None or tokenizer is None:
        return Conversations(MemoryArchive(share=settings.tenant_share), TokenSource(model.name, "", model.vocab_size))
    archive = DiskArchive(
        Path(settings.store) / "conversations",
        conversation_bytes(settings),
        share=settings.tenant_share,
        cipher=cipher_of(settings),
        secret=secret_of(settings),
    )
    return Conversations(archive, TokenSource(model.name, tokenizer, model.vocab_size))


def _tokenizer(path: Path) -> str | None:
    directory = None
    with suppress(NoPlace):
        directory = cache(os.environ)
    try:
        return FileDigests(directory).of(file for name in TOKENIZER_FILES if (file := path / name).is_file())
    except OSError as error:
        log.warning("named conversations end with this process: the tokenizer cannot be read: %s", error)
        return None
