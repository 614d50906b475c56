"""`kvcellar cache` does the same with a running server and with the directory of a store."""

import json
import random
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvcellar import Engine
from kvcellar.errors import KvcellarError
from kvcellar.memory.tiers import upkeep
from kvcellar.memory.tiers.codec import MAGIC, VERSION
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.cli.command import COMMAND, Ran, environment, kvcellar
from tests.engine.mixes import tokens
from tests.tiers.made import IDENTITY, made
from tests.zoo import ARCHS

ADMIN = "an-admin-key-of-the-server"
PROMPT = list(tokens(random.Random(1), 100))
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    ARCHS["llama"].build(max_position_embeddings=2048).save_pretrained(directory)
    return directory


def engine_on(model: Path, store: Path) -> Engine:
    return Engine(model, dtype="float32", cache_bytes=8_000_000, threads=1, store=str(store))


def fill(engine: Engine) -> None:
    engine.generate(PROMPT, **GREEDY)
    while engine.stats().store.unwritten:
        time.sleep(0.005)


@pytest.fixture
def store(model, tmp_path) -> Path:
    """A directory with one entry of 101 tokens; no engine uses it."""
    with engine_on(model, tmp_path / "store") as engine:
        fill(engine)
    return tmp_path / "store"


def run(*words: object, code: int = 0) -> Ran:
    ran = kvcellar("cache", *map(str, words))
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    return ran


def test_a_store_is_listed_verified_and_cleared_without_a_server(store) -> None:
    at = ("--store", store)
    assert re.search(r"\(no namespace\) of model \w{16}: 1 entries, 101 tokens", run("ls", *at).out)
    assert f"101 tokens [0,101), 1 uses, 105 kB: {PROMPT[:16]}" in run("tree", *at).out
    hot = json.loads(run("hot", *at, "--json").out)
    assert (hot["entries"][0]["tokens"], hot["more"]) == (PROMPT[:16], False)
    assert "1 entries of 105 kB are as they were written" in run("verify", *at).out
    assert "removed 0 entries" in run("gc", *at).out
    assert "removed 0 tokens from memory and 0 entries" in run("rm", *at, "--prefix-ids", "9,9").out
    assert "and 1 entries" in run("rm", *at, "--prefix-ids", ",".join(map(str, PROMPT[:9]))).out
    assert json.loads(run("ls", *at, "--json").out)["store"]["namespaces"] == []
    assert json.loads(run("clear", *at, "--json").out) == {"tokens": 0, "stored": 0}


def test_a_store_of_several_models_is_cleared_only_if_all_are_named(store) -> None:
    with closing(upkeep.opened(store, identity=IDENTITY)) as disk:
        assert disk.put(*made(1))
    refused = run("clear", "--store", store, code=1).err
    assert "the store has entries of 2 models" in refused
    assert "--all-models" in refused
    assert "2 entries" in run("verify", "--store", store).out
    hot = json.loads(run("hot", "--store", store, "--limit", 1, "--json").out)
    assert (len(hot["entries"]), hot["more"]) == (1, True)
    assert "and 2 entries from the store, of all models" in run("clear", "--store", store, "--all-models").out


def test_an_archive_moves_a_store(store, model, tmp_path) -> None:
    archive = tmp_path / "store.tar"
    assert "wrote" in run("export", archive, "--store", store).out
    run("clear", "--store", store)
    assert (
        "refused 1: the store had no place"
        in run("import", archive, "--store", store, "--store-bytes", "100k", code=1).out
    )
    assert "stored 1 entries" in run("import", archive, "--store", store).out
    with engine_on(model, store) as engine:
        assert engine.generate(PROMPT, **GREEDY).usage.cached_tokens == 99
    archive.write_bytes(archive.read_bytes().replace(MAGIC + bytes([VERSION]), MAGIC + b"\x09"))
    assert "refused 1: it is of another version" in run("import", archive, "--store", store, code=1).out


def test_an_export_replaces_a_file_only_when_it_is_whole(store, tmp_path) -> None:
    archive, part = tmp_path / "store.tar", tmp_path / "store.tar.part"
    archive.write_bytes(b"before")
    run("export", archive, "--url", "http://127.0.0.1:1", "--admin-key-file", _key(tmp_path), code=1)
    run("export", archive, "--store", tmp_path, code=2)
    assert (archive.read_bytes(), part.exists()) == (b"before", False)
    part.write_bytes(b"")
    assert "another export writes it" in run("export", archive, "--store", store, code=1).err
    assert (archive.read_bytes(), part.read_bytes()) == (b"before", b"")
    part.unlink()
    run("export", archive, "--store", store)
    assert (archive.stat().st_mode & 0o777, part.exists()) == (0o600, False)
    words = [*COMMAND, "cache", "export", "-", "--store", str(store)]
    ran = subprocess.run(words, env=environment(tmp_path), capture_output=True, check=True)
    assert ran.stdout == archive.read_bytes()


def test_an_export_that_fails_leaves_the_file_as_it_was(store, tmp_path, monkeypatch) -> None:
    def failing(disk):
        yield b"some"
        raise KvcellarError("it failed")

    archive = tmp_path / "store.tar"
    archive.write_bytes(b"before")
    monkeypatch.setattr(upkeep, "exported", failing)
    assert "it failed" in run("export", archive, "--store", store, code=1).err
    assert (archive.read_bytes(), (tmp_path / "store.tar.part").exists()) == (b"before", False)


def _key(directory: Path) -> Path:
    (directory / "admin.txt").write_text(ADMIN)
    return directory / "admin.txt"


def test_damage_is_reported_by_the_exit_code(store) -> None:
    (file,) = (store / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert "1 were damaged, and are removed" in run("verify", "--store", store, code=1).out
    assert "0 entries" in run("verify", "--store", store).out


def test_an_encrypted_store_needs_its_key(model, tmp_path, monkeypatch) -> None:
    store, key = tmp_path / "store", tmp_path / "key.txt"
    key.write_text("11" * 32)
    key.chmod(0o600)
    settings = {"dtype": "float32", "cache_bytes": 8_000_000, "threads": 1, "store": str(store)}
    with Engine(model, **settings, store_key=bytes.fromhex("11" * 32)) as engine:
        fill(engine)
    assert "(sealed with another key)" in run("ls", "--store", store).out
    assert "1 could not be read" in run("verify", "--store", store).out
    at = ("--store", store, "--store-key-file", key)
    assert "1 entries, 101 tokens" in run("ls", *at).out
    archive = tmp_path / "sealed.tar"
    run("export", archive, *at)
    run("clear", *at)
    assert "refused 1" in run("import", archive, "--store", store, code=1).out
    monkeypatch.setenv("KVCELLAR_STORE_KEY", "11" * 32)
    assert "stored 1 entries" in run("import", archive, "--store", store).out
    assert "1 entries of" in run("verify", "--store", store).out


def test_a_running_server_is_asked_with_its_admin_key(model, tmp_path) -> None:
    key = tmp_path / "admin.txt"
    key.write_text(ADMIN)
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    with engine_on(model, tmp_path / "store") as engine, Server(engine, settings) as server:
        at = ("--url", server.url, "--admin-key-file", key)
        fill(engine)
        listed = run("ls", *at).out
        assert "(no namespace): 1 entries, 101 tokens, 0 checkpoints" in listed
        assert f"in the store {tmp_path / 'store'}: " in listed
        entry = json.loads(run("tree", *at, "--json").out)["entries"][0]
        assert f"  {entry['name']} 101 tokens [0,101), 0 users" in run("tree", *at).out
        assert entry["name"] in run("hot", *at, "--limit", 1).out
        assert "101 tokens [0,101), 1 uses" in run("tree", *at, "--tier", "disk").out
        archive = tmp_path / "server.tar"
        run("export", archive, *at)
        assert "as they were written" in run("verify", *at).out
        assert "removed 0 entries" in run("gc", *at).out
        assert "removed 101 tokens from memory and 0 entries" in run("rm", entry["name"], *at).out
        assert "removed 0 tokens from memory and 1 entries" in run("clear", *at).out
        assert "stored 1 entries" in run("import", archive, *at).out
        assert engine.generate(PROMPT, **GREEDY).usage.cached_tokens == 99
        assert "Name a file with it" in run("ls", "--url", server.url, code=1).err


def test_wrong_use_is_refused_with_what_to_do(store, tmp_path) -> None:
    assert "name what to remove" in run("rm", "--store", store, code=2).err
    assert "12 to 64 hexadecimal digits" in run("rm", "0", "--store", store, code=1).err
    assert "the prefix is empty" in run("rm", "--store", store, "--prefix", "", code=2).err
    assert "is not token ids like 12,7,5" in run("rm", "--store", store, "--prefix-ids", "a", code=2).err
    assert "a store has no tokenizer" in run("rm", "--store", store, "--prefix", "a", code=2).err
    assert "is no store" in run("ls", "--store", tmp_path, code=2).err
    (tmp_path / "x.tar").write_text("no archive")
    assert "is not an archive" in run("import", tmp_path / "x.tar", "--store", store, code=1).err


def test_a_store_is_read_without_torch(store, tmp_path) -> None:
    """The command starts as fast as Python does: neither torch nor the server is imported."""
    code = (
        "import sys; sys.argv = ['kvcellar', 'cache', 'ls', '--store', sys.argv[1]]\n"
        "from kvcellar.cli.main import main\n"
        "try:\n    main()\nfinally:\n"
        "    print(sorted(set(sys.modules) & {'torch', 'transformers', 'starlette', 'uvicorn', 'pydantic'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(store)], env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert COMMAND[0] == sys.executable
    assert ran.stdout.rstrip().endswith("[]"), ran.stdout
