"""Engines of one remote store have the same conversations, and go on with each other's chats token by token."""

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.engine.load.settings import Settings, document_bytes
from kvcellar.frontend.documents import Documents, documents_of
from kvcellar.memory.tiers.archive import Archive, DiskArchive
from kvcellar.memory.tiers.remote_archive import RedisArchive

LIMITS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cache_bytes": 32_000_000, "context": 256, "threads": 1}


def shown(documents: Documents) -> tuple[str, str | None]:
    archive = documents.archive("conversations")
    place = str(documents.directory) if documents.directory else documents.server
    return type(archive).__name__, place


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (Archive, None)),
        ({"store": "/disk"}, (DiskArchive, "/disk")),
        ({"store_remote": "s3://bucket/path"}, (Archive, None)),
        ({"store": "/disk", "store_remote": "s3://bucket/path"}, (DiskArchive, "/disk")),
        ({"store": "/disk", "store_remote": "file:///elsewhere"}, (DiskArchive, "/elsewhere")),
        ({"store": "/disk", "store_remote": "valkey://host:6379/0"}, (RedisArchive, "redis://host:6379/0")),
        ({"store_remote": "unix:///redis.sock"}, (RedisArchive, "unix:///redis.sock")),
    ],
)
def test_documents_are_in_the_place_that_most_front_ends_share(given: dict[str, Any], found: tuple[Any, ...]) -> None:
    if found[0] is RedisArchive:
        pytest.importorskip("redis", reason="the extra `remote` is not installed")
    assert shown(documents_of(Settings(**given))) == (found[0].__name__, *found[1:])


def test_a_url_that_is_none_is_refused_without_it() -> None:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    for url in ("redis://secret@host:port/0", "redis://me:secret/1@host"):
        documents = documents_of(Settings(store_remote=url))
        for opens in (partial(documents.archive, "conversations"), partial(Engine, **LIMITS, store_remote=url)):
            with pytest.raises(BadRequest, match="store_remote cannot be opened") as raised:
                opens()
            assert "secret" not in "".join(traceback.format_exception(raised.value, limit=0))
    assert documents_of(Settings(store_remote="file:///x", store_remote_bytes=1 << 20)).cap == document_bytes(1 << 20)


def test_an_engine_continues_the_chat_that_another_one_began(tmp_path: Path) -> None:
    shared = {"store_remote": f"file://{tmp_path}"}
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 4.0, "seed": 3, "ignore_eos": True}
    messages = [{"role": "user", "content": "def open_all(paths):"}]
    with Engine(**LIMITS, **shared) as one, Engine(**LIMITS, **shared) as other:
        reply = one.chat(messages, **how)
        with one.session() as session:
            session.send("def close_all(files):", **how)
            session.save("files")
        assert one._codec._shared is not None
        one._codec._shared.rest()
        known = [*one.render(messages), *reply.token_ids]
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "more"}]
        with Engine(**LIMITS) as alone:
            assert alone.render(messages)[: len(known)] != known, "the tokenizer would choose the same tokens"
        assert other.render(messages)[: len(known)] == known
        with other.load("files") as session:
            assert session.messages[0]["content"] == "def close_all(files):"
            session.send("def main():", **how)
            session.save("files")
        assert [info.turns for info in one.conversations.list()] == [2]
