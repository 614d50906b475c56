"""A model is fetched from a hub: only what is used, resumed, checked, and found offline afterwards."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from kvcellar.engine.models.weights.find import find
from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused, PullFailed
from kvcellar.library import download
from kvcellar.library.hub import look_up, pull
from kvcellar.library.hub_cache import cached_models
from kvcellar.progress import Progress
from kvcellar.repository import Repository, is_used
from tests.library.fake_hub import FakeHub, serving

NAME = "owner/tiny"
WEIGHTS = bytes(range(256)) * 1000
SHARDS = {"model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": WEIGHTS[::-1]}
USED = {
    **SHARDS,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"model_max_length": 4}',
    "merges.txt": b"a b\n",
    "tokenizer.model": b"\0\1",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
UNUSED = {
    "README.md": b"# tiny",
    ".gitattributes": b"*.bin",
    "pytorch_model.bin": b"\x80",
    "modeling_tiny.py": b"import os",
    "original/consolidated.00.pth": b"\x80",
    "original/params.json": b"{}",
    "consolidated.safetensors": WEIGHTS,
    "onnx/model.onnx": b"\0",
    "onnx/config.json": b"{}",
    "fp16/model.safetensors": WEIGHTS,
}
SMALL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS}
CUT = 100_000


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSE", 0.0)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_only_the_files_that_are_used_are_asked_for_and_the_model_is_found_afterwards(hub: FakeHub) -> None:
    commit = hub.add(NAME, USED | UNUSED)
    with pytest.raises(ModelNotFound, match="`kvcellar pull owner/tiny`"):
        find(NAME)
    pulled = pull(NAME)
    assert (pulled.name, pulled.commit, pulled.files) == (NAME, commit, len(USED))
    assert pulled.bytes == pulled.downloaded_bytes == sum(map(len, USED.values()))
    assert pulled.unchecked == ()
    assert hub.sent() == sorted(USED)
    assert not set(hub.sent("HEAD")) & set(UNUSED)
    assert find(NAME) == (NAME, pulled.directory)
    assert contents(pulled.directory) == USED


def test_what_is_there_is_not_downloaded_again(hub: FakeHub) -> None:
    hub.add(NAME, USED)
    pull(NAME)
    hub.asked.clear()
    assert pull(NAME).downloaded_bytes == 0
    assert hub.sent() == []
    later = hub.add(NAME, {**USED, "config.json": b'{"model_type": "qwen3"}'})
    assert pull(NAME).commit == later
    assert hub.sent() == ["config.json"]


def test_progress_counts_all_bytes_of_large_files_once(hub: FakeHub) -> None:
    hub.add(NAME, USED)
    hub.cuts = {name: [CUT, 1] for name in SHARDS}
    hub.without_ranges = True
    seen: list[Progress] = []
    pull(NAME, progress=seen.append)
    total = 2 * len(WEIGHTS) + len(USED["tokenizer.json"])
    of_bytes = [one for one in seen if one.total]
    assert {(one.stage, one.total, one.unit) for one in of_bytes} == {(f"downloading {NAME}", total, "B")}
    assert of_bytes[-1].done == total
    assert seen[0].stage == f"looking up {NAME}"


@pytest.mark.parametrize("cuts", [[CUT], [1, CUT, 0, 0, 0, 0, 2], [0, 0, 0, 0]])
def test_a_connection_that_breaks_is_continued(hub: FakeHub, cuts: list[int]) -> None:
    hub.add(NAME, SMALL)
    hub.cuts = {"model.safetensors": list(cuts)}
    assert contents(pull(NAME).directory) == SMALL
    there = [sum(cuts[:n]) for n in range(len(cuts) + 1)]
    assert hub.ranges() == [f"bytes={begin}-" if begin else None for begin in there]


def test_connections_that_bring_nothing_end_the_download_and_the_next_one_continues_it(hub: FakeHub) -> None:
    hub.add(NAME, SMALL)
    hub.cuts = {"model.safetensors": [CUT, *[0] * 5]}
    with pytest.raises(PullFailed, match=r"cannot be reached .* is kept: pull it again to continue"):
        pull(NAME)
    with pytest.raises(ModelNotFound):
        find(NAME)
    assert look_up(NAME).missing_bytes == sum(map(len, SMALL.values())) - CUT
    hub.asked.clear()
    assert pull(NAME).downloaded_bytes == sum(map(len, SMALL.values())) - CUT
    assert hub.ranges() == [f"bytes={CUT}-"]
    assert find(NAME)[0] == NAME


class Enough(Exception):
    pass


@pytest.mark.parametrize("kind", [Enough, KeyboardInterrupt, ValueError, OSError])
def test_what_the_listener_raises_ends_a_download_that_can_be_continued(
    hub: FakeHub, kind: type[BaseException]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.done >= CUT:
            raise kind

    hub.add(NAME, {**SMALL, **SHARDS})
    with pytest.raises(kind):
        pull(NAME, progress=stop)
    with pytest.raises(ModelNotFound):
        find(NAME)
    assert contents(pull(NAME).directory) == {**SMALL, **SHARDS}
    assert any(one is not None for one in hub.ranges())


def test_a_server_without_ranges_is_read_from_the_start(hub: FakeHub) -> None:
    hub.add(NAME, SMALL)
    hub.cuts, hub.without_ranges = {"model.safetensors": [CUT]}, True
    assert contents(pull(NAME).directory) == SMALL


def test_a_wrong_half_of_an_earlier_download_is_noticed(hub: FakeHub, cache: Path) -> None:
    hub.add(NAME, SMALL)
    hub.cuts = {"model.safetensors": [CUT, *[0] * 5]}
    with pytest.raises(PullFailed):
        pull(NAME)
    (half,) = cache.rglob("*.incomplete")
    half.write_bytes(b"x" + half.read_bytes()[1:])
    with pytest.raises(PullFailed, match=r"model\.safetensors"):
        pull(NAME)
    assert list(cache.rglob("*.incomplete")) == []
    assert contents(pull(NAME).directory) == SMALL


def test_a_longer_half_than_the_file_is_dropped(hub: FakeHub, cache: Path) -> None:
    hub.add(NAME, SMALL)
    hub.cuts = {"model.safetensors": [CUT, *[0] * 5]}
    with pytest.raises(PullFailed):
        pull(NAME)
    (half,) = cache.rglob("*.incomplete")
    half.write_bytes(WEIGHTS + b"x")
    assert contents(pull(NAME).directory) == SMALL


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_digest_is_refused_by_name_and_removed(hub: FakeHub, cache: Path, file: str) -> None:
    files = {**SMALL, "tokenizer.json": b'{"version": "1.0"}'}
    hub.add(NAME, files)
    hub.flipped = {file}
    with pytest.raises(PullFailed, match=rf"{file}: \d+ bytes with sha256 \w+\. That file was removed"):
        pull(NAME)
    assert not any(kept.endswith(files[file][1:]) for kept in contents(cache).values())
    with pytest.raises(ModelNotFound):
        find(NAME)
    hub.flipped = set()
    assert contents(pull(NAME).directory) == files


def test_a_damaged_file_of_the_cache_is_named_and_downloaded_again(hub: FakeHub) -> None:
    hub.add(NAME, USED)
    directory = pull(NAME).directory
    shard = sorted(SHARDS)[1]
    damaged = (directory / shard).resolve()
    damaged.write_bytes(WEIGHTS[:-1] + b"x")
    with pytest.raises(PullFailed, match=f"^{shard} of owner/tiny in the local .* Pull it again$"):
        pull(NAME)
    hub.asked.clear()
    assert contents(pull(NAME).directory) == USED
    assert hub.sent() == [shard]


def test_weights_without_a_digest_are_named(hub: FakeHub) -> None:
    hub.add(NAME, USED)
    hub.without_digests = True
    assert pull(NAME).unchecked == tuple(SHARDS)
    assert find(NAME)[0] == NAME


def test_a_gated_model_says_what_to_do(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL)
    hub.gated = {NAME}
    with pytest.raises(
        PullFailed, match=rf"^owner/tiny is gated: accept its terms at {hub.url}/owner/tiny, .*HF_TOKEN"
    ):
        pull(NAME)
    with pytest.raises(PullFailed, match="is gated"):
        pull(NAME, token="bad")
    assert pull(NAME, token="good").files == 2
    monkeypatch.setenv("HF_TOKEN", "good")
    hub.asked.clear()
    pull(NAME)
    assert {one.token for one in hub.asked if NAME in one.path} == {"Bearer good"}


def test_a_stored_login_is_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL)
    hub.gated = {NAME}
    Path(constants.HF_TOKEN_PATH).write_text("good")
    assert pull(NAME).files == 2


def test_a_token_is_not_sent_to_another_host(hub: FakeHub) -> None:
    hub.add(NAME, SMALL)
    with serving(FakeHub(repositories=hub.repositories, revisions=hub.revisions)) as other:
        hub.elsewhere = other.url
        hub.cuts = {"model.safetensors": [CUT]}
        assert contents(pull(NAME, token="good").directory) == SMALL
    assert [one.token for one in other.asked] == [None]
    assert {one.token for one in hub.asked if NAME in one.path} == {"Bearer good"}


def test_what_the_hub_does_not_have_is_not_found(hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match=f"^{hub.url} has no model owner/tiny, or it is private.*HF_TOKEN"):
        pull(NAME)
    hub.add(NAME, SMALL)
    with pytest.raises(ModelNotFound, match="has no revision v9"):
        pull(NAME, revision="v9")


@pytest.mark.parametrize(
    "name",
    ["", "a/b/c", "../x", "a/..", "a//b", "-a/b", "a b", "a/b@", "a/b@..", "a/b@x/../y", "a/b@/x", "a/b@x y", "é/b",
     "a/b.git", "a--b/c", "a/b\n", "a/b@v\n", "https://h/a/b", "a/" + "x" * 97, "a/b@" + "x" * 201, "a/b@v@w"],
)  # fmt: skip
def test_what_is_no_name_is_refused_without_a_request(hub: FakeHub, name: str) -> None:
    with pytest.raises(BadRequest):
        pull(name)
    with pytest.raises(ModelNotFound):
        find(name)
    assert hub.asked == []


def test_two_revisions_that_differ_are_refused() -> None:
    assert Repository.parse("a/b@v1").at("v1") == Repository.parse("a/b").at("v1") == Repository("a/b", "v1")
    assert Repository.parse("a/b@v1").at(None) == Repository("a/b", "v1")
    assert str(Repository.parse("a/b@main")) == "a/b"
    with pytest.raises(BadRequest, match="a/b@v1 names a revision already"):
        pull("a/b@v1", revision="v2")


def test_offline_is_an_error_that_names_the_variable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullFailed, match=r"HF_HUB_OFFLINE is set\. Unset it"):
        pull(NAME)
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached_is_named(hub: FakeHub) -> None:
    with serving(FakeHub()) as gone:
        pass
    with pytest.raises(PullFailed, match=f"^{gone.url} cannot be reached .* Check the network, and HF_ENDPOINT"):
        pull(NAME, endpoint=gone.url)


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, "has no model|refuses the token"), (403, "refuses the token"), (404, "has no model"), (429, "too many"),
     (500, "status 500"), (503, "status 503")],
)  # fmt: skip
def test_the_status_of_a_failure_is_explained(hub: FakeHub, status: int, why: str) -> None:
    hub.status = status
    with pytest.raises((PullFailed, ModelNotFound), match=why):
        pull(NAME)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b"{}", b'{"id": "x", "sha": "../x"}', b'{"sha": 5}'])
def test_what_is_no_hub_is_named(hub: FakeHub, body: bytes) -> None:
    hub.body = body
    with pytest.raises(PullFailed, match=r"is not what a hub returns .* Check HF_ENDPOINT"):
        pull(NAME)


def test_a_disk_that_is_too_small_is_named_before_anything_is_downloaded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, SMALL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(64 << 20) + len(WEIGHTS)))
    with pytest.raises(PullFailed, match=r"needs 256 kB more on the disk of .* which has 67.4 MB free.* HF_HOME"):
        pull(NAME)
    assert hub.sent() == []


@pytest.mark.parametrize(
    ("files", "why"),
    [({"config.json": b"{}", "pytorch_model.bin": b""}, r"no weights as safetensors.*pytorch_model\.bin"),
     ({"config.json": b"{}", "tiny.Q8_0.gguf": b""}, r"no weights as safetensors.*tiny\.Q8_0\.gguf"),
     ({"model.safetensors": b""}, r"has no config\.json"), ({}, "it has no files")],
)  # fmt: skip
def test_a_repository_without_a_model_is_refused_before_anything_is_downloaded(
    hub: FakeHub, files: dict[str, bytes], why: str
) -> None:
    hub.add(NAME, files)
    with pytest.raises(ModelRefused, match=why):
        pull(NAME)
    assert hub.sent() == []


def test_an_adapter_is_pulled_too(hub: FakeHub) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
    hub.add("owner/lora", files)
    assert contents(pull("owner/lora").directory) == files


def test_revisions_are_pinned(hub: FakeHub) -> None:
    old = hub.add(NAME, SMALL, "v1.0")
    pulled = pull(f"{NAME}@v1.0")
    assert (pulled.name, pulled.commit) == (f"{NAME}@v1.0", old)
    assert find(f"{NAME}@v1.0") == (f"{NAME}@v1.0", pulled.directory)
    with pytest.raises(ModelNotFound, match="no main revision"):
        find(NAME)
    new = hub.add(NAME, {**SMALL, "model.safetensors": WEIGHTS[::-1]})
    pull(NAME)
    assert find(NAME)[1].name == new
    assert find(f"{NAME}@v1.0")[1].name == find(f"{NAME}@{old}")[1].name == old
    assert pull(NAME, revision=old).name == f"{NAME}@{old}"
    hub.add(NAME, SMALL, "refs/pr/3")
    pull(f"{NAME}@refs/pr/3")
    assert find(f"{NAME}@refs/pr/3")[1].name == old


def test_until_a_later_commit_is_complete_the_earlier_one_is_found(hub: FakeHub) -> None:
    old = hub.add(NAME, SMALL)
    pull(NAME)
    new = hub.add(NAME, {**SMALL, "model.safetensors": WEIGHTS[::-1]})
    hub.flipped = {"model.safetensors"}
    with pytest.raises(PullFailed):
        pull(NAME)
    assert find(NAME)[1].name == old
    hub.flipped = set()
    pull(NAME)
    assert find(NAME)[1].name == new


def test_two_pulls_at_once_download_a_file_once(hub: FakeHub) -> None:
    hub.add(NAME, USED)
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(pull(NAME).name)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [NAME] * 3
    assert hub.sent() == sorted(USED)


def test_models_of_the_cache_are_listed_by_the_names_that_load_them(hub: FakeHub, cache: Path) -> None:
    assert cached_models() == []
    hub.add(NAME, USED)
    hub.add("other", SMALL, "v1")
    hub.add("owner/data", {"config.json": b"{}", "adapter_config.json": b"{}", "adapter_model.bin": b""})
    directory = pull(NAME).directory
    pull("other@v1")
    (cache / "models--owner--broken" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    listed = cached_models()
    assert [model.name for model in listed] == ["other@v1", NAME]
    assert listed[1].directory == directory
    assert listed[1].bytes == sum(map(len, USED.values()))
    assert all(find(model.name)[1] == model.directory for model in listed)


def test_what_is_used_of_a_repository() -> None:
    assert all(map(is_used, USED))
    assert not any(map(is_used, UNUSED))
