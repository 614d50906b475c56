"""Every field of a generation config is followed, without effect, reported, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kvcellar.engine.card import default_sampling
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.generation_defaults import FIELDS, generation_defaults
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.frontend.engine import Engine
from kvcellar.verify.diagnosis import diagnose
from tests.cli.command import kvcellar
from tests.zoo import ARCHS

SMALL: dict[str, Any] = {"cache_bytes": 10**6, "threads": 1}


def saved(path: Path, **rules: Any) -> Path:
    with silence_transformers():
        ARCHS["llama"].build().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(rules))
    return path


def test_every_field_of_transformers_is_classified() -> None:
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert theirs == FIELDS


FOLLOWED: dict[str, tuple[Any, str, Any]] = {
    "no_repeat_ngram_size": (3, "no_repeat_ngram_size", 3),
    "bad_words_ids": ([[5], [6, 7]], "bad_words_ids", [[5], [6, 7]]),
    "sequence_bias": ([[[5, 6], -2.0]], "sequence_bias", [[[5, 6], -2.0]]),
    "suppress_tokens": ([5, 6], "suppress_tokens", [5, 6]),
    "begin_suppress_tokens": ([5], "begin_suppress_tokens", [5]),
    "exponential_decay_length_penalty": ([5, 1.1], "exponential_decay_length_penalty", [5, 1.1]),
    "min_length": (9, "min_length", 9),
    "min_new_tokens": (4.0, "min_tokens", 4),
    "max_new_tokens": (7, "max_tokens", 7),
    "stop_strings": ("end", "stop", ["end"]),
    "repetition_penalty": (1.2, "repetition_penalty", 1.2),
}


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.parametrize("do_sample", [False, True])
def test_rules_that_apply_to_greedy_decoding_are_followed(name: str, do_sample: bool) -> None:
    value, ours, message = FOLLOWED[name]
    found = generation_defaults({"do_sample": do_sample, name: value})
    assert found.sampling[ours] == message
    assert found.notes == ()


@pytest.mark.parametrize("name", ["top_h", "epsilon_cutoff", "eta_cutoff"])
def test_sampling_filters_are_followed_unless_decoding_is_greedy(name: str) -> None:
    assert generation_defaults({"do_sample": True, name: 0.25}).sampling == {name: 0.25}
    assert generation_defaults({name: 0.25}).sampling == {name: 0.25}
    assert generation_defaults({"do_sample": False, name: 0.25}).sampling == {"temperature": 0.0}


WHY = [  # fields, the default temperature, and the reason for it
    ({}, 1.0, "its files set nothing else"),
    ({"do_sample": None, "repetition_penalty": 1.1}, 1.0, "its files set nothing else"),
    ({"do_sample": True}, 1.0, "its files set nothing else"),
    ({"top_k": 20}, 1.0, "its generation config"),
    ({"temperature": 0.4, "top_p": 0.9}, 0.4, "its generation config"),
    ({"temperature": 0.0}, 0.0, "its generation config"),
    ({"do_sample": False, "temperature": 0.4}, 0.0, "do_sample is false in its generation config"),
    ({"top_p": 0.0}, 0.0, "top_p is 0 in its generation config"),
]


@pytest.mark.parametrize(("fields", "temperature", "because"), WHY, ids=str)
def test_sampling_is_the_default_unless_the_files_say_otherwise(
    fields: dict[str, Any], temperature: float, because: str
) -> None:
    found = generation_defaults(fields)
    params = default_sampling(found.sampling, vocab_size=101, model="m")
    assert (params.temperature, found.because) == (temperature, because)


UNFOLLOWED: dict[str, Any] = {
    "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "max_length": 99, "max_time": 5.0,
    "num_return_sequences": 3, "penalty_alpha": 0.6, "dola_layers": "high", "constraints": [1],
    "force_words_ids": [[5]], "token_healing": True, "watermarking_config": {"bias": 2.5},
    "remove_invalid_values": True, "forced_bos_token_id": 5, "forced_eos_token_id": 6,
    "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 3, "temprature": 0.5, "chat_format": "chatml",
}  # fmt: skip


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_a_field_that_is_not_followed_is_reported_with_its_value(name: str) -> None:
    (note,) = generation_defaults({name: UNFOLLOWED[name]}).notes
    assert note.startswith(f"generation config: {name}={UNFOLLOWED[name]!r} is not followed: ")


def test_values_that_leave_a_feature_off_are_not_reported() -> None:
    nothing = {
        "num_beams": 1, "max_length": 20, "num_return_sequences": 1, "token_healing": False, "diversity_penalty": 0.0,
        "remove_invalid_values": False, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
        "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "watermarking_config": None,
        "use_cache": False, "pad_token_id": 0, "length_penalty": 2.0, "renormalize_logits": True,
    }  # fmt: skip
    assert generation_defaults(nothing).notes == ()
    assert generation_defaults({"max_length": 256}, context=256).notes == ()
    assert len(generation_defaults({"max_length": 255}, context=256).notes) == 1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5: classifier-free guidance needs two forwards"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size must be a whole number from 0 to 64"),
        ({"no_repeat_ngram_size": "3"}, "no_repeat_ngram_size is '3'"),
        ({"suppress_tokens": [-1]}, "suppress_tokens must be a whole number from 0"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of"),
        ({"bad_words_ids": [5]}, "bad_words_ids is [5]"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must be a list of"),
        ({"sequence_bias": {"(5,)": 1.0}}, "sequence_bias must be a list of"),
        ({"exponential_decay_length_penalty": [5]}, "exponential_decay_length_penalty must be"),
        ({"stop_strings": [""]}, "stop must be a string of"),
        ({"stop_strings": 5}, "stop must be"),
        ({"max_new_tokens": 0}, "max_tokens must be"),
        ({"do_sample": True, "top_h": 2}, "top_h must be"),
    ],
    ids=str,
)
def test_invalid_rules_are_refused_before_anything_is_built(
    rules: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcellar.engine.models.load.opened", lambda path: pytest.fail("the weights were opened"))
    with pytest.raises(ModelRefused) as refusal:
        load(saved(tmp_path, **rules))
    assert message in str(refusal.value)


def test_an_end_of_text_id_alone_is_no_bad_word() -> None:
    several = {"bad_words_ids": [[2], [2, 3], [4]], "eos_token_id": [2, 9]}
    assert generation_defaults(several).sampling["bad_words_ids"] == [[2, 3], [4]]
    one = {"bad_words_ids": [[2], [3]], "eos_token_id": 2}
    assert generation_defaults(one).sampling["bad_words_ids"] == [[3]]


def test_a_minimum_above_the_maximum_is_the_maximum() -> None:
    assert generation_defaults({"min_new_tokens": 9, "max_new_tokens": 4}).sampling["min_tokens"] == 4


def test_token_ids_beyond_the_vocabulary_are_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"cannot be followed: suppress_tokens names token 500; .* are 0 to 100"):
        Engine(saved(tmp_path, suppress_tokens=[500]), **SMALL)


def test_generation_fields_of_config_json_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "generation_config.json").unlink()
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "no_repeat_ngram_size": 2, "num_beams": 3, "other_field": 1}))
    loaded = load(path)
    assert loaded.defaults["no_repeat_ngram_size"] == 2
    (note,) = loaded.notes
    assert "num_beams=3" in note


def test_stop_strings_without_a_tokenizer_are_reported(tmp_path: Path) -> None:
    loaded = load(saved(tmp_path, stop_strings=["end"]))
    assert "stop" not in loaded.defaults
    assert loaded.notes == ("generation config: stop=['end'] is not followed: the directory has no tokenizer",)


def test_notes_are_logged_and_printed_by_doctor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "m", num_beams=4)
    note = "generation config: num_beams=4 is not followed: beam search is not supported"
    assert note in diagnose(path, Settings(**SMALL), kv_quality=False).notes
    assert [record.getMessage() for record in caplog.records if "kvcellar" in record.name] == [f"m: {note}"]
    assert note in kvcellar("doctor", str(path), "--no-kv-quality", "--cache-bytes", "1M", "--threads", "1").out


def test_the_generation_config_of_a_given_network_is_read() -> None:
    network = ARCHS["llama"].build()
    network.generation_config = GenerationConfig(no_repeat_ngram_size=2, num_beams=4)
    loaded = load(network)
    assert loaded.defaults["no_repeat_ngram_size"] == 2
    assert "num_beams=4" in loaded.notes[0]
    network.generation_config = GenerationConfig(guidance_scale=2.0)
    with pytest.raises(ModelRefused, match="guidance_scale"):
        load(network)


# -- in completions ---------------------------------------------------------------------------------------------------


def test_greedy_completions_equal_those_of_transformers_with_the_same_config(tmp_path: Path) -> None:
    rules = {
        "no_repeat_ngram_size": 2, "suppress_tokens": [90, 91], "begin_suppress_tokens": [40, 41],
        "bad_words_ids": [[12, 13], [77]], "sequence_bias": [[[5], 1.5], [[8, 9], -3.0]], "min_length": 30,
        "exponential_decay_length_penalty": [8, 1.2], "repetition_penalty": 1.2, "eos_token_id": 2,
    }  # fmt: skip
    path = saved(tmp_path, do_sample=False, **rules)
    network = ARCHS["llama"].build()
    network.generation_config = GenerationConfig(**rules, do_sample=False, pad_token_id=0)
    prompts = [[5, 6, 7, 5, 6], [8, 40], list(range(3, 30)), [12] * 9]
    with Engine(path, pack=False, **SMALL) as engine:
        results = engine.generate(prompts, max_tokens=40)
        for prompt, result in zip(prompts, results, strict=True):
            with silence_transformers():
                theirs = network.generate(torch.tensor([prompt]), max_new_tokens=40)[0, len(prompt) :].tolist()
            assert list(result.token_ids) == [token for token in theirs if token != 2]
        engine.check()


def test_rules_hold_through_batching_preemption_and_shift(tmp_path: Path) -> None:
    """Batched, preempted and shifted completions equal those generated alone with enough memory."""
    rules: dict[str, Any] = {"no_repeat_ngram_size": 3, "bad_words_ids": [[4, 5], [9]], "begin_suppress_tokens": [7]}
    how: dict[str, Any] = {"max_tokens": 40, "n": 3, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    prompts = [[5, 6, 7, 8] * 6, list(range(3, 30))]
    path = saved(tmp_path, **rules)
    with Engine(path, threads=1, cache_bytes=10**7) as engine:
        alone = [engine.generate(prompt, **how).choices for prompt in prompts]
    with Engine(path, threads=1, cache_bytes=450_000, step_tokens=16) as engine:
        together = [result.choices for result in engine.generate(prompts, **how)]
        assert engine.stats().preemptions > 0
    assert [[one.token_ids for one in choices] for choices in together] == [
        [one.token_ids for one in choices] for choices in alone
    ]
    for prompt, choices in zip(prompts, alone, strict=True):
        for one in choices:
            new = [tuple([*prompt, *one.token_ids][at : at + 3]) for at in range(len(prompt) - 2, len(prompt) + 38)]
            old = [tuple(prompt[at : at + 3]) for at in range(len(prompt) - 2)]
            assert len(set(new)) == len(new)
            assert not set(new) & set(old)
            assert 9 not in one.token_ids
            assert one.token_ids[0] != 7
    with Engine(path, threads=1, cache_bytes=10**7, context=48) as engine:
        shifted = engine.generate(prompts[0], **{**how, "max_tokens": 90, "n": 1}, shift=True, num_keep=2).token_ids
    whole = [*prompts[0], *shifted]
    new = [tuple(whole[at : at + 3]) for at in range(len(prompts[0]) - 2, len(whole) - 2)]
    assert len(set(new)) == len(new) == 90, "n-grams removed by a shift count, too"


def test_a_request_overrides_the_defaults(tmp_path: Path) -> None:
    with Engine(saved(tmp_path, suppress_tokens=[5], max_new_tokens=3, min_new_tokens=3), **SMALL) as engine:
        assert engine.params().suppress_tokens == (5,)
        assert engine.params(suppress_tokens=[]).suppress_tokens == ()
        assert len(engine.generate([7, 8]).token_ids) == 3
        assert len(engine.generate([7, 8], max_tokens=1).token_ids) == 1
        with pytest.raises(BadRequest, match="suppress_tokens names token 101"):
            engine.generate([7, 8], suppress_tokens=[101])
