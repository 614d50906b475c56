"""The shipped demo model: it loads, it agrees with its card, its tokenizer keeps every byte, and it has learned."""

import json
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from kvcellar.engine.models import embedded
from scripts.embedded_trainer.card import render
from scripts.embedded_trainer.corpus import Source
from scripts.embedded_trainer.head import head_config
from scripts.embedded_trainer.network import Network, Shape, count_parameters, hf_config, initial_weights, weight_shapes

# written for this test, so not part of any training text
UNSEEN = '''\
import json
import os


class Shelf:
    """Keep numbered jars, and say which of them are empty."""

    def __init__(self, path, size=16):
        self.path = path
        self.size = size
        self.jars = {}

    def load(self):
        if not os.path.exists(self.path):
            return False
        with open(self.path, encoding="utf-8") as file:
            data = json.load(file)
        for name, value in data.items():
            if not isinstance(value, int):
                raise TypeError("a jar must hold a number, not %r" % value)
            self.jars[name] = value
        return True

    def empty(self):
        return [name for name in self.jars if self.jars[name] == 0]
'''


def read_json(name: str) -> dict[str, Any]:
    return json.loads((embedded.path() / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(embedded.path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def shape() -> Shape:
    return Shape(**read_json("manifest.json")["run"]["shape"])


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_config_is_that_of_the_trained_shape(shape: Shape) -> None:
    assert read_json("config.json") == hf_config(shape) | head_config()


def test_weights_are_the_shapes_in_bfloat16(shape: Shape) -> None:
    with safe_open(embedded.path() / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    assert {name: tuple(weight.shape) for name, weight in found.items()} == weight_shapes(shape)
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    assert all(bool(weight.isfinite().all()) for weight in found.values())


def test_card_agrees_with_the_record() -> None:
    assert (embedded.path() / "CARD.md").read_text() == render(read_json("manifest.json"))


def test_card_and_record_agree_with_the_loaded_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, shape: Shape
) -> None:
    parameters = read_json("manifest.json")["run"]["parameters"]
    card = " ".join((embedded.path() / "CARD.md").read_text().split())
    assert parameters == count_parameters(shape) == model.num_parameters()
    assert len(tokenizer) == shape.vocabulary == model.config.vocab_size
    assert f"{parameters} parameters" in card
    assert "demo model, not a code assistant" in card


def test_the_model_is_finished() -> None:
    run = read_json("manifest.json")["run"]
    assert run["steps_done"] == run["recipe"]["steps"]
    assert run["looks"][-1]["step"] == run["steps_done"]


def test_held_out_files_are_the_ones_their_paths_choose_and_none_was_trained_on() -> None:
    manifest = read_json("manifest.json")
    pools = {name: set(pool["files"]) for name, pool in manifest["pools"].items()}
    for name, paths in pools.items():
        assert all(Source(path, "", "").held_out == name.startswith("held_") for path in paths)
        assert all(Source(path, "", "").is_test == name.endswith("tests") for path in paths)
        assert not paths & set(manifest["dropped_for_notices"])
    assert not (pools["library"] | pools["tests"]) & (pools["held_library"] | pools["held_tests"])


def test_files_name_no_folder_of_the_machine_that_made_them() -> None:
    for name in ("CARD.md", "NOTICE", "config.json", "generation_config.json", "tokenizer_config.json"):
        text = (embedded.path() / name).read_text()
        assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|usr|Users|opt|mnt)\b", text), name
    paths = [path for pool in read_json("manifest.json")["pools"].values() for path in pool["files"]]
    assert paths
    assert not any(path.startswith(("/", "..")) for path in paths)


def test_the_library_s_licence_and_notice_ship_with_the_weights() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (embedded.path() / "LICENSE.txt").read_text()
    assert f"CPython {read_json('manifest.json')['python']}" in (embedded.path() / "NOTICE").read_text()


def test_special_tokens_are_the_first_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.is_fast
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    generation = read_json("generation_config.json")
    assert [generation[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [0, 1, 2]


@given(text=st.text(max_size=80))
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(ids(tokenizer, text), clean_up_tokenization_spaces=False) == text


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["if x:", "return  y", "", "# é\t", "'a' , 'b' ."]))))
def test_indented_code_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, lines: list[tuple[int, str]]) -> None:
    text = "\n".join(" " * indent + line for indent, line in lines)
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_no_token_holds_a_newline_and_anything_else(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    assert [text for text in texts if "\n" in text] == ["\n"]


@given(before=st.text("a(: \n'é", max_size=20), after=st.text("a(: \n'é", max_size=20))
def test_text_that_ends_in_a_newline_keeps_its_tokens_whatever_follows(
    tokenizer: PreTrainedTokenizerFast, before: str, after: str
) -> None:
    whole = ids(tokenizer, before + "\n" + after)
    assert whole == ids(tokenizer, before + "\n") + ids(tokenizer, after)


messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text("a(: \n", max_size=12)}
    ),
    min_size=1,
    max_size=5,
)


@given(talk=messages, completion=st.text("a(: \n", max_size=12), more=messages)
def test_a_conversation_s_prompt_and_answer_are_the_first_tokens_of_the_next_prompt(
    tokenizer: PreTrainedTokenizerFast, talk: list[dict[str, str]], completion: str, more: list[dict[str, str]]
) -> None:
    def prompt(conversation: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return ids(tokenizer, text)

    known = prompt(talk) + ids(tokenizer, completion)
    assert prompt([*talk, {"role": "assistant", "content": completion}, *more])[: len(known)] == known


def test_chat_is_text_set_one_under_the_other(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [
        {"role": "system", "content": "two\nlines"},
        {"role": "user", "content": [{"type": "text", "text": "def f(x):"}]},
        {"role": "assistant", "content": "    return x\n"},
        {"role": "user", "content": "f(3)"},
    ]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert text == "<|bos|># two\n# lines\ndef f(x):\n    return x\nf(3)\n"


def test_text_it_never_saw_surprises_it_far_less_than_it_does_an_untrained_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, shape: Shape
) -> None:
    window = torch.tensor([tokenizer(UNSEEN)["input_ids"]])
    with torch.no_grad():
        logits = model(window[:, :-1], use_cache=False).logits
    learned = float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:]))
    network = Network(shape, window.shape[1] - 1, torch.float32)
    untrained = float(network.loss(initial_weights(shape, 0), window))
    assert untrained > 0.9 * math.log(shape.vocabulary)
    assert learned < 2.5
