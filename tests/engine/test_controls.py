"""What is asked of an engine beside requests is the same over bytes, as it is for an engine in another process."""

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

from kvcellar import BadRequest, Engine
from kvcellar.engine.control.contents import Contents
from kvcellar.engine.control.controls import Controls
from kvcellar.engine.control.survey import Survey
from kvcellar.engine.messages import (
    CONTROLS,
    AddAdapter,
    CheckInvariants,
    ClearCache,
    Control,
    ControlInParts,
    ControlWithReply,
    DescribeCapacity,
    DescribeVariant,
    NextPart,
    ReadStats,
    reply_type,
)
from kvcellar.engine.models.weights.create_tools import CreateTools
from kvcellar.frontend.control_clients import AdaptersClient, CacheClient
from kvcellar.frontend.served_engine import open_variant
from kvcellar.library.create import create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import parse
from kvcellar.memory.tiers.upkeep import Readable, entries, totals
from tests.engine.mixes import tokens
from tests.engine.tiered import acknowledged
from tests.models.lora import ends_with, layers_of, saved
from tests.text import made as text
from tests.zoo import ARCHS

GREEDY: Any = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
SMALL: Any = {"dtype": "float32", "cache_bytes": 8_000_000, "threads": 1}
ONE, TWO = (list(tokens(random.Random(seed), 120)) for seed in (1, 2))
CHAT = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


class Wire:
    """The controls of an engine behind bytes: messages and replies are encoded, and decoded by their types."""

    def __init__(self, engine: Engine) -> None:
        self._controls, self.card, self.sent = Controls(engine._built), engine._client.card, set[type]()

    def ask(self, control: ControlWithReply[Any], source: Readable | None = None) -> Any:
        return self._replied(control, self._controls.run(self._received(control), source))

    def parts(self, control: ControlInParts[Any]) -> Iterator[Any]:
        for reply in self._controls.parts(self._received(control)):
            yield self._replied(control, reply)

    def _received(self, control: Any) -> Any:
        self.sent.add(type(control))
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(control), type=CONTROLS)
        assert received == control
        return received

    def _replied(self, control: Control, reply: Any) -> Any:
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=reply_type(control))
        assert received == reply, control
        assert type(received) is type(reply), control
        return received


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model with a tokenizer and a chat template, and in it that of an adapter."""
    path, tokenizer = tmp_path_factory.mktemp("model"), text.KINDS["byte_level"]()
    network = ARCHS["llama"].build(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048)
    network.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    saved(path / "adapter", layers_of(network, ends_with("q_proj", "v_proj")))
    return path


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    """With something in memory, in the store and in the tree of two namespaces."""
    with Engine(model, store=str(tmp_path / "store"), **SMALL) as engine:
        for prompt in (ONE, [*ONE[:60], *TWO[:60]], TWO):
            engine.generate(prompt, **GREEDY)
        engine.pin(ONE[:20], namespace="tenant")
        acknowledged(engine)
        yield engine
        engine.check()


def test_every_message_is_the_same_over_bytes_and_so_is_its_reply(engine: Engine, model: Path) -> None:
    wire = Wire(engine)
    cache, contents = CacheClient(wire), Contents(engine._built)
    lists(cache, contents)
    pictures(cache, Survey(engine._built))
    adapters(AdaptersClient(wire), engine, model / "adapter")
    assert wire.ask(ReadStats()).prefixes == engine.stats().prefixes
    assert wire.ask(DescribeCapacity()) == engine.capacity()
    wire.ask(DescribeVariant("other", {"temperature": 0.5, "stop": ["end"]}, "{{ messages }}"))
    changes(cache, contents)
    engine.generate(ONE, **GREEDY)
    assert engine.stats().prefixes.tokens > 0
    wire.ask(ClearCache())
    assert engine.stats().prefixes.tokens == 0
    wire.ask(CheckInvariants())
    assert wire.sent == set(get_args(CONTROLS)) - {NextPart}, "not all were asked"


def lists(cache: CacheClient, contents: Contents) -> None:
    for tier in ("device", "disk"):
        assert list(cache.listed(tier)) == list(contents.listed(tier)) != []
        assert list(cache.listed(tier, "tenant")) == list(contents.listed(tier, "tenant"))
        values = sorted((one["value"] for one in contents.listed(tier)), reverse=True)
        assert [one["value"] for one in cache.hot(tier, 2)] == values[:2] != []
    assert cache.namespaces() == contents.namespaces() != []
    disk, found = contents.disk, cache.disk
    assert disk is not None
    assert found is not None
    assert (found.directory, found.cap, found.bytes) == (str(disk.directory), disk.cap, disk.size())
    assert found.totals == totals(entries(disk)) != []


def pictures(client: CacheClient, survey: Survey) -> None:
    picture, again = client.picture(), survey.picture()
    assert picture.entries == again.entries != []
    assert picture.ended == again.ended != []
    assert picture.steps == again.steps != []
    for entry in picture.entries:
        assert client.entry(entry.name, 7) == survey.entry(entry.name, 7)
    for ended in picture.ended:
        assert client.way(ended.number) == survey.way(ended.number)


def adapters(client: AdaptersClient, engine: Engine, path: Path) -> None:
    info = client.add("style", path)
    assert client.list() == engine.adapters.list() == [info]
    assert engine.stats().adapter_bytes == info.bytes > 0
    client.remove("style", wait=True)
    assert client.list() == []
    assert engine.stats().adapter_bytes == 0


def changes(cache: CacheClient, contents: Contents) -> None:
    archive = b"".join(cache.export())
    assert archive == b"".join(contents.export())
    assert cache.verify().damaged == cache.collect() == 0
    assert cache.remove(namespace="nothing") == contents.remove(namespace="nothing")
    assert cache.remove(prefix=[ONE[0] + 1]).tokens == 0, "of one token, with which nothing begins"
    assert cache.remove(prefix=ONE[:40]).tokens > 0
    assert cache.clear(all_models=True).stored > 0
    assert list(cache.listed("disk")) == []
    assert cache.import_from(io.BytesIO(archive)).stored > 0
    assert list(cache.listed("disk")) != []


def test_a_variant_of_an_engine_behind_bytes_is_as_it_was_created(
    engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(tmp_path / "models")
    monkeypatch.setattr(engine, "_client", Wire(engine))
    own = f"ADAPTER {model / 'adapter'}\nPARAMETER top_k 7\nTEMPLATE {TEMPLATE}\nSYSTEM Rhyme."
    for name, more in (("base", ""), ("poet", own)):
        create(library, name, parse(f"FROM {model}\n{more}"), tools=CreateTools(), folders=[model.parent])

    base, poet = (open_variant(engine, library.resolve(name)) for name in ("base", "poet"))
    assert replace(base.model, name=engine.model.name) == engine.model
    assert engine.decode(base.render(CHAT)) == engine.decode(engine.render(CHAT)) == "user: Hi "
    assert (base.adapter, poet.adapter) == ("", engine.adapters.list()[0].name)
    assert (poet.model.default_sampling, poet.model.chat_template) == (engine.params(top_k=7), TEMPLATE)
    assert engine.decode(poet.render(CHAT)) == "<Rhyme.><Hi>"
    poet.close()
    assert engine.adapters.list() == []
    assert engine.stats().adapter_bytes == 0


def test_arguments_that_cannot_be_sent_are_refused_before(tmp_path: Path) -> None:
    def unsent(*_: Any) -> Any:
        raise AssertionError("it was sent")

    client = SimpleNamespace(ask=unsent, parts=unsent)
    cache, adapters = CacheClient(client), AdaptersClient(client)
    for refused in (
        lambda: cache.remove(prefix=[1 << 70]),
        lambda: cache.remove(entry="12"),
        lambda: cache.remove(),
        lambda: adapters.add("x", [None]),  # type: ignore[list-item]
        lambda: adapters.add(3, tmp_path),  # type: ignore[arg-type]
        lambda: adapters.remove(3),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequest):
            refused()


def test_an_adapter_is_found_where_the_caller_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.chdir(model)
    AdaptersClient(SimpleNamespace(ask=sent.append)).add("style", "adapter")
    assert sent == [AddAdapter("style", (str(model / "adapter"),))]


def test_an_export_without_a_store_is_refused_before_a_part_is_read() -> None:
    with Engine(ARCHS["llama"].build(), **SMALL) as engine:
        wire = Wire(engine)
        with pytest.raises(BadRequest, match="no store on disk"):
            CacheClient(wire).export()
        assert CacheClient(wire).disk is None
