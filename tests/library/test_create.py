"""A model is created from what its Modelfile names, or nothing has changed and the message has the reason."""

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from kvcellar.errors import BadRequest, KvcellarError, ModelRefused
from kvcellar.library.create import Created
from kvcellar.library.library import Library
from kvcellar.library.manifest import Manifest, Part
from kvcellar.library.modelfile import ModelfileError
from kvcellar.library.names import ModelName
from kvcellar.progress import Progress, listening
from tests.library.made import FakeTools, adapter, files, made, model, tree
from tests.tiers.faults import Counting, Failing, Short


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path / "library")


@pytest.fixture
def here(tmp_path):
    """A directory with a model, a draft and two adapters."""
    model(tmp_path / "m", 1)
    model(tmp_path / "d", 2, size=100)
    adapter(tmp_path / "p", 1)
    adapter(tmp_path / "q", 2)
    return tmp_path


WHOLE = """
FROM ./m
DRAFT ./d
ADAPTER ./p
PARAMETER num_ctx 4096
PARAMETER stop a
PARAMETER stop b
PARAMETER temperature 0.5
TEMPLATE {% for message in messages %}{{ message.content }}{% endfor %}
SYSTEM be brief
MESSAGE user hello
MESSAGE assistant hi: there
LICENSE MIT
LICENSE other
REQUIRES 0.1
"""


def refused(library: Library, here, modelfile: str, pattern: str, **options) -> None:
    before = tree(library) if library.root.exists() else {}
    with pytest.raises(KvcellarError, match=pattern) as found:
        made(library, "new", modelfile, here, **options)
    assert isinstance(found.value, BadRequest | ModelRefused)
    assert (tree(library) if library.root.exists() else {}) == before


def test_all_commands_are_in_the_manifest(here, library):
    found = made(library, "a", WHOLE, here).model.manifest
    assert dict(found.parameters) == {"context": 4096, "stop": ["a", "b"], "temperature": 0.5}
    assert [(one.role, one.content) for one in found.messages] == [("user", "hello"), ("assistant", "hi: there")]
    assert (found.system, found.licenses, found.requires) == ("be brief", ("MIT", "other"), "0.1.0")
    assert found.template == "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert found.draft is not None
    assert len(found.adapters) == 1


def test_what_from_names_in_the_library_is_inherited_and_replaced_by_kind(here, library):
    base = made(library, "a", WHOLE, here).model.manifest
    same = made(library, "b", "FROM a", here).model
    assert same.manifest.to_bytes() == base.to_bytes().replace(b'"source": "./m"', b'"source": "a"')
    other = made(library, "c", "FROM a\nADAPTER ./q\nPARAMETER stop c\nSYSTEM x\nMESSAGE user y", here).model.manifest
    assert dict(other.parameters) == {"context": 4096, "stop": ["c"], "temperature": 0.5}
    assert (other.system, len(other.messages), other.draft) == ("x", 1, base.draft)
    assert other.adapters != base.adapters
    assert other.base_id == base.base_id
    made(library, "a", "FROM a\nSYSTEM itself", here)
    assert library.resolve("a").manifest.system == "itself"
    assert library.resolve("a").manifest.draft == base.draft
    library.remove("c")
    library.check()


def test_models_may_be_removed_that_others_were_created_from(here, library):
    made(library, "a", WHOLE, here)
    made(library, "b", "FROM a", here)
    library.remove("a")
    library.resolve("b")
    library.check()


def test_weights_are_quantized_into_files_of_their_own(here, library):
    found = made(library, "a", "FROM ./m\nDRAFT ./d", here, quantize="Q8", draft_quantize="int4").model
    assert (found.directory / "model.safetensors").read_bytes() == bytes([254]) * 1000
    assert found.draft is not None
    assert (found.draft / "model.safetensors").read_bytes() == bytes([253]) * 100
    manifest = found.manifest
    assert (manifest.quantized, manifest.draft_quantized) == ("int8", "int4")
    assert manifest.report == {"model": {"kind": "int8", "draft": False}, "draft": {"kind": "int4", "draft": True}}
    again = made(library, "b", "FROM a\nDRAFT ./m", here).model.manifest
    assert again.draft_quantized is None
    assert again.report == {"model": {"kind": "int8", "draft": False}}
    assert made(library, "c", "FROM ./m\nDRAFT a", here).model.manifest.draft_quantized == "int8"
    assert made(library, "plain", "FROM ./m\nDRAFT ./d", here).model.manifest.report is None
    later = made(library, "e", "FROM plain", here, draft_quantize="int8").model
    assert later.manifest.draft_quantized == "int8"
    assert later.draft is not None
    assert (later.draft / "model.safetensors").read_bytes() == bytes([253]) * 100


def test_the_same_input_is_the_same_model(here, library):
    first = made(library, "a", WHOLE, here, quantize="int8", draft_quantize="int8").model
    other = made(Library(here / "other"), "b", WHOLE, here, quantize="int8", draft_quantize="int8").model
    assert other.manifest.to_bytes() == first.manifest.to_bytes()


@pytest.mark.parametrize("source", ["a.gguf", "./sub/B.GGUF"])
def test_a_gguf_file_is_converted(here, library, source):
    files(here / "sub", {"B.GGUF": b"12345"})
    files(here, {"a.gguf": b"12345"})
    found = made(library, "a", f"FROM {source}", here).model
    assert (found.directory / "model.safetensors").read_bytes() == bytes([5]) * 1000
    refused(library, here, f"FROM {source}\nDRAFT {source}", "DRAFT must not reference the same local path as FROM: ")
    refused(library, here, "FROM sub", r"there is no 'sub' in ")
    refused(library, here, "FROM ./sub", r"has no config.json. Name the file: .*sub/B.GGUF")


def weights_of(made: Created) -> int:
    return (made.model.directory / "model.safetensors").read_bytes()[0]


def test_paths_are_relative_to_the_first_folder_that_has_them(here, library):
    model(here / "cwd/m", 7)
    model(here / "cwd/only", 8)
    (here / "plain").mkdir()
    tools = FakeTools({"plain": here / "d"})
    weights = {
        text: weights_of(made(library, "x", f"FROM {text}", here, here / "cwd", tools=tools))
        for text in ("m", "./m", str(here / "cwd/m"), "only", "plain")
    }  # fmt: skip
    assert weights == {"m": 1, "./m": 1, str(here / "cwd/m"): 7, "only": 8, "plain": 2}


def test_without_folders_no_path_is_read(here, library, monkeypatch):
    for path in ("./m", str(here / "m"), "../m", "~", "."):
        with pytest.raises(BadRequest, match="paths of this machine are not read here"):
            made(library, "a", f"FROM {path}")
    monkeypatch.chdir(here)
    with pytest.raises(BadRequest, match="FROM m: there is no model of that name in the library"):
        made(library, "a", "FROM m")
    made(library, "a", "FROM m", here)
    made(library, "b", "FROM a")


def test_parameters_are_merged_with_those_of_from_and_then_checked(here, library):
    made(library, "a", "FROM ./m\nPARAMETER num_predict 5\nPARAMETER top_k 3", here)
    assert made(library, "b", "FROM a\nPARAMETER num_predict -1", here).model.manifest.parameters == {"top_k": 3}
    refused(library, here, "FROM b\nPARAMETER shift true", r"\(line 2\): PARAMETER shift: shift needs max_tokens")
    pattern = r"\(line 2\): PARAMETER min_tokens: min_tokens 6 is more than max_tokens 5"
    refused(library, here, "FROM a\nPARAMETER min_tokens 6\nPARAMETER top_k 4", pattern)
    shifted = made(library, "c", "FROM a\nPARAMETER shift true", here).model.manifest
    assert shifted.parameters == {"max_tokens": 5, "shift": True, "top_k": 3}


def test_an_empty_template_is_that_of_the_weights(here, library):
    made(library, "a", "FROM ./m\nTEMPLATE x", here)
    assert made(library, "b", 'FROM a\nTEMPLATE ""', here).model.manifest.template is None
    assert made(library, "c", "FROM a", here).model.manifest.template == "x"


def test_weights_that_were_cast_can_be_quantized(here, library):
    class Casting(FakeTools):
        def kind(self, text: str) -> str:
            return text

    made(library, "a", "FROM ./m", here, quantize="bf16", tools=Casting())
    assert made(library, "b", "FROM a", here, quantize="int8", tools=Casting()).model.manifest.quantized == "int8"
    refused(library, here, "FROM b", "its weights are int8 already", quantize="bf16", tools=Casting())


@pytest.mark.parametrize("text", ["FROM a", "FROM ./m\nDRAFT a"])
def test_a_model_may_be_removed_while_its_weights_are_quantized(here, library, text):
    class Removing(FakeTools):
        def quantize(self, source, into, kind, *, draft):
            other = Library(library.root)
            if other.find("a"):
                other.remove("a")
            return super().quantize(source, into, kind, draft=draft)

    made(library, "a", "FROM ./d\nDRAFT ./m\nADAPTER ./p", here)
    kinds = {"draft_quantize": "int8"} if "DRAFT" in text else {"quantize": "int8", "draft_quantize": "int4"}
    made(library, "b", text, here, tools=Removing(), **kinds)
    assert list(map(str, library.names())) == ["b:latest"]
    assert library.resolve("b").draft
    library.check()


def test_files_whose_names_a_manifest_cannot_have_are_left_out_and_such_shards_refused(here, library):
    files(here / "m", {"_notes.txt": b"x", "read me.txt": b"x", "x" * 201 + ".txt": b"x"})
    found = made(library, "a", "FROM ./m", here).model
    assert sorted(found.manifest.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    library.check()
    index = json.dumps({"weight_map": {"a": "a b.safetensors"}}).encode()
    files(here / "s", {"config.json": b"{}", "model.safetensors.index.json": index, "a b.safetensors": b"x"})
    refused(library, here, "FROM ./s", "lists 'a b.safetensors'. Names of files of a model have")


def test_a_manifest_that_could_not_be_read_again_is_not_written(here, library):
    with library.disk.staging() as staging:
        file = staging.put(here / "m/config.json", "_x.json")
        with pytest.raises(ModelRefused, match="a:latest cannot be created: its manifest could not be read: "):
            library.commit(ModelName.parse("a"), Manifest(model=Part((file,))), staging)
    assert library.names() == ()


@pytest.mark.parametrize(
    ("modelfile", "pattern"),
    [
        ("FROM ./m\nFROM ./d", r"\(line 2\): there is a second FROM; the first is in line 1"),
        ("DRAFT ./d", "no FROM line"),
        ("FROM ./m\nDRAFT ./d\nDRAFT ./d", r"\(line 3\): there is a second DRAFT"),
        ("FROM ./m\nDRAFT ./m", r"\(line 2\): DRAFT must not reference the same local path as FROM: .*m$"),
        ("DRAFT m\nFROM ./x/../m", r"\(line 1\): DRAFT must not reference the same local path as FROM"),
        ("FROM ./m\nDRAFT ./link", r"\(line 2\): DRAFT must not reference the same local path as FROM"),
        ("FROM \nSYSTEM x", r"\(line 1\): FROM is ''; a directory, a .gguf file, or the name of a model is needed"),
        ("FROM ./nothing", r"\(line 1\): FROM ./nothing: .*No such file"),
        ("FROM nothing", r"\(line 1\): FROM nothing: there is no 'nothing' in .* no model of that name in the library"),
        ("FROM ./loop", r"\(line 1\): FROM ./loop: .*symbolic links"),
        ("FROM ./m/config.json", "is a file; a directory with config.json, or a .gguf file, is needed"),
        ("FROM " + "x" * 5000, "a directory, a .gguf file, or the name"),
        ("FROM " + "x" * 300, "FROM xx"),
        ("FROM ./m\nADAPTER ./d", r"\(line 2\): ADAPTER ./d: .* has no adapter_config.json"),
        ("FROM ./m\nADAPTER ./pickled", r"\(line 2\): .*adapter_model.bin: pickled weights can run code"),
        ("FROM ./m\nADAPTER ./marked", r"\(line 2\): ADAPTER ./marked: a marked adapter"),
        ("FROM ./m\nSYSTEM x\nDRAFT ./other", r"\(line 3\): DRAFT ./other: a marked draft"),
        ("FROM ./refused", r"\(line 1\): FROM ./refused: a marked model"),
        ("FROM ./pickle", r"has neither model.safetensors nor .*pytorch_model.bin: pickled weights can run code"),
        ("FROM ./up", r"lists '../../m/model.safetensors', which is no safetensors file of its directory"),
        ("FROM ./shards", r"lists b.safetensors, which is missing. Copy the whole model again"),
        ("FROM ./noindex", "is no index of weights files: JSONDecodeError"),
        ("FROM ./emptyindex", "lists no weights files"),
        ("FROM ./fifo", r"neither model.safetensors"),
        ("FROM ./m\nRENDERER x", r"\(line 2\): RENDERER names code that is a part of Ollama"),
        ("FROM ./m\nPARSER x", r"\(line 2\): PARSER names code"),
        ("FROM ./m\nREQUIRES 99", r"\(line 2\): the model requires kvcellar 99.0.0; this is .*Upgrade"),
        ("FROM ./m\nREQUIRES soon", r"\(line 2\): REQUIRES 'soon' is not a version of kvcellar"),
        ("FROM ./m\nPARAMETER heat 1", r"\(line 2\): there is no parameter 'heat'; there are context, "),
        ("FROM ./m\nTEMPLATE {{ if .System }}x{{ end }}", r"\(line 2\): TEMPLATE is a template of Go.*\{\{ if .System"),
        ("FROM ./m\nTEMPLATE {% for %}", r"\(line 2\): TEMPLATE is no chat template in Jinja: line 1 of it"),
    ],
)
def test_what_cannot_be_is_refused_by_line_and_nothing_has_changed(here, library, modelfile, pattern):
    (here / "link").symlink_to(here / "m")
    (here / "loop").symlink_to(here / "loop")
    (here / "x").mkdir()
    config = {"config.json": b"{}"}
    index = "model.safetensors.index.json"
    files(here / "pickled", {"adapter_config.json": b"{}", "adapter_model.bin": b""})
    files(here / "marked", {"adapter_config.json": b"{1}", "adapter_model.safetensors": b""})
    files(model(here / "other"), {"config.json": b'{"other": 1}'})
    files(model(here / "refused"), {"config.json": b'{"refused": 1}'})
    files(here / "pickle", {**config, "pytorch_model.bin": b"x"})
    files(here / "up", {**config, index: json.dumps({"weight_map": {"a": "../../m/model.safetensors"}}).encode()})
    listed = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    files(here / "shards", {**config, index: json.dumps(listed).encode(), "a.safetensors": b"x"})
    files(here / "noindex", {**config, index: b"{"})
    files(here / "emptyindex", {**config, index: b'{"weight_map": []}'})
    files(here / "fifo", config)
    os.mkfifo(here / "fifo/model.safetensors")
    refused(library, here, modelfile, pattern)
    made(library, "new", "FROM ./m\nSYSTEM old", here)
    refused(library, here, modelfile, pattern)


def test_names_and_types_are_refused_before_anything_is_read(here, library):
    for name in ("../x", "", "embedded", "a/b/c"):
        with pytest.raises(BadRequest, match=r"model"):
            made(library, name, "FROM ./nothing", here)
    refused(library, here, "FROM ./m", "--draft-quantize requires a DRAFT model", draft_quantize="int8")
    refused(library, here, "FROM ./m", "no type; there are int4, int8", quantize="nvfp4")
    made(library, "a", "FROM ./m\nDRAFT ./d", here, quantize="int8", draft_quantize="int8")
    refused(library, here, "FROM a", "its weights are int8 already", quantize="int4")
    refused(library, here, "FROM a", "its weights are int8 already", draft_quantize="int4")
    refused(library, here, "FROM ./m\nDRAFT a", "its weights are int8 already", draft_quantize="int4")


def test_shards_are_taken_with_their_index_and_nothing_else(here, library):
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"}}
    names = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "x-1.safetensors": b"1",
        "x-2.safetensors": b"2",
    }
    more = {"config.json": b"{}", "x-3.safetensors": b"3", ".hidden.json": b"{}", "tok.index.json": b"{}", "a.py": b""}
    files(here / "s", {**names, **more})
    (here / "s/sub.json").mkdir()
    found = made(library, "a", "FROM ./s", here).model
    assert {path.name for path in found.directory.iterdir()} == {*names, "config.json"}


def test_links_of_a_cache_are_followed(here, library):
    snapshot = here / "models--some--name/snapshots/1a2b"
    snapshot.mkdir(parents=True)
    (here / "m").rename(here / "models--some--name/blobs")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    found = made(library, "a", "FROM some/name", tools=FakeTools({"some/name": snapshot})).model
    assert (found.directory / "model.safetensors").read_bytes() == bytes([1]) * 1000
    assert not (found.directory / "model.safetensors").resolve().is_relative_to(here / "models--some--name")


def test_links_inside_a_directory_and_a_link_to_the_directory_are_followed(here, library):
    (here / "m/model.safetensors").rename(here / "m/real")
    (here / "m/model.safetensors").symlink_to("real")
    (here / "link").symlink_to("m")
    found = made(library, "a", "FROM ./link", here).model
    assert (found.directory / "model.safetensors").read_bytes() == bytes([1]) * 1000


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("layout", ["s", "repo/snapshots/1a2b"])
def test_links_that_lead_out_of_a_directory_are_refused(here, library, name, layout):
    """Also through `blobs`, and before the file is read."""
    (here / "secret").write_bytes((here / "m" / name).read_bytes())
    source = here / layout
    source.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(here / "m", source)
    (source / name).unlink()
    if layout == "s":
        (source / name).symlink_to(here / "secret")
    else:
        (here / "repo/blobs").mkdir()
        (here / "repo/blobs/x").symlink_to(here / "secret")
        (source / name).symlink_to("../../blobs/x")
    with pytest.raises(ModelfileError, match=rf"{name} is a link that leads out of its directory, to .*secret"):
        made(library, "a", f"FROM ./{layout}", here)
    assert not library.names()


def test_links_of_a_draft_and_of_an_adapter_are_refused_too(here, library):
    for directory, name, lines in (
        ("d", "config.json", "FROM ./m\nDRAFT ./d"),
        ("p", "adapter_config.json", "FROM ./m\nADAPTER ./p"),
    ):
        (here / directory / name).rename(here / "outside")
        (here / directory / name).symlink_to("../outside")
        with pytest.raises(ModelfileError, match="leads out of its directory"):
            made(library, "a", lines, here)
        (here / directory / name).unlink()
        (here / "outside").rename(here / directory / name)


def test_the_stages_are_reported(here, library):
    seen: list[Progress] = []
    with listening(seen.append):
        made(library, "a", "FROM ./m", here)
    stages = list(dict.fromkeys(one.stage for one in seen))
    assert stages == [
        "checking files",
        "storing config.json",
        "storing model.safetensors",
        "storing tokenizer.json",
        "writing manifest",
    ]
    assert all(0 <= one.done <= one.total for one in seen)


# -- failures -----------------------------------------------------------------------------------------------------


def count(here) -> int:
    files = Counting()
    made(Library(here / "counted", files), "a", "FROM ./m\nDRAFT ./d\nADAPTER ./p", here, quantize="int8")
    return files.done


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE)


@pytest.mark.parametrize("batch", range(8))
def test_any_operation_may_fail_once(here, batch):
    whole, options = "FROM ./m\nDRAFT ./d\nADAPTER ./p", {"quantize": "int8"}
    expected = made(Library(here / "expected"), "a", whole, here, **options).model.manifest
    for number in range(batch, count(here), 8):
        root, error = here / f"at-{number}", ERRORS[(number // 8) % 4]
        old = made(Library(root), "a", "FROM ./d", here).model.manifest if number % 3 else None
        before = tree(Library(root)) if old else {}
        files = Failing(number, error)
        with suppress(OSError, ModelfileError):
            assert made(Library(root, files), "a", whole, here, **options).model.manifest == expected, files.failed
        found = Library(root).find("a")
        assert found is None or found.manifest in (old, expected), files.failed
        if found is None or found.manifest == old:
            Library(root).collect()
            assert tree(Library(root)) == before, files.failed
        Library(root).check()


@pytest.mark.parametrize("error", ERRORS, ids=os.strerror)
def test_the_error_of_a_disk_is_raised_as_it_is(here, error):
    with pytest.raises(OSError, match=os.strerror(error)) as raised:
        made(Library(here / "new", Failing(count(here) // 3, error)), "a", "FROM ./m\nDRAFT ./d", here)
    assert raised.value.errno == error
    assert tree(Library(here / "new")) == {}


def test_short_reads_and_writes_change_nothing(here, library):
    expected = made(library, "a", WHOLE, here).model.manifest
    assert made(Library(here / "short", Short()), "a", WHOLE, here).model.manifest == expected
    Library(here / "short").check()


def test_a_source_that_changes_while_it_is_read_is_refused(here, library):
    def change(progress: Progress) -> None:
        if progress.stage == "storing model.safetensors":
            with open(here / "m/model.safetensors", "ab") as opened:
                opened.write(b"more")

    before = tree(library) if library.root.exists() else {}
    with pytest.raises(ModelRefused, match=r"model.safetensors changed while it was read"), listening(change):
        made(library, "a", "FROM ./m", here)
    assert tree(library) == before


def test_an_interrupt_leaves_nothing(here, library):
    def interrupt(progress: Progress) -> None:
        if progress.stage == "writing manifest":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        made(library, "a", WHOLE, here, quantize="int8")
    assert tree(library) == {}
