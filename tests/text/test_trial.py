"""A tokenizer is built and tried in a process of its own first: what ends that is refused, and harms no other."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvcellar.engine.models import embedded
from kvcellar.errors import ModelRefused, TextTooSlow, TokenizerFailed
from kvcellar.text import trial
from kvcellar.text.tokens import TokenizingLimit
from kvcellar.text.trial import MOST_GROWTH, MOST_WORD, TokenizerTrial, try_tokenizer
from tests.text.made import KINDS, byte_level

NESTED = 100_000  # classes in each other: more than any thread has stack for
BACKTRACKS = "a*a*a*b|☃"  # takes the cube of the length of a run, at each of its characters


def tried(change: Callable[[Tokenizer], object], made: Tokenizer | None = None) -> None:
    made = made or byte_level()
    change(made)
    try_tokenizer(made)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_models_pass_the_trial(kind: str) -> None:
    tried(lambda made: None, KINDS[kind]())


def test_the_tokenizer_of_the_embedded_model_passes_the_trial() -> None:
    try_tokenizer(Tokenizer.from_file(str(embedded.path() / "tokenizer.json")))


def split_by(pattern: str) -> Callable[[Tokenizer], None]:
    def change(made: Tokenizer) -> None:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")

    return change


@pytest.mark.parametrize("pattern", [r"(a|a)*b|.", r"(x+x+)+y|.", r"([^,]*,?)*;|.", r"( |\s)*!|."])
def test_a_pre_tokenizer_that_backtracks_without_end_is_refused(pattern: str) -> None:
    with pytest.raises(ModelRefused, match="its tokenizer is not used: it fails on"):
        tried(split_by(pattern))


def test_one_that_is_slow_on_short_texts_is_refused_by_the_seconds_of_all_texts_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    @contextmanager
    def result(self: TokenizingLimit, size: int, param: str, work: object, patience: float) -> Iterator[None]:
        given.append(patience)
        now[0] += 1.0  # no text alone takes too long
        if patience <= 0.0:
            raise TextTooSlow(param, size, patience)
        yield

    now = [0.0]
    monkeypatch.setattr("kvcellar.text.trial.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(TokenizingLimit, "result", result)
    with pytest.raises(ModelRefused, match="more than 5 seconds for short texts"):
        tried(lambda made: None)
    assert given == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def long_prefix(made: Tokenizer) -> None:
    made.normalizer = normalizers.Prepend("a" * (MOST_GROWTH + 1))


def between(made: Tokenizer) -> None:
    made.normalizer = normalizers.Replace(Regex(""), "a" * MOST_GROWTH)


def decodes_by_pattern(made: Tokenizer) -> None:
    made.decoder = decoders.Sequence([decoders.Replace(Regex("(a|a)*b"), "c"), decoders.Fuse()])


def decodes_long(made: Tokenizer) -> None:
    made.decoder = decoders.Replace("a", "a" * (MOST_GROWTH + 1))


def long_words(made: Tokenizer) -> None:
    made.model = models.WordPiece(
        vocab={"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]", max_input_chars_per_word=MOST_WORD + 1
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (long_prefix, f"can make {MOST_GROWTH + 1} bytes of one"),
        (between, f"can make {MOST_GROWTH + 1} bytes of one"),
        (decodes_by_pattern, "its decoder has a regular expression"),
        (decodes_long, f"its decoder can make {MOST_GROWTH + 1} bytes of one"),
        (long_words, f"takes words of {MOST_WORD + 1} characters as one"),
    ],
)
def test_what_makes_much_of_a_little_text_is_refused_before_a_text_is_tokenized(
    change: Callable[[Tokenizer], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenizingLimit, "result", None)
    with pytest.raises(ModelRefused, match=reason):
        tried(change)


def described(**parts: Any) -> str:
    """A `tokenizer.json` with these parts."""
    return json.dumps(json.loads(byte_level().to_str()) | parts)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def added(content: str) -> list[dict[str, Any]]:
    token = AddedToken(content, normalized=True)
    return json.loads(_with([token]).to_str())["added_tokens"]


def _with(tokens: list[AddedToken]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.add_tokens(tokens)
    return made


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@contextmanager
def trying(file: Path | None) -> Iterator[TokenizerTrial]:
    """Nothing of it is left afterwards: no thread, and no process that has one."""
    before = {*threading.enumerate()}
    with closing(TokenizerTrial(file)) as made:
        yield made
        process = made._worker._popen
    assert process is None or process.poll() is not None
    assert {*threading.enumerate()} <= before


def refusal(file: Path) -> str:
    with trying(file) as made, pytest.raises(ModelRefused, match="its tokenizer is not used") as caught:
        made.check_file()
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_models_pass(kind: str, file: Path) -> None:
    KINDS[kind]().save(str(file))
    with trying(file) as made:
        made.check_file()
        made.check(KINDS[kind]())


def test_a_file_whose_expression_takes_the_stack_of_its_thread_is_refused(file: Path) -> None:
    file.write_text(described(pre_tokenizer=split("[" * NESTED + "a" + "]" * NESTED)))
    assert "it ends the process that builds it, by its depth or by more than 2 GiB of memory" in refusal(file)


def test_a_file_that_takes_all_memory_is_refused(file: Path) -> None:
    """Within the limit on what normalizers make of a byte."""
    file.write_text(described(normalizer=replacing({"String": "a"}, "b" * 64), added_tokens=added("a" * 2**21)))
    assert "it ends the process that builds it, by its depth or by more than 2 GiB of memory" in refusal(file)


@pytest.mark.parametrize("where", ["in its added tokens", "in short texts"])
def test_a_file_whose_expression_backtracks_is_refused_when_its_time_is_over(
    where: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "in short texts":
        file.write_text(described(pre_tokenizer=split(BACKTRACKS)))
    else:
        tokens = added("a" * 1000 + "☃")
        file.write_text(described(normalizer=replacing({"Regex": BACKTRACKS}, "b"), added_tokens=tokens))
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    assert "it is not built and tried within 0.5 seconds" in refusal(file)


@pytest.mark.slow
def test_the_text_on_which_an_expression_backtracks_is_named(file: Path) -> None:
    file.write_text(described(pre_tokenizer=split(BACKTRACKS)))
    assert re.search("more than 5 seconds for short texts, such as (257|1025) characters of 'aaaaaaaa'", refusal(file))


def test_a_file_whose_normalizers_grow_texts_is_refused_before_it_is_built(file: Path) -> None:
    """Building it would double each `a` of its added tokens forty times."""
    normalizer = {"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa")] * 40}
    file.write_text(described(normalizer=normalizer))
    assert f"can make {2**40} bytes of one; {MOST_GROWTH} are allowed" in refusal(file)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", '{"normalizer": 3}', '{"normalizer": {"type": "Replace"}}'])
def test_what_is_no_tokenizer_is_told_apart_from_what_is_refused(text: str, file: Path) -> None:
    file.write_text(text)
    with trying(file) as made, pytest.raises(TokenizerFailed):
        made.check_file()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (split_by(BACKTRACKS), "it is not built and tried within 0.5 seconds"),
        (long_prefix, f"can make {MOST_GROWTH + 1} bytes of one"),
    ],
)
def test_what_is_built_of_a_file_that_passed_and_of_others_is_tried_as_well(
    part: Callable[[Tokenizer], None], reason: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level().save(str(file))
    with trying(file) as made:
        made.check_file()
        built = byte_level()
        part(built)
        monkeypatch.setattr(trial, "SECONDS", 0.5)
        with pytest.raises(ModelRefused, match=reason):
            made.check(built)


def test_a_trial_that_is_closed_waits_for_nothing(file: Path) -> None:
    file.write_text(described(pre_tokenizer=split(BACKTRACKS)))
    with trying(file):
        pass
