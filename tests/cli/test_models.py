"""`kvcellar create`, `list`, `show`, `cp` and `rm` on the library of the user."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcellar.cli import library as listing
from kvcellar.engine.models import embedded
from kvcellar.library.library import Library
from tests.cli.command import Ran, kvcellar
from tests.library.made import files, made
from tests.zoo import ARCHS

MODELFILE = 'FROM ./m\nPARAMETER temperature 0\nPARAMETER stop "a b "\nSYSTEM be brief\nLICENSE MIT\nLICENSE BSD\n'


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    ARCHS["llama"].build(max_position_embeddings=2048).save_pretrained(path)
    return path


@pytest.fixture
def library(tmp_path, directory, monkeypatch) -> Library:
    """The library of the user; the working directory has a model `m` and a Modelfile."""
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/m").symlink_to(directory)
    (tmp_path / "work/Modelfile").write_text(MODELFILE)
    monkeypatch.chdir(tmp_path / "work")
    return Library(tmp_path / "models")


def run(*words: str, code: int = 0, stdin: bytes = b"") -> Ran:
    ran = kvcellar(*words, stdin=stdin)
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    return ran


def test_a_model_is_created_listed_shown_copied_and_removed(library):
    made = json.loads(run("create", "a", "--json").out)
    assert made["architecture"] == "llama"
    assert made["context_length"] == 2048
    assert made["parameters"] == {"temperature": 0.0, "stop": ["a b "]}
    assert made["notes"] == []
    model = library.resolve("a")
    assert made["id"] == model.id
    run("cp", "a", "owner/b:1")
    listed = json.loads(run("list", "--json").out)
    assert [one["name"] for one in listed["models"]] == ["a:latest", "owner/b:1"]
    assert {one["id"] for one in listed["models"]} == {model.id}
    rows = run("ls").out.splitlines()
    assert [row.split()[0] for row in rows] == ["NAME", "a:latest", "owner/b:1"]
    assert rows[1].split()[1] == model.id[:12]
    assert run("rm", "a", "owner/b:1").out == "removed a\nremoved owner/b:1\n"
    assert library.names() == ()


def test_the_parts_of_a_model_are_shown(library):
    run("create", "a")
    text = run("show", "a").out
    for part in ("architecture       llama", "temperature          0.0", "  be brief", "  MIT", "  BSD"):
        assert part in text
    assert run("show", "a", "--system").out == "be brief\n"
    assert run("show", "a", "--license").out == "MIT\n\nBSD\n"
    assert run("show", "a", "--parameters").out == 'stop                 "a b "\ntemperature          0.0\n'
    assert "a:latest has no template" in run("show", "a", "--template", code=1).err
    assert json.loads(run("show", "a", "--json").out)["system"] == "be brief"
    assert "exclude each other" in run("show", "a", "--json", "--system", code=2).err


def test_a_modelfile_that_is_shown_creates_the_same_model(library):
    first = json.loads(run("create", "a", "--json").out)
    shown = run("show", "a", "--modelfile").out
    assert shown.startswith('# a:latest. It was created from "./m".\nFROM a:latest\n')
    again = json.loads(run("create", "b", "-f", "-", "--json", stdin=shown.encode()).out)
    for name in ("base_id", "parameters", "system", "licenses", "files"):
        assert again[name] == first[name], name


def test_without_a_modelfile_the_model_of_the_working_directory_is_taken(library, directory, monkeypatch):
    monkeypatch.chdir(directory)
    run("create", "a")
    assert library.resolve("a").manifest.source == "."
    monkeypatch.chdir(directory.parent)
    assert "there is neither a Modelfile nor a model in" in run("create", "a", code=2).err


def test_the_embedded_model_is_a_source_with_a_template(library):
    run("create", "small", "-f", "-", stdin=b"FROM embedded\nPARAMETER num_gpu 1")
    template = json.loads((embedded.path() / "tokenizer_config.json").read_text())["chat_template"]
    assert run("show", "small", "--template").out == template + "\n"
    assert (library.resolve("small").directory / "mtp.safetensors").is_file()


def test_notes_go_to_stderr(library):
    ran = run("create", "small", "-f", "-", stdin=b"FROM embedded\nPARAMETER num_gpu 1")
    assert ran.err == "note: PARAMETER num_gpu is not used: kvcellar has no such setting of a model\n"
    assert ran.out.startswith("created small:latest, ")


def test_a_name_that_is_a_path_here_too_is_noted(library):
    ran = run("create", "m")
    assert ran.err == "note: m is also a path here, which has precedence; m:latest names the model\n"


def test_a_type_that_there_is_not_is_an_error_of_its_option(library):
    assert "Invalid value for '--quantize' / '-q': weights cannot" in run("create", "a", "-q", "x", code=2).err
    ran = run("create", "a", "--quantize-draft", "x", code=2)
    assert "Invalid value for '--draft-quantize' / '--quantize-draft': weights cannot" in ran.err
    assert "--draft-quantize requires a DRAFT model" in run("create", "a", "--draft-quantize", "int8", code=2).err


@pytest.mark.parametrize(
    ("modelfile", "message"),
    [
        ("FROM ./m\nBAD x", "(line 2): command must be one of"),
        ("FROM ./m\nDRAFT embedded", "(line 2): DRAFT embedded: it does not fit the target as a draft. "),
        ("FROM ./m\nDRAFT m", "(line 2): DRAFT must not reference the same local path as FROM"),
        ("FROM owner/name", "(line 1): FROM owner/name: there is no 'owner/name' in "),
        ("FROM ./t", "(line 1): FROM ./t: model.safetensors is not a whole safetensors file"),
    ],
)
def test_what_cannot_be_created_is_refused_in_one_line(library, modelfile, message):
    Path("t").mkdir()
    Path("t/config.json").write_bytes(Path("m/config.json").read_bytes())
    Path("t/model.safetensors").write_bytes(Path("m/model.safetensors").read_bytes()[:-1])
    before = run("list", "--json").out
    ran = run("create", "a", "-f", "-", code=1, stdin=modelfile.encode())
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert run("list", "--json").out == before


def test_damage_is_found_by_list(library):
    run("create", "a")
    run("create", "b", "-f", "-", stdin=b"FROM a\nSYSTEM x")
    blob = library.disk.blob(library.resolve("a").manifest.model.files[-1])
    blob.chmod(0o600)
    blob.write_bytes(bytes(blob.stat().st_size))
    run("list")
    ran = run("list", "--verify", code=1)
    assert ran.err.count("has other content") == 2
    assert "b:latest is damaged: model.safetensors" in ran.err
    run("create", "a")
    run("list", "--verify")
    (library.root / "manifests/a/latest.json").chmod(0o600)
    (library.root / "manifests/a/latest.json").write_text("{")
    found = json.loads(run("list", "--json", code=1).out)["models"]
    assert "the manifest of a:latest is damaged" in found[0]["damage"][0]
    assert found[1]["damage"] == []


def test_names_that_are_not_there_are_refused(library):
    for words in (("show", "a"), ("rm", "a"), ("cp", "a", "b")):
        assert "there is no model 'a:latest' in the library" in run(*words, code=1).err
    assert "is not the name of a model" in run("rm", "../x", code=1).err


def test_a_model_that_is_removed_while_models_are_listed_is_left_out(tmp_path, monkeypatch):
    class Removing(Library):
        def modified(self, text: str) -> float:
            if text == "a:latest":
                self.remove(text)
            return super().modified(text)

    files(tmp_path / "m", {"config.json": b"{}", "model.safetensors": b"x"})
    for name in "ab":
        made(Library(tmp_path / "models"), name, "FROM ./m", tmp_path)
    monkeypatch.setattr(listing, "library", lambda: Removing(tmp_path / "models"))
    ran = CliRunner().invoke(listing.list_command, ["--json", "--quiet"])
    assert [one["name"] for one in json.loads(ran.stdout)["models"]] == ["b:latest"]
