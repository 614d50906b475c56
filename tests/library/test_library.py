"""Models are created, found, copied, removed; what no model has is removed."""

import pytest

from kvcellar.errors import BadRequest, ModelNotFound, ModelRefused
from kvcellar.library.library import Library
from tests.library.made import adapter, made, model, tree


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path / "library")


def test_a_model_of_a_directory_is_a_directory_of_the_same_files(tmp_path, library):
    model(tmp_path / "m", 1)
    (tmp_path / "m/code.py").write_text("x")
    (tmp_path / "m/pytorch_model.bin").write_bytes(b"x")
    found = made(library, "a", "FROM ./m", tmp_path).model
    names = {path.name: path.read_bytes() for path in found.directory.iterdir()}
    assert names.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert all(content == (tmp_path / "m" / name).read_bytes() for name, content in names.items())
    assert found == library.resolve("a") == library.find("A:Latest")
    library.check()


def test_names_do_not_read_the_models_and_an_absent_library_has_none(tmp_path, library):
    assert library.names() == ()
    assert library.find("a") is None
    assert not library.root.exists(), "reading creates nothing"
    model(tmp_path / "m")
    for name in ("b:2", "a", "o/c", "b"):
        made(library, name, "FROM ./m", tmp_path)
    (library.root / "manifests/b/.x.json").write_text("no model")
    (library.root / "manifests/stray").write_text("no model")
    assert [str(name) for name in library.names()] == ["a:latest", "b:2", "b:latest", "o/c:latest"]


def test_models_share_files_and_the_last_one_takes_them_along(tmp_path, library):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    before = tree(library)
    made(library, "b", "FROM a\nSYSTEM x", tmp_path)
    assert len(list((library.root / "blobs").iterdir())) == 3
    library.remove("b")
    assert tree(library) == before
    library.remove("a")
    assert tree(library) == {}
    assert [path.name for path in sorted(library.root.rglob("*"))] == ["blobs", "manifests", "tmp", "uploads", "views"]


def test_a_removed_model_stays_readable_where_it_is_open(tmp_path, library):
    model(tmp_path / "m", 7)
    found = made(library, "a", "FROM ./m", tmp_path).model
    with open(found.directory / "model.safetensors", "rb") as opened:
        library.remove("a")
        assert opened.read() == bytes([7]) * 1000


def test_a_copy_is_the_same_model_and_replaces(tmp_path, library):
    model(tmp_path / "m", 1)
    model(tmp_path / "n", 2)
    one = made(library, "a", "FROM ./m", tmp_path).model
    made(library, "b", "FROM ./n", tmp_path)
    library.copy("a", "b")
    assert library.resolve("b").id == one.id
    assert len(list((library.root / "blobs").iterdir())) == 3, "the files of the replaced model are removed"
    library.check()


def test_names_that_differ_in_case_are_one_name(tmp_path, library):
    model(tmp_path / "m")
    made(library, "Owner/Model", "FROM ./m", tmp_path)
    before = tree(library)
    for text in ("owner/model", "Owner/Model:LATEST"):
        with pytest.raises(BadRequest, match="'Owner/Model:latest', and names that differ in case only are one name"):
            made(library, text, "FROM ./m", tmp_path)
        with pytest.raises(BadRequest, match="differ in case only"):
            library.copy("owner/model", text)
        assert library.resolve(text).name == "Owner/Model:latest"
    assert tree(library) == before
    library.remove("OWNER/model")
    assert library.names() == ()


def test_what_is_not_there_is_named_with_what_is(tmp_path, library):
    with pytest.raises(ModelNotFound, match=r"no model 'x:latest' in the library .*It has none"):
        library.resolve("x")
    model(tmp_path / "m")
    for i in range(10):
        made(library, f"m{i}", "FROM ./m", tmp_path)
    with pytest.raises(ModelNotFound, match=r"It has m0:latest, .* and 2 more"):
        library.remove("x")
    with pytest.raises(BadRequest, match="not the name of a model"):
        library.resolve("../x")
    assert library.find("../x") is None


def test_adapters_change_the_model_and_not_its_base(tmp_path, library):
    model(tmp_path / "m")
    adapter(tmp_path / "p", 1)
    adapter(tmp_path / "q", 2)
    plain = made(library, "a", "FROM ./m", tmp_path).model
    both = made(library, "b", "FROM ./m\nADAPTER ./p\nADAPTER ./q", tmp_path).model
    draft = made(library, "c", "FROM ./m\nDRAFT ./d", tmp_path, **draft_at(tmp_path)).model
    assert plain.base_id == both.base_id != draft.base_id
    assert len({plain.id, both.id, draft.id}) == 3
    assert [path.name for path in both.adapters] == ["0", "1"]
    assert (both.adapters[1] / "adapter_model.safetensors").read_bytes() == bytes([2]) * 50
    assert draft.draft is not None
    assert (draft.draft / "config.json").is_file()


def draft_at(tmp_path):
    model(tmp_path / "d", 9)
    return {}


# -- damage -----------------------------------------------------------------------------------------------------------


def damaged(library: Library, name: str, content: bytes) -> str:
    """Replace the content of the weights' blob; returns its name."""
    file = library.resolve(name).manifest.model.files[1]
    path = library.disk.blob(file)
    path.chmod(0o600)
    path.write_bytes(content)
    return file.blob


def test_a_blob_of_another_size_is_refused_by_name_and_created_again(tmp_path, library):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    blob = damaged(library, "a", b"x")
    with pytest.raises(ModelRefused, match=rf"a:latest is damaged: model.safetensors: {blob} has 1 bytes, not 1000. "
                       r"Create it again from ./m, or remove it: kvcellar rm a:latest"):  # fmt: skip
        library.resolve("a")
    made(library, "a", "FROM ./m", tmp_path)
    library.check()


def test_a_blob_of_other_content_is_found_by_verify_and_replaced_when_created_again(tmp_path, library):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    blob = damaged(library, "a", b"x" * 1000)
    (found,) = library.verify("a")
    assert found.startswith(f"model.safetensors: {blob} has other content: sha256:")
    made(library, "b", "FROM ./m", tmp_path)
    library.check()


def test_a_view_is_made_again_from_verified_blobs(tmp_path, library):
    model(tmp_path / "m", 1)
    found = made(library, "a", "FROM ./m", tmp_path).model
    (found.directory / "model.safetensors").unlink()
    assert library.resolve("a") == found
    (found.directory / "planted.json").write_text("{}")
    assert library.resolve("a") == found
    assert sorted(path.name for path in found.directory.iterdir()) == sorted(found.manifest.files)
    damaged(library, "a", b"x" * 1000)
    library.resolve("a")  # sizes are right, and the view is there
    (found.directory / "config.json").unlink()
    with pytest.raises(ModelRefused, match=r"a:latest is damaged: model.safetensors"):
        library.resolve("a")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"kvcellar": 2}',
        b"\xff",
        b"[" * 100000,
        b'{"kvcellar": 1, "model": {"files": 3}}',
    ],
)
def test_a_damaged_manifest_is_refused_by_name_and_keeps_blobs_until_it_is_removed(tmp_path, library, content):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    made(library, "b", "FROM ./m\nSYSTEM x", tmp_path)
    (library.root / "manifests/a/latest.json").chmod(0o600)
    (library.root / "manifests/a/latest.json").write_bytes(content)
    with pytest.raises(ModelRefused, match=r"the manifest of a:latest is damaged: .*kvcellar rm a:latest"):
        library.resolve("a")
    library.remove("b")
    assert len(list((library.root / "blobs").iterdir())) == 3
    library.remove("a")
    assert tree(library) == {}


def test_a_view_in_use_is_not_replaced_when_its_model_is_created_again(tmp_path, library):
    model(tmp_path / "m", 1)
    before = made(library, "a", "FROM ./m", tmp_path).model.directory.stat().st_ino
    assert made(library, "a", "FROM ./m", tmp_path).model.directory.stat().st_ino == before


def test_numbers_that_are_none_are_no_manifest(tmp_path, library):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m\nPARAMETER temperature 0.5", tmp_path)
    file = library.root / "manifests/a/latest.json"
    content = file.read_bytes().replace(b"0.5", b"NaN")
    file.chmod(0o600)
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match="NaN is no number of JSON"):
        library.resolve("a")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/b", ".", "", "a\\b"])
@pytest.mark.parametrize("key", ["path", "digest"])
def test_a_manifest_leads_nowhere_else(tmp_path, library, path, key):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    file = library.root / "manifests/a/latest.json"
    old = b'"tokenizer.json"' if key == "path" else library.resolve("a").manifest.model.files[2].digest.encode()
    content = file.read_bytes().replace(old, b'"%s"' % path.encode() if key == "path" else path.encode())
    file.chmod(0o600)
    file.write_bytes(content)
    with pytest.raises(ModelRefused, match="the manifest of a:latest is damaged"):
        library.resolve("a")


def test_links_and_other_things_in_place_of_blobs_are_refused(tmp_path, library):
    model(tmp_path / "m", 1)
    made(library, "a", "FROM ./m", tmp_path)
    blob = library.root / "blobs" / library.resolve("a").manifest.model.files[1].blob
    blob.unlink()
    blob.symlink_to(tmp_path / "m/model.safetensors")
    with pytest.raises(ModelRefused, match="is not a regular file"):
        library.resolve("a")
    library.collect()
    assert (tmp_path / "m/model.safetensors").exists()


def test_a_library_that_others_can_write_to_is_not_written_to(tmp_path, library):
    model(tmp_path / "m")
    library.root.mkdir(mode=0o777)
    library.root.chmod(0o777)
    with pytest.raises(Exception, match=r"others can write into .*KVCELLAR_MODELS"):
        made(library, "a", "FROM ./m", tmp_path)
    assert list(library.root.iterdir()) == []
