"""What would end the process that compiles it, or stall it, is refused, and nothing else has harm of it."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcellar import BadRequest
from kvcellar.constraint import Constraint
from kvcellar.engine.sample import grammars as module
from kvcellar.engine.sample.compiler import Compiler, Vocabulary
from kvcellar.engine.sample.compiling import STACK, on_a_stack
from tests.sample.hostile import LARK, SCHEMAS
from tests.sample.languages import COLUMNS, END, allowed, grammars, words

FAR = {"properties": 990, "typed": 990, "patternProperties": 990, "expanded": 660}  # most that a schema may have
ENDS = {
    "rules": 7500,
    "empty rules": 7500,
    "terminals": 7500,
    "complements": 7500,
    "ignored": 7500,
    "conditions": 20_000,
}
SIMPLE = Constraint.regex("[ab]")


def made(kind: str, name: str, count: int) -> Constraint:
    return Constraint(kind, (SCHEMAS if kind == "json_schema" else LARK)[name](count))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_deep_schema_is_compiled_or_refused(name: str) -> None:
    compiled_or_refused(made("json_schema", name, FAR.get(name, 1990)))


@pytest.mark.parametrize("name", LARK)
def test_a_deep_grammar_is_compiled_or_refused(name: str) -> None:
    compiled_or_refused(made("grammar", name, 3000))


def compiled_or_refused(constraint: Constraint) -> None:
    try:
        refused = grammars().matcher(constraint).error
    except BadRequest as error:
        refused = None if re.search("cannot be honoured|ends its compiler", error.message) else error.message
    assert refused is None


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_the_compiler_is_refused_and_nothing_else_has_harm_of_it(name: str) -> None:
    """Before, beside it and after it, in the same process."""
    with ThreadPoolExecutor() as pool:
        grammar = grammars()
        beside = [pool.submit(grammar.matcher, Constraint.regex("a" * n), owner=f"{n}") for n in range(1, 9)]
        with pytest.raises(BadRequest, match=r"^constraint: this grammar ends its compiler, by its depth") as caught:
            grammar.matcher(made("grammar", name, ENDS[name]))
        assert caught.value.param == "constraint"
        assert all(one.result(60).error is None for one in beside)
    assert allowed(grammar.matcher(SIMPLE)) == {0, 1}


def test_what_takes_too_long_is_refused_and_its_owner_and_others_have_the_next_turn(monkeypatch) -> None:
    """Alone it takes seconds."""
    grammar, rules = grammars(), range(2000)
    grammar.matcher(SIMPLE)
    each = (f'r{n}: {" | ".join(f"r{(n * 7 + k) % 2000}" for k in range(5))} | "b"' for n in rules)
    stalls = Constraint.grammar("\n".join(["start: " + " | ".join(f'"a" r{n}' for n in rules), *each]))
    with monkeypatch.context() as patched:
        patched.setattr(module, "SECONDS", 0.2)
        with pytest.raises(BadRequest, match="it takes more than 0 s to compile this; make it simpler"):
            grammar.matcher(stalls, owner="a")
    for owner in ("a", "b"):
        assert allowed(grammar.matcher(Constraint.regex(f"[a{owner}]"), owner=owner))
    grammar.check()


@pytest.mark.parametrize("name", ["rules", "terminals", "groups", "complements"])
def test_what_compiles_on_the_stack_of_the_trial_needs_little_stack_afterwards(name: str) -> None:
    """For masks, copies and the end of the grammar, on threads whose stacks are as the system has them."""
    vocabulary = Vocabulary(words().to_str(), COLUMNS, (END,))
    compiler, constraint = Compiler(vocabulary), made("grammar", name, 3500)
    matcher = on_a_stack(STACK // 4, lambda: compiler.matcher(constraint, constraint.source))

    def use() -> None:
        nonlocal matcher
        for _ in range(4):
            token = min(allowed(matcher))
            matcher.accept(token)
        del matcher

    on_a_stack(2**19, use)
