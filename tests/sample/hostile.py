"""Sources that lead the library as deep as one likes, by kind and by how deep. Some stay within its stack at any depth
that a source may have."""

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any


def _chain(count: int, make: Callable[[Any], Any]) -> str:
    names = [f"d{number}" for number in range(count + 1)]
    made = {one: make({"$ref": f"#/$defs/{other}"}) for one, other in pairwise(names)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**made, names[-1]: {"type": "integer"}}})


def _in(schema: Any, *outer: str) -> Any:
    for name in outer:
        inner = {"properties": {"a": schema}, "allOf": [schema], "anyOf": [schema], "items": schema}
        schema = {name: inner[name]}
    return schema


def _rules(count: int, rule: str) -> str:
    lines = [f"r{number}: {rule.replace('NEXT', f'r{number + 1}')}" for number in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "b"', ""])


def _tokens(count: int, rule: str) -> str:
    return _rules(count, rule).replace("r", "T").replace("staTt", "start")


def _cycle(count: int) -> str:
    """Each rule names all others near it, so that the order in which they are met decides how deep it is."""
    others = [[f'"a" r{(number * k + 1) % count}' for k in (1, 2, 3)] for number in range(count)]
    lines = [f"r{number}: {' | '.join(them)} | X" for number, them in enumerate(others)]
    return "\n".join(["start: r0", *lines, 'X: "b"', ""])


def _expanded(count: int) -> str:
    """References beside other keywords, which the library replaces by what they lead to."""
    return _chain(count, lambda ref: {"allOf": [{"properties": {"a": ref}}, {"properties": {"a": {"minItems": 0}}}]})


SCHEMAS: Mapping[str, Callable[[int], str]] = {
    "references": lambda n: _chain(n, lambda ref: ref),
    "properties": lambda n: _chain(n, lambda ref: _in(ref, "properties")),
    "typed": lambda n: _chain(n, lambda ref: {"type": "object", **_in(ref, "properties")}),
    "items": lambda n: _chain(n, lambda ref: _in(ref, "items")),
    "allOf": lambda n: _chain(n, lambda ref: _in(ref, "allOf")),
    "anyOf": lambda n: _chain(n, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "oneOf": lambda n: _chain(n, lambda ref: {"oneOf": [ref]}),
    "additionalProperties": lambda n: _chain(n, lambda ref: {"type": "object", "additionalProperties": ref}),
    "patternProperties": lambda n: _chain(n, lambda ref: {"patternProperties": {"^a": ref}}),
    "beside": lambda n: _chain(n, lambda ref: {"type": "integer", **ref}),
    "nested": lambda n: _chain(n // 10, lambda ref: _in(ref, *["items"] * 20)),
    "mixed": lambda n: _chain(n // 5, lambda ref: _in(ref, *["allOf", "properties", "items", "anyOf"] * 3)),
    "expanded": _expanded,
    "in a list": lambda n: json.dumps({"allOf": [*({"$ref": f"#/allOf/{k + 1}"} for k in range(2 * n)), {}]}),
    "in data": lambda n: json.dumps({"$ref": "#/x/0", "x": [*({"$ref": f"#/x/{k + 1}"} for k in range(2 * n)), True]}),
}  # fmt: skip
LARK: Mapping[str, Callable[[int], str]] = {
    "rules": lambda n: _rules(n, '"a" NEXT'),
    "empty rules": lambda n: _rules(n, "NEXT"),
    "groups": lambda n: _rules(n // 10, "(" * 20 + '"a"? NEXT' + ")" * 20),
    "optional groups": lambda n: _rules(n // 10, "[" * 20 + '"a" NEXT' + "]" * 20),
    "terminals": lambda n: _tokens(n, '"a" NEXT'),
    "complements": lambda n: _tokens(n, "~NEXT"),
    "groups of terminals": lambda n: _tokens(n // 10, "(" * 20 + '"a" NEXT' + ")?" * 20),
    "cycles": _cycle,
    "templates": lambda n: "start: " + "a{" * n + '"b"' + "}" * n,
    "conditions": lambda n: 'start: a::1\na::_: "a" %if ' + "not(" * n + "true" + ")" * n,
    "a schema": lambda n: f"start: %json {_chain(n, lambda ref: _in(ref, 'properties'))}",
    "ignored": lambda n: _rules(n, '"a" NEXT').replace("r0", "x", 1).replace("r", "T").replace("staTt", "start")
    + '%ignore T0\nx: "b"\n',
}  # fmt: skip
