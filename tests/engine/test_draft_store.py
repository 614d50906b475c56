"""What a real draft model has computed is found by the next engine on the same store."""

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from kvcellar.engine.load.open_store import Source, open_store
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.load import load
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import ModelDrafter
from kvcellar.memory import restore_plan
from kvcellar.memory.attention.choose import named
from tests.engine.drafting import always_restored, chain, until
from tests.engine.mixes import tokens
from tests.own_cache import own_cache
from tests.zoo import ARCHS

KINDS = ["llama", "gemma3", "lfm2", "qwen3.5"]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    always_restored(monkeypatch)
    own_cache(monkeypatch, tmp_path / "cache")


class Opened:
    """A drafter of the model in a directory, on a store in another one."""

    def __init__(
        self, guest: Guest, path: Path, store: Path | None, *, role: str = "draft model", remote: str | None = None
    ) -> None:
        cells = {group.name: 1024 for group in guest.shape.groups}
        memory = guest.memory(cells, rows=40 if guest.shape.recurrent is not None else 0)
        self.calls = SimpleQueue[Any]()
        place = str(store) if store is not None else None
        settings = Settings(store=place, store_bytes=10**8, store_remote=remote, host_bytes=0)
        source = Source((path,), role)
        how = {"settings": settings, "post": self.calls.put, "opened": ExitStack(), "share": 0.5}
        stored = partial(open_store, source=source, **how)
        self.cache = DraftMemory(memory, in_parts=guest.no_partial_commit is None, open_store=stored)
        flat = guest.mode == "flat"
        self.drafter = ModelDrafter("draft", guest.forward, self.cache, context=900, batched=flat)

    def drafts(self, text: list[int], number: int = 1) -> list[int]:
        one = chain(number, text, 3, vocab=1000)
        until(lambda: self.cache.open([one]) != [None], self.cache, self.calls)
        self.drafter.propose([one])
        self.drafter.check()
        return one.tokens

    def restored(self, text: list[int], number: int = 9) -> int:
        one = chain(number, text, 0, vocab=1000)
        until(lambda: self.cache.open([one]) != [None], self.cache, self.calls)
        (seq,) = self.cache.open([one])
        found = self.cache.memory.length(seq or 0)
        self.drafter.close((number, 0), keep=False)
        return found

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.drafter.close((number, 0), keep=True)
        if (store := self.cache.store) is not None:
            until(lambda: not store.unwritten, self.cache, self.calls)
        self.cache.shut_down()
        self.drafter.check()
        free = self.cache.memory.free()
        assert free == dict.fromkeys(free, 1024)


@pytest.mark.parametrize("name", KINDS)
def test_a_restarted_draft_model_goes_on_where_the_last_one_was(name: str, tmp_path: Path) -> None:
    path, store = tmp_path / "model", tmp_path / "store"
    ARCHS[name].build(max_position_embeddings=2048).save_pretrained(path)
    guest = build_guest(load(path, dtype="float32", device="cpu").model, named(None))
    text = tokens(random.Random(name), 300)
    first = Opened(guest, path, store)
    expected = first.drafts(text)
    assert len(expected) == 3
    first.end(1)

    again, cold = Opened(guest, path, store), Opened(guest, path, None)
    assert again.restored(text) == 299
    assert again.drafts(text) == expected == cold.drafts(text)
    branch = [*text[:280], *text[:30]]
    assert again.restored(branch) >= 256
    assert again.drafts(branch, 2) == cold.drafts(branch, 2)
    again.end(1, 2)
    cold.end(1, 2)
    other = Opened(guest, path, store, role="head")
    assert other.restored(text) == 0, "its entries are of another kind"
    other.end()


def test_what_one_draft_model_has_computed_another_finds_while_both_run(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    monkeypatch.setattr(restore_plan, "PATIENCE", 240.0)
    path, remote = tmp_path / "model", f"file://{tmp_path}/shared"
    ARCHS["llama"].build(max_position_embeddings=2048).save_pretrained(path)
    guest = build_guest(load(path, dtype="float32", device="cpu").model, named(None))
    text = tokens(random.Random(0), 300)
    one, two = (Opened(guest, path, None, remote=remote) for _ in range(2))
    other = Opened(guest, path, None, remote=remote, role="head")
    expected = one.drafts(text)
    one.end(1)
    assert two.restored(text) == 299
    assert two.drafts(text) == expected
    assert other.restored(text) == 0
    two.end(1)
    other.end()


def test_a_store_that_cannot_be_opened_leaves_drafts_without_one(tmp_path: Path, caplog) -> None:
    path = tmp_path / "model"
    ARCHS["llama"].build().save_pretrained(path)
    guest = build_guest(load(path, dtype="float32", device="cpu").model, named(None))
    (tmp_path / "file").write_text("")
    opened = Opened(guest, path, tmp_path / "file")
    assert opened.cache.store is None
    assert "running without a store" in caplog.text
    assert len(opened.drafts(list(range(1, 20)))) == 3
    opened.end(1)
