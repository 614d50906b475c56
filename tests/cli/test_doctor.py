"""`kvcellar doctor`: the description of a model as text and as JSON, or the reason of its refusal."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvcellar import Engine
from kvcellar.engine.load.capacity import sized
from kvcellar.memory.attention import choose
from kvcellar.memory.attention.reference import Reference
from kvcellar.verify import diagnosis
from tests.cli.command import kvcellar
from tests.zoo import ARCHS

SMALL = ("--cache-bytes", "1M", "--threads", "1", "--step-tokens", "32", "--max-sequences", "4", "--record", "off")
SMALL_ENGINE = {"cache_bytes": 10**6, "threads": 1, "step_tokens": 32, "max_sequences": 4, "record": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def make(name):
        path = tmp_path_factory.mktemp(name)
        ARCHS[name].build().save_pretrained(path)
        return str(path)

    return make


def test_the_text_describes_the_model(folder):
    path = folder("gemma3")
    ran = kvcellar("doctor", path, "--no-kv-quality", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    with Engine(path, **SMALL_ENGINE) as engine:
        stats, capacity = engine.stats(), engine.capacity()
    for group in stats.groups:
        assert f"group {group.name}: {group.layers} layers" in ran.out
        assert f"{group.cells} cells, attention by {group.backend}" in ran.out
    assert f"tokens fit in {stats.cache_bytes} bytes" in ran.out
    assert capacity.split(" tokens")[0] in ran.out
    for words in (
        "Gemma3ForCausalLM",
        "float32 on cpu",
        "context 256",
        "served flat",
        "no text",
        "per token in all groups",
    ):
        assert words in ran.out


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({}, "temperature 1 (its files set nothing else)"),
        ({"temperature": 0.6, "top_k": 20}, "temperature 0.6, top_k 20 (its generation config)"),
        ({"do_sample": False, "top_k": 20}, "greedy, temperature 0 (do_sample is false in its generation config)"),
    ],
    ids=str,
)
def test_how_a_request_without_sampling_parameters_chooses_tokens_is_printed_with_the_reason(folder, files, line):
    path = folder("llama")
    (Path(path) / "generation_config.json").write_text(json.dumps(files))
    assert f"  default sampling: {line}\n" in kvcellar("doctor", path, "--no-kv-quality", *SMALL).out


def test_bytes_are_printed_exactly_and_with_a_unit(folder):
    output = kvcellar("doctor", folder("llama"), "--kv-quality", *SMALL).out
    assert "of 1000000 bytes (1 MB), which is cache_bytes" in output
    for count, rounded in re.findall(r"(\d+) bytes( \([\d.]+ [kMGT]B\))?", output):
        assert f"{count} bytes{rounded}" == sized(int(count))


@pytest.mark.parametrize(
    ("count", "printed"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1000 bytes (1 kB)"),
        (999_499, "999499 bytes (999 kB)"),
        (999_500, "999500 bytes (1 MB)"),
        (27_523_328, "27523328 bytes (27.5 MB)"),
        (2 * 10**9, "2000000000 bytes (2 GB)"),
        (1_234 * 10**12, "1234000000000000 bytes (1.23e+03 TB)"),
    ],
)
def test_sizes_have_three_digits(count, printed):
    assert sized(count) == printed


def test_json_has_the_same_in_numbers(folder):
    path = folder("gpt-oss")
    ran = kvcellar("doctor", path, "--json", "--no-kv-quality", *SMALL)
    assert ran.code == 0
    (line,) = ran.out.splitlines()
    report = json.loads(line)
    with Engine(path, **SMALL_ENGINE) as engine:
        stats = engine.stats()
    assert report["architecture"] == "GptOssForCausalLM"
    assert (report["mode"], report["context"], report["vocab_size"]) == ("flat", 256, 101)
    assert report["difference"] <= report["bound"]
    assert report["cache_bytes"] == stats.cache_bytes <= 10**6
    assert [(g["name"], g["layers"], g["cells"]) for g in report["groups"]] == [
        (group.name, group.layers, group.cells) for group in stats.groups
    ]
    assert report["bytes_per_token"] == sum(group["bytes_per_cell"] for group in report["groups"])


def test_the_reason_for_solo_is_printed(folder):
    ran = kvcellar("doctor", folder("bloom"), "--no-kv-quality", *SMALL)
    assert ran.code == 0
    assert "served solo" in ran.out
    assert "not flat, because" in ran.out


def test_an_attention_backend_can_be_named(folder):
    report = json.loads(
        kvcellar("doctor", folder("llama"), "--json", "--no-kv-quality", "--attention", "reference", *SMALL).out
    )
    assert [group["backend"] for group in report["groups"]] == ["reference"]


@pytest.mark.parametrize("options", [(), ("--attention", "reference"), ("--kv-dtype", "int8")])
def test_every_backend_is_listed_for_every_group(folder, monkeypatch, options):
    class Picky(Reference):
        name = "picky"

        def refuse(self, spec):
            return f"{spec.kv_heads} KV heads are too few"

    every = (*choose.backends(), Picky())  # after the one that is chosen
    monkeypatch.setattr(choose, "backends", lambda: every)
    monkeypatch.setattr(diagnosis, "backends", lambda: every)
    path = folder("gemma3")
    report = json.loads(kvcellar("doctor", path, "--json", "--no-kv-quality", *options, *SMALL).out)
    output = kvcellar("doctor", path, "--no-kv-quality", *options, *SMALL).out
    assert len(report["groups"]) == 2
    for group in report["groups"]:
        assert list(group["verdicts"]) == [backend.name for backend in every]
        assert (group["verdicts"]["sdpa"], group["verdicts"]["reference"]) == (None, None)
        assert "KV heads are too few" in group["verdicts"]["picky"]
        first = next(name for name, refused in group["verdicts"].items() if refused is None)
        assert group["backend"] == ("reference" if "--attention" in options else first)
    able = sum(verdict is None for verdict in report["groups"][0]["verdicts"].values())
    counts = {"    picky: refused: ": 2, ": chosen\n": 2, ": supported\n": 2 * (able - 1)}
    assert {words: output.count(words) for words in counts} == counts


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_refused_model_prints_one_line(folder, form):
    ran = kvcellar("doctor", folder("rwkv"), *form, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("kvcellar: ")
    assert "Traceback" not in line


def test_missing_weights_are_refused(folder):
    path = folder("llama")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    ran = kvcellar("doctor", path, *SMALL)
    assert ran.code == 1
    assert "the weights do not fit the config" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_context_shift_of_recurrent_models_recomputes(monkeypatch):
    calls = []
    monkeypatch.setattr(diagnosis, "backends", lambda: calls.append(1) or choose.backends())
    given = diagnosis.Settings(cache_bytes=10**6, threads=1)
    found = diagnosis.diagnose(ARCHS["lfm3"].build(), given, kv_quality=False)
    assert len(found.groups) == 2
    assert len(calls) == 1, "each list of backends looks for a compiler again"
    (shift,) = (note for note in found.notes if note.startswith("context shift"))
    assert "by recomputing" in shift
    assert "recurrent layers" in shift


def test_bytes_of_recurrent_state_are_per_sequence(folder):
    small = ("--cache-bytes", "4M", "--context", "64", "--step-tokens", "32", "--max-sequences", "64", *SMALL[-2:])
    path = folder("mamba2")
    report = json.loads(kvcellar("doctor", path, "--json", *small).out)
    rows = report["recurrent"]
    assert rows["bytes"] == (rows["rows"] + 1) * rows["bytes_per_row"] == report["cache_bytes"]
    assert 0 < report["sequences"] < 64
    output = kvcellar("doctor", path, *small).out
    assert f"{sized(rows['bytes_per_row'])} per sequence of any length" in output
    assert f"{report['sequences']} sequences of any length fit" in output
    assert f"{report['sequences']} completions at once, not 64" in output
    assert "per token" not in output


def test_a_solo_model_uses_its_own_attention(folder):
    path = folder("bloom")
    output = kvcellar("doctor", path, "--no-kv-quality", *SMALL).out
    assert "attention by the model itself" in output
    assert ": chosen" not in output
    report = json.loads(kvcellar("doctor", path, "--json", "--no-kv-quality", *SMALL).out)
    assert [group["backend"] for group in report["groups"]] == [None]


SMALLER = {"num_hidden_layers": 1}
CHECKS = ["verification", "tokenizer", "vocabulary", "end tokens", "size", "context", "device"]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Directories of a model, of a draft that fits it, and of one that does not."""
    made = {"model": {}, "fits": SMALLER, "other": {**SMALLER, "vocab_size": 64, "eos_token_id": 5}}
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in made}
    for name, changes in made.items():
        ARCHS["llama"].build(**changes).save_pretrained(paths[name])
    return paths


def test_a_draft_that_fits_is_described(drafts):
    asked = ("doctor", drafts["model"], "--draft", drafts["fits"], "--no-kv-quality", *SMALL)
    ran = kvcellar(*asked, "--draft-depth", "3")
    assert (ran.code, ran.err) == (0, "")
    name = Path(drafts["fits"]).name
    assert f"draft {name} fits: up to 3 drafts of a completion in a step" in ran.out
    rows = re.findall(r"^    (\S[a-z ]*?) +yes  ", ran.out, re.M)
    assert rows == CHECKS
    found = json.loads(kvcellar(*asked, "--json").out)["draft"]
    assert (list(found["found"]), found["refused"], found["deepest"]) == (CHECKS, {}, 8)
    assert 0 < found["cache_bytes"] <= 500_000
    assert found["tokens"] > 2


def test_a_draft_that_does_not_fit_is_described_with_every_reason(drafts):
    asked = ("doctor", drafts["model"], "--draft", drafts["other"], "--no-kv-quality", *SMALL)
    ran = kvcellar(*asked)
    assert ran.code == 1
    assert f"draft {Path(drafts['other']).name} does not fit" in ran.out
    assert re.findall(r"^    (\S[a-z ]*?) +no   ", ran.out, re.M) == ["vocabulary", "end tokens"]
    assert "LlamaForCausalLM" in ran.out, "the model is described, too"
    ran = kvcellar(*asked, "--json")
    assert (ran.code, list(json.loads(ran.out)["draft"]["refused"])) == (1, ["vocabulary", "end tokens"])


def test_n_grams_need_nothing_but_verification(drafts):
    ran = kvcellar("doctor", drafts["model"], "--draft", "ngram", "--no-kv-quality", *SMALL)
    assert "draft ngram fits: up to 16 drafts" in ran.out
    assert "verification  yes  " in ran.out
    assert ran.code == 0


def test_a_draft_that_is_not_found_is_an_error(drafts):
    ran = kvcellar("doctor", drafts["model"], "--draft", "no-such-model", *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert "there is no directory 'no-such-model'" in ran.err
    assert kvcellar("doctor", drafts["model"], "--draft-depth", "3").code == 2
