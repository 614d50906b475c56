"""Constraints are compiled within limits, or refused with the reason; what one thread compiled others copy."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.structured import write_tokenizer
from kvcellar import BadRequest
from kvcellar.constraint import Constraint
from kvcellar.engine.sample import compiler
from kvcellar.engine.sample.grammars import KEPT, Grammars
from kvcellar.engine.sample.matcher import Matcher
from tests.sample.languages import COLUMNS, END, WORDS, allowed, grammars, settle, words


@pytest.fixture
def opened() -> Iterator[Callable[..., Grammars]]:
    """Grammars with a process of their own, which is ended."""
    with ExitStack() as closing:

        def made(*arguments: Any, **options: Any) -> Grammars:
            found = Grammars(*arguments, **options)
            closing.callback(found.close)
            return found

        yield made


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint.json_schema({"not": {}}), 'json_schema cannot be honoured: .*"not"'),
        (Constraint.json_schema({"if": {}, "then": {}}), '"if", "then"'),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
        (Constraint.json_schema({"type": "object", "dependentRequired": {"a": ["b"]}}), '"dependentRequired"'),
        (Constraint.json_schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (Constraint.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (Constraint.json_schema({"type": "colour"}), "Invalid type: colour"),
        (Constraint.json_schema({"$ref": "https://example.invalid/schema"}), "retrieving it failed"),
        (Constraint.json_schema({"$ref": "#/$defs/none"}), "does not exist"),
        (Constraint.json_schema({"$ref": "#"}), "no answer can begin"),
        (Constraint.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum .5. is greater"),
        (Constraint.json_schema({"allOf": [{"anyOf": [{"minLength": i} for i in range(8)]}] * 8}), "too large"),
        (Constraint.regex("a(b"), "regex cannot be honoured: .*unclosed group"),
        (Constraint.regex(r"(a)\1"), "backreferences are not supported"),
        (Constraint.grammar("start: other"), 'unknown name: "other"'),
        (Constraint.grammar('root ::= "a'), "neither Lark .* nor GBNF: Unexpected end of input"),
        (Constraint.grammar("words of no grammar"), "neither Lark"),
        (Constraint.grammar('root ::= "a"\n' * 500), "in GBNF it may have 400 rules"),
        (Constraint.grammar("root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "nested too deep"),
        (Constraint.grammar("start: " + "(" * 60_000 + '"a"' + ")" * 60_000), "cannot be honoured"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_reason_and_the_field_it_came_from(constraint, says) -> None:
    made = grammars()
    with pytest.raises(BadRequest, match=says) as caught:
        made.matcher(Constraint(constraint.kind, constraint.source, param="response_format"))
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 500
    made.check()


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (Constraint.grammar('start: "a" @answer?'), "unknown grammar @answer"),
        (Constraint.json_schema({"$ref": "#"}), "no answer can begin"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_is_refused_alone_is_refused_where_reasoning_may_come_before_it(constraint, says) -> None:
    """There the beginning of the reasoning could follow, and the answer never."""
    with pytest.raises(BadRequest, match=says):
        grammars().matcher(replace(constraint, around='start: ("b" "c")? @answer'))


@pytest.mark.parametrize(
    ("constraint", "first"),
    [
        (Constraint.json_object(), {"{"}),
        (Constraint.json_schema({"type": "array", "items": {"$ref": "#"}}), {"["}),
        (Constraint.grammar('root ::= rest | "b" # GBNF\nrest ::= "c" rest?'), {"b", "c", "cc"}),
        (Constraint.grammar('%llguidance {}\nstart: ("b" | "c") /a+/'), {"b", "ba", "c"}),
        (Constraint.grammar('start: %json {"enum": [10, 0]}'), {"0", "1", "10"}),
        (Constraint.choice(["a|b", "1+0", "[0]", "c.", 'ab"', "ab{"]), {"a", "1", "[", "c", "ab"}),
    ],
    ids=lambda value: value if isinstance(value, set) else value.kind,
)  # fmt: skip
def test_every_kind_begins_with_what_it_says(constraint, first) -> None:
    assert {WORDS[token] for token in allowed(grammars().matcher(constraint))} == first


def test_json_has_a_space_or_an_indented_line_between_its_parts_and_none_if_it_is_compact() -> None:
    schema = {"const": [1]}
    made = grammars()
    matcher = made.matcher(Constraint.json_schema(schema, compact=True))
    assert {WORDS[token] for token in allowed(matcher)} == {"["}
    assert made.matcher(Constraint.json_schema(schema)) is not None


def test_without_a_tokenizer_or_an_end_or_with_too_few_columns_a_constraint_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"needs a tokenizer.*The reason: it is a test"):
        Grammars(None, "it is a test", vocab_size=COLUMNS, end_ids=[END]).matcher(Constraint.json_object())
    for ends in ([], [10**6]):
        with pytest.raises(BadRequest, match="needs an end-of-text token"):
            Grammars(words(), "", vocab_size=COLUMNS, end_ids=ends).matcher(Constraint.json_object())
    with pytest.raises(BadRequest, match="cannot be read in the tokens of this model: vocab size too small"):
        Grammars(words(), "", vocab_size=5, end_ids=[2]).matcher(Constraint.json_object())


def test_an_end_that_may_be_text_is_allowed_only_where_an_answer_is_complete(opened) -> None:
    """Here the token "c" ends answers, and is no control token."""
    end = WORDS.index("c")
    made = opened(words(), "", vocab_size=COLUMNS, end_ids=[end])
    matcher = made.matcher(Constraint.regex("[ac]b?"))
    assert end not in allowed(matcher)
    matcher.accept(WORDS.index("a"))
    assert allowed(matcher) == {end, WORDS.index("b")}


def test_the_last_grammars_are_kept_and_copied() -> None:
    made = grammars()
    for number in range(KEPT + 5):
        made.matcher(Constraint.choice(["0", "a" * (number + 1)]))
        made.matcher(Constraint.choice(["0", "b"])).accept(WORDS.index("0"))
    assert allowed(made.matcher(Constraint.choice(["0", "b"]))) == {WORDS.index("0"), WORDS.index("b")}
    assert len(made._compiled) == KEPT
    made.check()


def test_what_one_namespace_has_compiled_is_compiled_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made, tried = grammars(), list[Constraint]()
    run = made._trial.run
    monkeypatch.setattr(made, "_trial", SimpleNamespace(run=lambda one, *rest: (tried.append(one), run(one, *rest))[1]))
    for namespace in ("a", "a", "b", "a", "b", ""):
        made.matcher(Constraint.regex("a"), namespace=namespace)
    assert len(tried) == 3


def test_the_tokenizer_is_read_when_it_is_prepared_and_once(opened) -> None:
    class Read:
        times = 0

        def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
            return words().get_vocab(with_added_tokens)

        def to_str(self) -> str:
            self.times += 1
            return words().to_str()

    source = Read()
    made = opened(source, "", vocab_size=COLUMNS, end_ids=[END])
    made.prepare()
    assert source.times == 1
    made.matcher(Constraint.json_object())
    made.prepare()
    assert source.times == 1


def test_what_cannot_be_prepared_is_refused_at_the_first_constraint() -> None:
    made = Grammars(None, "it is a test", vocab_size=COLUMNS, end_ids=[END])
    made.prepare()
    with pytest.raises(BadRequest, match="has none"):
        made.matcher(Constraint.json_object())


def test_masks_are_those_of_a_look_at_each_token(tmp_path, monkeypatch, opened) -> None:
    """Lengths by which tokens of strings are looked at together change no mask: also near the end of a string."""
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(vocabulary := 3000, tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = {"text": {"type": "string", "maxLength": 12}, "word": {"type": "string", "pattern": "^[a-z]{2,6}$"}}
    schema = Constraint.json_schema({"type": "object", "properties": texts, "required": list(texts)})

    def start() -> Matcher:
        return opened(backend, "", vocab_size=vocabulary, end_ids=[vocabulary - 1]).matcher(schema)

    together = start()
    monkeypatch.setattr(compiler, "SLICES", [])
    alone = start()
    for seed in range(8):
        draw, pair = random.Random(seed), (together.copy(), alone.copy())
        token, steps = 0, 0
        while token != vocabulary - 1 and steps < 60:
            masks = np.zeros((2, -(-vocabulary // 32)), np.int32)
            for one, mask in zip(pair, masks, strict=True):
                settle(one)
                one.fill((), mask)
            assert masks[0].tolist() == masks[1].tolist()
            allowed_ids = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            token, steps = int(draw.choice(allowed_ids)), steps + 1
            for one in pair:
                one.accept(token)
