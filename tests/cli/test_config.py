"""Options that the command line does not give are read from a file of the user, and none of it is ignored."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvcellar.cli import client
from kvcellar.cli.config import SHARED, defaults
from kvcellar.cli.main import cli
from tests.cli.command import Ran, kvcellar

NOWHERE = "127.0.0.1:1"  # no server listens there


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def values(file: Path, text: str, *words: str) -> dict[str, Any]:
    """Those of the options of a command."""
    file.write_text(text)
    ctx = cli.make_context("kvcellar", [*words], resilient_parsing=True)
    for word in words:
        assert isinstance(ctx.command, click.Group)
        command = ctx.command.get_command(ctx, word)
        assert command is not None
        ctx = click.Context(command, parent=ctx, info_name=word)
    return defaults(ctx, file)


def asked(*words: str, **how: Any) -> str:
    """The server that `kvcellar ps` has looked for."""
    return _address(kvcellar("ps", *words, **how))


def _address(ran: Ran) -> str:
    assert ran.code == 1
    return ran.err.removeprefix("kvcellar: ").partition(": ")[0]


def test_values_are_converted_as_those_of_the_command_line(file: Path) -> None:
    text = """
    [serve]
    port = 9000
    memory = "1G"
    allow-open = true
    inspector = false
    cors-origin = ["http://a", "http://b"]
    keep-alive = "1h"
    kv-events-block = 32
    adapter = ["style=./style"]
    [run]
    exponential-decay = [3, 1.5]
    logit-bias = ["13=-100"]
    """
    assert values(file, text, "serve") == {
        "port": 9000, "memory": 10**9, "allow_open": True, "inspector": False, "keep_alive": 3600.0,
        "cors_origins": ("http://a", "http://b"), "kv_events_block": 32, "adapters": (("style", "./style"),),
    }  # fmt: skip
    assert values(file, text, "run") == {"exponential_decay_length_penalty": (3, 1.5), "logit_bias": ((13, -100.0),)}


def test_a_section_of_several_commands_is_for_those_that_have_its_options(file: Path) -> None:
    text = "[engine]\nthreads = 2\ncontext = 99\n[verify]\nthreads = 3\n"
    text += "[client]\nurl = 'a:1'\n[cluster.status]\nurl = 'b:1'\n"
    assert values(file, text, "run") == {"threads": 2, "context": 99}
    assert values(file, text, "cluster", "serve") == {"threads": 2, "context": 99}
    assert values(file, text, "verify") == {"threads": 3}
    assert values(file, text, "bench") == values(file, text, "list") == {}
    assert values(file, text, "ps") == values(file, text, "cache", "ls") == {"url": "a:1"}
    assert values(file, text, "cluster", "status") == {"url": "b:1"}


def test_the_command_line_is_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[client]\nurl = '127.0.0.1:3'\n")
    monkeypatch.delenv("KVCELLAR_URL", raising=False)
    assert asked("--config", str(file)) == "127.0.0.1:3"
    monkeypatch.setenv("KVCELLAR_URL", "127.0.0.1:2")
    assert asked("--config", str(file)) == "127.0.0.1:2"
    assert asked("--config", str(file), "--url", NOWHERE) == NOWHERE


@pytest.mark.parametrize("words", [("ps",), ("stop", "a"), ("why",), ("top",), ("cache", "ls"), ("cluster", "status")])
def test_every_command_that_asks_a_server_reads_its_address_from_the_environment(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_URL", NOWHERE)
    ran = kvcellar(*words)
    assert _address(ran) == NOWHERE
    assert "(--url, $KVCELLAR_URL)" in ran.err


def test_the_file_of_the_user_is_read_unless_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCELLAR_URL", raising=False)
    (tmp_path / "kvcellar").mkdir()
    (tmp_path / "kvcellar/config.toml").write_text("[client]\nurl = '127.0.0.1:3'\n")
    (tmp_path / "other.toml").write_text("[ps]\nurl = '127.0.0.1:4'\n")
    assert asked(config=tmp_path) == "127.0.0.1:3"
    assert asked("--config", str(tmp_path / "other.toml"), config=tmp_path) == "127.0.0.1:4"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[ps]\nulr = 'a'", "ps.ulr: there is no such option; did you mean url?"),
        ("[client]\nlimit = 3", "client.limit: there is no such option; there are admin-key-file, url"),
        ("[serv]\nport = 1", "serv: there is no such section; did you mean serve?"),
        ("url = 'a'", "url: there is no such option here: it needs a section"),
        ("ps = 3", "ps: it is 3; a section [ps] is needed"),
        ("[ps]\njson = 1", "ps.json: it is 1; true or false is needed"),
        ("[ps]\nurl = true", "ps.url: it is True; text or a number is needed, as at the command line"),
        ("[ps]\nurl = ['a']", "ps.url: an array is not possible: give one value"),
        ("[ps]\nadmin-key-file = '/nowhere'", "ps.admin-key-file: File '/nowhere' does not exist."),
        ("[ps]\nhelp = true", "ps.help: there is no such option"),
        ("[ps", "cannot be read: "),
        ("[ps]\nurl = '\udcff'", "cannot be read: "),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(file: Path, text: str, why: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    ran = kvcellar("ps", "--config", str(file))
    assert (ran.code, ran.out) == (2, "")
    assert f"{file}" in ran.err
    assert why in ran.err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[serve]\nport = 'abc'", "serve.port: 'abc' is not a valid integer."),
        ("[serve]\nmemory = '5X'", "serve.memory: '5X' is not a size like 800M, 1.5G or 512MiB"),
        ("[serve]\ncors-origin = 'a'", "serve.cors-origin: an array is needed"),
        ("[engine]\ncach-bytes = 3", "engine.cach-bytes: there is no such option; did you mean cache-bytes?"),
        ("[serve]\nport = 99999", "Invalid value for '--port': port must be a whole number from 0 to 65535"),
    ],
)
def test_values_of_a_server_are_checked_before_it_starts(file: Path, text: str, why: str) -> None:
    file.write_text(text)
    ran = kvcellar("serve", "--config", str(file))
    assert ran.code == 2
    assert why in ran.err
    assert ("(from the config file)" in ran.err) == ("99999" in text)


def test_a_section_is_checked_by_its_commands_only(file: Path) -> None:
    file.write_text("[serve]\nprot = 1\n[engine]\nx = 1\n[cache.ls]\ny = 1\n")
    assert asked("--url", NOWHERE, "--config", str(file)) == NOWHERE


def test_a_store_of_the_command_line_is_before_none_of_the_file(tmp_path: Path, file: Path) -> None:
    from kvcellar.cli.serve import command
    from kvcellar.cli.store_options import placed

    file.write_text("[serve]\nno-store = true\n")
    for words, store in (((), None), (("--store", str(tmp_path)), str(tmp_path))):
        root = click.Context(cli, info_name="kvcellar")
        with command.make_context("serve", ["--config", str(file), *words], parent=root) as ctx:
            placed(options := dict(ctx.params))
        assert options["store"] == store


def test_a_server_of_the_command_line_is_before_a_store_of_the_file(tmp_path: Path, file: Path) -> None:
    file.write_text(f"[cache.ls]\nstore = '{tmp_path}'\n")
    ran = kvcellar("cache", "ls", "--config", str(file), "--url", NOWHERE)
    assert _address(ran) == NOWHERE


def test_a_key_of_the_file_goes_to_no_server_that_others_name(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("of-the-file-of-the-file")
    file.write_text(f'[client]\nurl = "http://{NOWHERE}"\nadmin-key-file = "{tmp_path}/key"\n')
    sent = list[str | None]()
    made = client.AdminClient.__init__

    def noted(self: Any, url: str, admin_key_file: Path | None, **how: Any) -> None:
        made(self, url, admin_key_file, **how)
        sent.append(self._headers.get("authorization"))

    monkeypatch.setattr(client.AdminClient, "__init__", noted)
    monkeypatch.delenv("KVCELLAR_ADMIN_KEY", raising=False)
    runner, asks = CliRunner(), ["ps", "--config", str(file)]
    runner.invoke(cli, asks)
    runner.invoke(cli, [*asks, "--url", "http://127.0.0.1:2"])
    runner.invoke(cli, asks, env={"KVCELLAR_URL": "http://127.0.0.1:3"})
    runner.invoke(cli, asks, env={"KVCELLAR_ADMIN_KEY": "of-the-environment"})
    runner.invoke(cli, [*asks, "--url", "http://127.0.0.1:2", "--admin-key-file", str(tmp_path / "key")])
    own = "Bearer of-the-file-of-the-file"
    assert sent == [own, None, None, "Bearer of-the-environment", own]


def test_what_is_removed_is_named_on_the_command_line_only(file: Path) -> None:
    file.write_text(f'[client]\nurl = "{NOWHERE}"\n[cache.rm]\nnamespace = "x"\n[cache.clear]\nall-models = true\n')
    for words in (["rm"], ["clear"]):
        ran = kvcellar("cache", *words, "--config", str(file))
        assert ran.code == 2
        assert "is named on the command line only" in ran.err


def test_keys_of_several_commands_are_options() -> None:
    names = {f"--{name}" for _, names in SHARED.values() for name in names}
    found = set[str]()
    for word in ("serve", "run", "ps", "doctor"):
        command = cli.get_command(click.Context(cli), word)
        assert command is not None
        found |= {opt for one in command.params if isinstance(one, click.Option) for opt in one.opts}
    assert names <= found


def test_paths_may_begin_at_home_and_a_file_may_begin_with_a_byte_order_mark(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values(file, '\ufeff[run]\nstore = "~/kv"\n', "run")["store"] == f"{tmp_path}/kv"


def test_a_home_that_cannot_be_searched_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any, **how: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    ctx = cli.make_context("kvcellar", ["ps"], resilient_parsing=True)
    command = cli.get_command(ctx, "ps")
    assert command is not None
    with monkeypatch.context() as patch:
        patch.setattr("os.lstat", refused)
        found = defaults(click.Context(command, parent=ctx, info_name="ps"), None)
    assert found == {}


def test_a_message_has_paths_as_they_are() -> None:
    ran = kvcellar("doctor", "./cache_bytes")
    assert "cache_bytes" in ran.err
    assert "--cache-bytes" not in ran.err
