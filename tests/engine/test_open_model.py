"""A name of the library is served as the model was created: its files, draft, parameters, template and messages."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.engine.models import embedded
from kvcellar.errors import ModelNotFound, ModelRefused
from kvcellar.library.create import create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import parse
from kvcellar.verify.run import verify
from tests.zoo import ARCHS

LIMITS: Any = {"cache_bytes": 16_000_000, "context": 256, "max_sequences": 4, "threads": 1}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class NoTools:
    """Directories are taken as they are."""

    def find(self, name: str) -> Path:
        if name == "embedded":
            return embedded.path()
        raise ModelNotFound(name)

    def kind(self, text: str) -> str:
        return text

    def gguf(self, file: Path, into: Path, *, codes: bool) -> None:
        raise ModelRefused("no GGUF")

    def quantize(self, source: Path, into: Path, kind: str, *, draft: bool) -> Mapping[str, Any]:
        raise ModelRefused("no quantization")

    def check_model(self, directory: Path) -> None: ...

    def check_draft(self, directory: Path, draft: Path) -> None: ...

    def check_adapter(self, directory: Path, adapter: Path) -> None: ...


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    return Library(tmp_path / "models")


def created(library: Library, name: str, text: str, folder: Path) -> None:
    create(library, name, parse(text), tools=NoTools(), folders=[folder])


def test_a_library_model_has_its_own_defaults_and_the_caller_has_the_last_word(library: Library, tmp_path: Path):
    parameters = "PARAMETER temperature 0.25\nPARAMETER top_k 7\nPARAMETER stop END\nPARAMETER num_ctx 200"
    created(library, "mine", f"FROM embedded\n{parameters}\n", tmp_path)
    with Engine("mine", cache_bytes=16_000_000, threads=1) as engine:
        assert (engine.model.name, engine.model.context) == ("mine", 200)
        found = engine.model.default_sampling
        assert (found.temperature, found.top_k, found.stop) == (0.25, 7, ("END",))
        assert found.top_p == 0.95, "of its files"
        assert engine.params(temperature=1.0).temperature == 1.0
    with Engine("mine:latest", **{**LIMITS, "context": 128}) as engine:
        assert engine.model.context == 128


def test_its_system_prompt_and_examples_come_before_every_conversation(library: Library, tmp_path: Path):
    text = f'FROM embedded\nTEMPLATE """{TEMPLATE}"""\nSYSTEM be short\nMESSAGE user two?\nMESSAGE assistant 2\n'
    created(library, "owner/mine:v1", text, tmp_path)
    user = [{"role": "user", "content": "three?"}]
    with Engine("owner/mine:v1", **LIMITS) as engine:
        assert engine.decode(engine.render(user)) == "<system>be short<user>two?<assistant>2<user>three?"
        own = [{"role": "system", "content": "be long"}, *user]
        assert engine.decode(engine.render(own)) == "<system>be long<user>two?<assistant>2<user>three?"
        with engine.session() as session:
            answered = session.send("three?", max_tokens=3, temperature=0.0)
        assert answered.usage.prompt_tokens == len(engine.render(user))


def test_it_answers_as_its_directory_does(library: Library, tmp_path: Path):
    network = ARCHS["gemma3"].build()
    network.save_pretrained(tmp_path / "source")
    created(library, "plain", "FROM ./source\n", tmp_path)
    prompt, asked = list(range(5, 45)), {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with Engine(tmp_path / "source", **LIMITS) as one, Engine("plain", **LIMITS) as other:
        assert other.generate(prompt, **asked).token_ids == one.generate(prompt, **asked).token_ids
    assert verify("plain", tokens=48).holds


def test_its_draft_is_used_unless_the_caller_names_another_or_none(library: Library, tmp_path: Path):
    ARCHS["llama"].build().save_pretrained(tmp_path / "target")
    ARCHS["llama"].build(num_hidden_layers=1).save_pretrained(tmp_path / "small")
    created(library, "fast", "FROM ./target\nDRAFT ./small\nPARAMETER draft_num_predict 3\n", tmp_path)
    asked = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    with Engine("fast", draft="none", **LIMITS) as engine:
        assert engine.stats().speculation is None
        wanted = engine.generate([5, 6, 7], **asked).token_ids
    with Engine("fast", **LIMITS) as engine:
        assert engine.stats().speculation.deepest == 3
        assert engine.generate([5, 6, 7], **asked).token_ids == wanted
    with Engine("fast", draft="ngram", **LIMITS) as engine:
        assert engine.stats().speculation.drafter == "ngram"
    with Engine("fast", draft_depth=2, **LIMITS) as engine:
        assert engine.stats().speculation.deepest == 2


def test_a_directory_has_precedence_over_a_name_of_the_library(library: Library, tmp_path: Path, monkeypatch):
    created(library, "twice", "FROM embedded\n", tmp_path)
    ARCHS["llama"].build().save_pretrained(tmp_path / "twice")
    monkeypatch.chdir(tmp_path)
    with Engine("twice", **LIMITS) as engine:
        assert engine.model.architecture == "LlamaForCausalLM"


def test_a_name_that_is_nowhere_is_refused_with_what_to_do(library: Library):
    with pytest.raises(ModelNotFound, match="no directory 'missing'"):
        Engine("missing", **LIMITS)


def test_a_damaged_model_is_refused_by_name(library: Library, tmp_path: Path):
    created(library, "hurt", "FROM embedded\n", tmp_path)
    blob = next(path for path in (library.root / "blobs").iterdir() if path.stat().st_size > 1 << 20)
    blob.chmod(0o600)
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(ModelRefused, match=rf"hurt:latest is damaged: .*{blob.name}"):
        Engine("hurt", **LIMITS)


def test_a_context_that_the_model_is_not_made_for_is_refused(library: Library, tmp_path: Path):
    created(library, "long", "FROM embedded\nPARAMETER num_ctx 9999999\n", tmp_path)
    with pytest.raises(BadRequest, match="context is 9999999; this model is"):
        Engine("long", cache_bytes=16_000_000, threads=1)


def test_what_needs_a_tokenizer_is_refused_without_one(library: Library, tmp_path: Path):
    ARCHS["llama"].build().save_pretrained(tmp_path / "bare")
    for line, what in (('TEMPLATE """x"""', "chat template"), ("PARAMETER stop END", "stop texts")):
        created(library, "bare", f"FROM ./bare\n{line}\n", tmp_path)
        with pytest.raises(ModelRefused, match=f"bare was created with {what}, which need a tokenizer"):
            Engine("bare", **LIMITS)
