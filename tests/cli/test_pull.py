"""`kvcellar pull`, and the subcommands that download a missing model only if the user says so."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kvcellar.engine.models.hf_globals import silence_transformers
from tests.cli.command import COMMAND, environment, kvcellar, ordinary_interrupts
from tests.library.conftest import cache, hub
from tests.library.fake_hub import FakeHub
from tests.zoo import ARCHS

__all__ = ["cache", "hub"]  # fixtures
NAME = "owner/tiny"
RUN = ("--ids", "5 6 7", "--max-tokens", "2", "--temperature", "0", "--threads", "1", "--cache-bytes", "32M")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("repository")
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(path)
    Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    (path / "pytorch_model.bin").write_bytes(b"\x80")
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def here(tmp_path: Path, hub: FakeHub, cache: Path) -> dict[str, str]:
    """The environment of a new process that uses the hub and the cache."""
    names = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    return {**environment(tmp_path), **names}


def process(here: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *words], env=here, capture_output=True, text=True, check=False, timeout=120)


def test_what_a_process_pulls_is_run_offline(hub: FakeHub, here: dict[str, str], files: dict[str, bytes]) -> None:
    commit = hub.add(NAME, files)
    pulled = process(here, "pull", NAME, "--json", "--quiet")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    record = json.loads(pulled.stdout)
    assert (record["name"], record["commit"], record["files"]) == (NAME, commit, len(files) - 1)
    assert Path(record["directory"]).name == commit
    assert "pytorch_model.bin" not in hub.sent()
    hub.asked.clear()
    ran = kvcellar("run", NAME, *RUN)
    assert (ran.code, ran.err, len(ran.out.split())) == (0, "", 2)
    assert hub.asked == []


def test_what_was_pulled_is_said_in_a_line(hub: FakeHub, files: dict[str, bytes]) -> None:
    commit = hub.add(NAME, files, "v1")
    ran = kvcellar("pull", NAME, "--revision", "v1")
    assert ran.out.startswith(f"{NAME}@v1: {len(files) - 1} files with ")
    assert ran.out.endswith(f"(commit {commit[:12]})\n")
    assert (ran.code, ran.err) == (0, "")


def test_progress_is_shown_at_a_terminal_only(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    ran = kvcellar("pull", NAME, typed="")
    assert f"looking up {NAME} ..." in ran.err
    assert f"downloading {NAME} ...   0%|" in ran.err
    assert "B/s" in ran.err
    assert kvcellar("pull", NAME, "--quiet", typed="").err == ""


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("owner/missing",), 1, "has no model owner/missing"),
        ((NAME, "--revision", "v9"), 1, "has no revision v9"),
        (("owner/gated",), 1, "owner/gated is gated: accept its terms"),
        (("no name",), 1, "is not the name of a model"),
        ((NAME, "--revision", ".."), 2, "is not a revision"),
        (("owner/pickled",), 1, "no weights as safetensors"),
        ((), 2, "Missing argument"),
    ],
)
def test_a_failure_is_one_line(
    hub: FakeHub, files: dict[str, bytes], words: tuple[str, ...], code: int, why: str
) -> None:
    hub.add(NAME, files)
    hub.add("owner/gated", files)
    hub.add("owner/pickled", {"config.json": b"{}", "pytorch_model.bin": b""})
    hub.gated = {"owner/gated"}
    ran = kvcellar("pull", *words)
    assert (ran.code, ran.out) == (code, "")
    assert why in ran.err
    assert code == 2 or (ran.err.count("\n") == 1 and ran.err.startswith("kvcellar: "))


def test_pulled_models_are_listed_if_asked_for(
    hub: FakeHub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    commit = hub.add(NAME, files, "v1")
    kvcellar("pull", f"{NAME}@v1")
    assert json.loads(kvcellar("list", "--json").out)["models"] == []
    (found,) = json.loads(kvcellar("list", "--cached", "--json").out)["cached"]
    assert (found["name"], found["id"], Path(found["directory"]).name) == (f"{NAME}@v1", commit, commit)
    row = kvcellar("list", "--cached").out.splitlines()[1].split()
    assert (row[0], row[1]) == (f"{NAME}@v1", commit[:12])


def test_without_a_home_directory_a_missing_model_is_still_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCELLAR_MODELS", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    ran = kvcellar("doctor", NAME)
    assert ran.code == 1
    assert f"`kvcellar pull {NAME}`" in ran.err


@pytest.mark.parametrize("verb", ["run", "serve", "doctor", "verify"])
def test_without_a_terminal_nothing_is_asked_or_downloaded(hub: FakeHub, files: dict[str, bytes], verb: str) -> None:
    hub.add(NAME, files)
    ran = kvcellar(verb, NAME, *(RUN if verb == "run" else ()), *(("--port", "0") if verb == "serve" else ()))
    assert ran.code == 1
    assert f"`kvcellar pull {NAME}`" in ran.err
    assert hub.asked == []


def test_with_pull_a_missing_model_and_its_draft_are_downloaded(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.add(NAME, files)
    hub.add("owner/draft", files)
    ran = kvcellar("run", NAME, *RUN, "--pull", "--draft", "owner/draft")
    assert (ran.code, len(ran.out.split())) == (1, 0)  # a draft has to be smaller, and this one is not
    assert "owner/draft does not fit" in ran.err
    hub.asked.clear()
    ran = kvcellar("run", NAME, *RUN, "--pull", "--draft", "ngram")
    assert (ran.code, ran.err, len(ran.out.split())) == (0, "", 2)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("typed", "asked", "code"),
    [(b"y\ny\n", "Download it? [y/N]", 0), (b"y\nn\n", "Download it? [y/N]", 1), (b"n\n", "N]", 1), (b"\n", "N]", 1)],
)  # fmt: skip
def test_at_a_terminal_the_user_is_asked(
    hub: FakeHub, files: dict[str, bytes], typed: bytes, asked: str, code: int
) -> None:
    hub.add(NAME, files)
    ran = kvcellar("run", NAME, *RUN, "--quiet", typed="", stdin=typed)
    assert ran.code == code
    assert ran.err.startswith(f"{NAME} is not on this machine. Look it up at {hub.url}? [y/N]")
    assert asked in ran.err
    assert ("files with" in ran.err) == (len(typed) == 4)
    assert (hub.asked == []) == (len(typed) < 4)
    assert (hub.sent() == []) == (code == 1)


def test_a_name_without_an_owner_is_not_looked_up_unless_it_is_pulled(hub: FakeHub, files: dict[str, bytes]) -> None:
    hub.add("tiny", files)
    ran = kvcellar("run", "tiny", *RUN, typed="", stdin=b"y\ny\n")
    assert (ran.code, hub.asked) == (1, [])
    assert kvcellar("run", "tiny", *RUN, "--pull").code == 0


def test_an_interrupted_pull_ends_and_the_next_one_continues(
    hub: FakeHub, here: dict[str, str], files: dict[str, bytes]
) -> None:
    weights = bytes(range(256)) * 4000
    hub.add(NAME, {**files, "model.safetensors": weights})
    hub.cuts = {"model.safetensors": [500_000, *[1] * 10_000]}  # so it would go on for hours
    pulling = subprocess.Popen(
        [*COMMAND, "pull", NAME, "--quiet"], env=here, stderr=subprocess.PIPE, text=True, preexec_fn=ordinary_interrupts
    )
    assert pulling.stderr is not None
    with pulling.stderr:
        assert hub.dripped.wait(60)
        pulling.send_signal(signal.SIGINT)
        said = pulling.stderr.read()
    assert pulling.wait(60) == 130
    assert said.strip() == f"interrupted; what was downloaded is kept: `kvcellar pull {NAME}` continues"
    hub.cuts = {}
    hub.asked.clear()
    assert process(here, "pull", NAME).returncode == 0
    (continued,) = hub.ranges()
    assert continued is not None
    assert int(continued.removeprefix("bytes=").rstrip("-")) >= 500_000
