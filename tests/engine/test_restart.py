"""A model that was loaded before starts from what its load found: the same bits, without its network, and only where
nothing is different."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from kvcellar import Constraint, Engine
from kvcellar.engine.load import build, restart
from kvcellar.engine.load.restart import KIND, Restored
from kvcellar.engine.models import embedded
from kvcellar.engine.models.quantize.directory import quantize_directory
from kvcellar.engine.recording import facts
from kvcellar.engine.recording.kept import Kept
from kvcellar.errors import AdapterRefused
from kvcellar.kernels.layers import PanelWeight
from tests.engine.test_adapters import adapter
from tests.own_cache import own_cache
from tests.zoo import ARCHS

SMALL: dict[str, Any] = {"cache_bytes": 8_000_000, "threads": 1, "max_sequences": 4}
PROMPT = list(range(3, 24))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of its own, where models that were just written count as old."""
    monkeypatch.setattr(facts, "SETTLED", -(10**15))
    own_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache/kvcellar/starts"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return written("llama", tmp_path / "model")


def written(name: str, path: Path, **changes: object) -> Path:
    ARCHS[name].build(**changes).to(dtype=torch.bfloat16).save_pretrained(path)
    return path


def restored(engine: Engine) -> bool:
    return isinstance(engine._built.guest, Restored)


def answers(engine: Engine) -> list[Any]:
    """Greedy and sampled tokens with log-probabilities, beside each other, and those of a prompt."""
    how: dict[str, Any] = {"max_tokens": 9, "logprobs": 3, "ignore_eos": True}
    greedy = engine.generate([PROMPT, PROMPT[::-1] * 3, PROMPT[:2]], temperature=0, **how)
    sampled = engine.generate(PROMPT, temperature=0.9, top_p=0.9, seed=5, n=2, prompt_logprobs=1, **how)
    return [*((one.token_ids, one.choices[0].logprobs) for one in greedy), sampled.choices, sampled.prompt_logprobs]


def start(directory: Path, ask: Callable[[Engine], Any] = answers, **how: Any) -> tuple[bool, Any]:
    with Engine(directory, **SMALL | how) as engine:
        return restored(engine), ask(engine)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "qwen2",
        "lfm3",
        "qwen3-moe",  # experts
        "gpt-oss",  # with biases, stored as stacks
        "deepseek-v3",  # latents, and routers in another type
        "mamba2",
        "qwen3-next",  # gated delta rules and experts
        "granitemoehybrid",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "llama",
                "llama-rope-yarn",
                "olmo2",
                "lfm2",
                "mixtral",
                "deepseek-v2",
                "nemotron-h",
                "mamba",
                "falcon-h1",
            )
        ),
    ],
)
def test_the_second_start_needs_no_network_and_has_the_same_bits(cache: Path, tmp_path: Path, name: str) -> None:
    path = written(name, tmp_path / "model")
    was, first = start(path)
    assert not was
    tied = getattr(ARCHS[name].build().config, "tie_word_embeddings", False)
    with Engine(path, **SMALL) as engine:
        weights = engine._built.guest._model.parameters()
        assert any(isinstance(one, PanelWeight) for one in weights) == tied, "an output layer is read twice"
    with mock.patch.object(build, "_loaded", side_effect=AssertionError("it was loaded")):
        assert start(path) == (True, first)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("lfm2", "int8"),
        ("gemma3", "int4"),
        ("qwen3-moe", "int8"),
        *(pytest.param(name, kind, marks=pytest.mark.slow) for name, kind in (("llama", "mixed"), ("qwen2", "int8"))),
    ],
)
def test_weights_that_are_quantised_at_load_are_at_the_second_start(
    cache: Path, tmp_path: Path, name: str, weights: str
) -> None:
    path = written(name, tmp_path / "model")
    was, first = start(path, weights=weights)
    assert not was
    assert start(path, lambda _: None)[0] is False, "without them it is another model"
    with mock.patch.object(build, "_loaded", side_effect=AssertionError("it was loaded")):
        assert start(path, weights=weights) == (True, first)


def test_a_head_that_is_rounded_in_another_type_than_it_is_stored_in_is_loaded_each_time(
    cache: Path, tmp_path: Path
) -> None:
    path = written("gemma3", tmp_path / "model")  # bfloat16
    for dtype, again in (("float32", False), ("auto", True)):
        first, second = (start(path, lambda _: None, weights="int8", dtype=dtype) for _ in range(2))
        assert (first, second) == ((False, None), (again, None))


def test_other_source_of_the_modules_of_the_network_means_a_load(
    cache: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest_of = facts._file_digest
    assert [start(directory, lambda _: None)[0] for _ in range(2)] == [False, True]
    monkeypatch.setattr(
        facts, "_file_digest", lambda file: digest_of(file) + ("edited" if "modeling_llama" in file else "")
    )
    assert [start(directory, lambda _: None)[0] for _ in range(2)] == [False, True]


@pytest.mark.parametrize("kind", ["int4", pytest.param("mixed", marks=pytest.mark.slow)])
def test_codes_of_files_are_read_at_the_second_start(cache: Path, tmp_path: Path, kind: str) -> None:
    """Served by the kernel, with a head of 8 bits that is the embedding; dense weights that are made of codes are no
    stored ones."""
    path = tmp_path / "quantised"
    quantize_directory(written("gemma3", tmp_path / "model"), path, kind, measure=False)
    was, first = start(path)
    assert not was
    with mock.patch.object(build, "_loaded", side_effect=AssertionError("it was loaded")):
        assert start(path) == (True, first)
    assert start(path, lambda _: None, weights="dense") == start(path, lambda _: None, weights="dense") == (False, None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt2", "is not as it is stored"),
        ("longcat-flash", "its steps call the code of LongcatFlashTopkRouter (it reads a tensor"),
    ],
)
def test_what_is_loaded_each_time_says_why(
    cache: Path, tmp_path: Path, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Turned weights, and modules whose code could not be recorded."""
    path = written(name, tmp_path / "model")
    with caplog.at_level("INFO", "kvcellar.engine.models"):
        assert start(path, lambda _: None) == start(path, lambda _: None) == (False, None)
    (reason,) = {one.getMessage() for one in caplog.records if "each start loads" in one.getMessage()}
    assert why in reason


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama", "dense"), ("llama", "int4"), ("llama", "codes of the file"), ("deepseek-v3", "dense"),
        ("mamba2", "dense"), ("qwen3-next", "dense"),
    ],
)  # fmt: skip
def test_the_second_start_does_not_import_transformers(cache: Path, tmp_path: Path, name: str, weights: str) -> None:
    directory = written(name, tmp_path / "model")
    if weights == "codes of the file":
        source, directory, weights = directory, tmp_path / "quantised", "auto"
        quantize_directory(source, directory, "int8", measure=False)
    code = (
        "import sys\nfrom kvcellar import Engine\nfrom kvcellar.engine.recording import facts\n"
        f"facts.SETTLED = -(10**15)\nwith Engine({str(directory)!r}, weights={weights!r}, **{SMALL}) as engine:\n"
        f"    engine.generate({PROMPT}, max_tokens=3, temperature=0)\n"
        "print(*sorted({'transformers', 'torch._dynamo', 'sympy', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert "transformers" in found[0].stdout
    assert found[1].stdout.split() == []


@pytest.fixture
def warm(cache: Path, directory: Path) -> tuple[Path, Any]:
    """A model that was loaded, and its answers."""
    was, first = start(directory)
    assert not was
    return directory, first


def loads(directory: Path, first: Any, **how: Any) -> None:
    assert start(directory, **how) == (False, first)


def test_each_part_of_the_digest_that_differs_loads_the_model(warm: tuple[Path, Any], monkeypatch: Any) -> None:
    """Each with the same answers, then each is a start of its own."""
    directory, first = warm
    for name, other in (
        ("installed", lambda _: ["kvcellar-0.dist-info"]),  # versions of torch, transformers and others
        ("_own_source", lambda: "of other sources, kernels included"),
        ("flags", lambda: {"capability": "another CPU"}),
    ):
        with mock.patch.object(facts, name, other):
            loads(directory, first)
    with mock.patch.object(restart, "compiled_for", return_value=b"another CPU"):
        loads(directory, first)
    monkeypatch.setenv("OMP_OTHER", "1")
    loads(directory, first)
    monkeypatch.delenv("OMP_OTHER")
    loads(directory, first, max_sequences=3)
    assert start(directory) == (True, first)


def test_each_file_of_the_model_that_differs_loads_it(warm: tuple[Path, Any]) -> None:
    directory, first = warm
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        about = (directory / name).stat()
        os.utime(directory / name, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
        loads(directory, first)
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content)  # the same bytes, written again
        loads(directory, first)
    (directory / "tokenizer_config.json").write_text("{}")
    loads(directory, first)


def test_another_config_is_another_model(warm: tuple[Path, Any]) -> None:
    directory, first = warm
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    was, other = start(directory)
    assert not was
    assert other != first
    assert start(directory) == (True, other)


def test_other_weights_that_look_the_same_are_seen_by_their_logits(
    warm: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the identity of files does not show that they have changed."""
    directory, first = warm
    with mock.patch.object(facts, "identities", return_value=[["the same"]]):
        loads(directory, first)
        assert start(directory) == (True, first)
        with torch.inference_mode():
            model = ARCHS["llama"].build().to(dtype=torch.bfloat16)
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        model.save_pretrained(directory)
        was, other = start(directory)
    assert "is loaded, and not started as before: its first step has other logits than after its load" in caplog.text
    assert not was
    assert other != first


@pytest.mark.parametrize("damage", ["cut", "byte", "other", "fields", "program", "tensor", "codes", "layout"])
def test_a_damaged_file_loads_the_model_and_is_written_again(warm: tuple[Path, Any], cache: Path, damage: str) -> None:
    directory, first = warm
    (file,) = cache.iterdir()
    content, files = file.read_bytes(), Kept[Any](cache, KIND, msgspec.msgpack.encode, msgspec.msgpack.decode)
    kept = files.read(file.stem)
    assert kept is not None
    weights, missing = kept["weights"], {"dtype": "bfloat16", "name": "missing"}
    tensors = weights["tensors"]
    if damage in ("cut", "byte", "other"):
        half = len(content) // 2
        new = {"cut": content[:half], "byte": content[:half] + b"\0\1" + content[half + 2 :], "other": b"kvcellar x\n"}
        file.write_bytes(new[damage])
    else:
        changes: dict[str, Any] = {
            "fields": {"measures": {"a": "b"}},
            "program": {"programs": b"\x80"},
            "codes": {
                "weights": weights | {"tensors": {name: one | {"kind": "int4"} for name, one in tensors.items()}}
            },
            "tensor": {"weights": weights | {"tensors": tensors | {"model.norm.weight": missing}}},
            "layout": {"groups": [kept["groups"][0] | {"layout": ["Sliding", [0]]}]},
        }
        files.write(file.stem, kept | changes[damage])
    loads(directory, first)
    assert start(directory) == (True, first)


def test_what_needs_the_network_builds_it(warm: tuple[Path, Any], tmp_path: Path) -> None:
    """An adapter, after which the same text comes without it, and from steps that are recorded."""
    directory, first = warm
    path = adapter(ARCHS["llama"].build(), tmp_path / "adapter")

    def adapted(engine: Engine) -> Any:
        engine.adapters.add("a", path)
        after = engine.generate(PROMPT, max_tokens=5, temperature=0, adapter="a").token_ids
        engine.check()
        assert engine.stats().recording.refused is None
        return after, answers(engine)

    was, found = start(directory, adapted)
    assert was
    assert found == start(directory, adapted, pin_share=0.4)[1]
    assert found[1] == first


def test_a_network_of_another_shape_is_refused_and_the_engine_goes_on(warm: tuple[Path, Any], tmp_path: Path) -> None:
    directory, first = warm
    path, other = adapter(ARCHS["llama"].build(), tmp_path / "adapter"), written("gemma3", tmp_path / "other")
    with Engine(directory, **SMALL) as engine:
        with mock.patch.object(build, "_loaded", lambda _, settings: load(other, settings)):
            with pytest.raises(Exception, match="another memory") as raised:
                engine.adapters.add("a", path)
        assert not isinstance(raised.value, AssertionError | AdapterRefused)
        assert answers(engine) == first
        engine.adapters.add("a", path)
        assert answers(engine) == first


load = build._loaded


def test_texts_and_statistics_are_those_of_the_first_start(cache: Path, tmp_path: Path) -> None:
    """A constrained answer, hidden states, the capacity."""
    path = written("llama", tmp_path / "model", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((embedded.path() / name).read_bytes())

    def asked(engine: Engine) -> Any:
        answer = engine.generate("def", max_tokens=20, temperature=0, constraint=Constraint.regex("[0-9]{3,5}x")).text
        return answer, engine.capacity(), engine.model

    (was, first), (again, second) = start(path, asked), start(path, asked)
    assert (was, again) == (False, True)
    assert first == second
