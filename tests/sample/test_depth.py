"""What the library would follow too deep is refused before it reads it, and what is allowed has stack to spare."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import BadRequest, Constraint
from kvcellar.sample.depth import RULE, deepest, of_lark, of_schema
from kvcellar.sample.grammars import MAX_LEVELS
from tests.sample.hostile import LARK, SCHEMAS
from tests.sample.languages import grammars

NODES = st.integers(0, 6)


@pytest.mark.parametrize("part", ["refused", "allowed"])
def test_no_source_ends_the_process(part: str) -> None:
    """Without the bound the first of those that are refused ends it with SIGSEGV."""
    found = subprocess.run([sys.executable, "-m", "tests.sample.hostile", part], capture_output=True, text=True)
    assert found.returncode == 0, (found.returncode, found.stdout.splitlines()[-1:], found.stderr[-2000:])


def longest(edges: dict[int, list[int]], weights: dict[int, int], start: int, seen: frozenset[int]) -> int:
    seen |= {start}
    onward = [longest(edges, weights, child, seen) for child in edges.get(start, ()) if child not in seen]
    return weights.get(start, 0) + max(onward, default=0)


@given(st.dictionaries(NODES, st.lists(NODES, max_size=3)), st.dictionaries(NODES, st.integers(0, 9)))
def test_no_path_that_visits_each_node_once_weighs_more_and_without_cycles_one_weighs_as_much(edges, weights) -> None:
    most = max((longest(edges, weights, start, frozenset()) for start in edges), default=0)
    assert deepest(edges, weights) >= most
    straight = {node: [child for child in children if child > node] for node, children in edges.items()}
    most = max((longest(straight, weights, start, frozenset()) for start in straight), default=0)
    assert deepest(straight, weights) == most


def test_a_path_of_any_length_is_measured_without_recursion() -> None:
    assert deepest({n: [n + 1] for n in range(50_000)}, dict.fromkeys(range(50_001), 1)) == 50_001
    assert deepest({n: [(n + 1) % 50_000] for n in range(50_000)}, dict.fromkeys(range(50_000), 1)) == 50_000


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({"type": "integer"}, 1),
        ({"items": {"items": {}}}, 3),
        ({"$ref": "#"}, 2),  # the root, and once more by the reference
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {}}}}, 4 + 2),
        ({"properties": {"a": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {}}}, 3 + 1),
        ({"properties": {"a": {"$ref": "#/$defs/a%20b"}}, "$defs": {"a b": True}}, 3),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": {"items": {}}, "b": {}}}, 4 + 2),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}}, 4 + 3),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, 3 * 2),  # somewhere in it
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "https://example.com", "$ref": "#"}}}, 3 * 5),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_levels_of_a_schema_are_those_of_its_references_together(schema, levels) -> None:
    assert of_schema(schema) == levels


@pytest.mark.parametrize(
    ("source", "levels"),
    [
        ('start: "a"', RULE),
        ('start: a\na: ("b" (B | "c"))\nB: "d"', RULE + RULE + 2 + RULE),
        ("start: a | b\na: b\nb: c\nc: /d/", 4 * RULE),
        ('start: a\na: "(" a ")" | "b"', 2 * RULE),
        ('start: a // b\na: "x" # start\n  | "b: c" \nb: start', 3 * RULE),
        ('start: a\nb: "x"\na:\n  | b /[:(]a/', 3 * RULE),
        ('start: %lark {\n  start: a\n  a: "b"\n}', 2 * (RULE + 1)),
        ('start: "a" %json {"items": {"a: b": "start"}}', RULE + 2),
    ],
)
def test_levels_of_a_grammar_are_those_of_its_rules_groups_and_schemas_together(source, levels) -> None:
    assert of_lark(source) == levels


@pytest.mark.parametrize("rule", ["(" * 65 + '"a"' + ")" * 65, "%json {", "%json " + "[" * 9999], ids=["(", "cut", "["])
def test_what_cannot_be_measured_is_refused(rule: str) -> None:
    with pytest.raises(BadRequest, match="cannot be honoured"):
        grammars().matcher(Constraint.grammar(f"start: {rule}"))


@pytest.mark.parametrize("name", ["rules", "a schema"])
def test_what_comes_around_an_answer_counts_too(name: str) -> None:
    """Tools have schemas of their own there."""
    half = LARK[name](300).replace("start: ", "start: @answer | ", 1)
    schema = SCHEMAS["properties"](300)
    made = grammars()
    assert of_lark(half) + of_schema(json.loads(schema)) < MAX_LEVELS
    assert made.matcher(Constraint("json_schema", schema, around=half)).error is None
    far = LARK[name](2000).replace("start: ", "start: @answer | ", 1)
    with pytest.raises(BadRequest, match=r"beside reasoning .* levels into each other, and 2048 are allowed"):
        made.matcher(Constraint("json_schema", schema, around=far))
