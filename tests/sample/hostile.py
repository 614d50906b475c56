"""Sources that lead the library as deep as one likes. `python -m tests.sample.hostile refused` compiles each of them
far beyond the bound, as a request would; `allowed` each just within it, on a quarter of the stack. A crash ends it."""

import json
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from kvcellar import BadRequest, Constraint
from kvcellar.sample.compiling import STACK
from kvcellar.sample.depth import MAX_GROUPS, of_lark, of_schema
from kvcellar.sample.grammars import MAX_LEVELS
from tests.sample.languages import COLUMNS, END, grammars, words

FAR = 1990  # nearly as many properties and definitions as a schema may have
MARGIN = 4


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


def _named(name: str, count: int) -> int:
    """So that there are `count` properties and definitions at most."""
    each = {"properties": 2, "typed": 2, "patternProperties": 2, "expanded": 3}
    return count // each.get(name, 1)


def _every(count: int) -> Mapping[str, tuple[str, str]]:
    found = {f"json_schema, {name}": ("json_schema", make(_named(name, count))) for name, make in SCHEMAS.items()}
    return found | {f"grammar, {name}": ("grammar", make(count)) for name, make in LARK.items()}


def refused() -> None:
    made = grammars()
    for name, (kind, source) in _every(FAR).items():
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        deep = _levels(name.partition(", ")[2], source) > MAX_LEVELS
        said = ""
        try:
            made.matcher(Constraint(kind, source))  # pyright: ignore[reportArgumentType]
        except BadRequest as error:
            said = error.message
        assert not deep or "levels into each other" in said or "brackets" in said, (name, said)


def _largest(name: str, make: Callable[[int], str]) -> int:
    """How much of a kind is within the bound."""
    if name in ("templates", "conditions"):
        return MAX_GROUPS - 4
    least, most = (_levels(name, make(count)) for count in (20, 40))
    return 20 + int((MAX_LEVELS - least) * 20 / max(1, most - least))


def _levels(name: str, source: str) -> int:
    if name in ("templates", "conditions") and source.count("(") + source.count("{") > MAX_GROUPS:
        return MAX_LEVELS + 1
    return of_schema(json.loads(source)) if name in SCHEMAS else of_lark(source)


def allowed() -> None:
    """The largest of each kind that is within the bound."""
    reader = LLTokenizer(words().to_str(), n_vocab=COLUMNS, eos_token=[END], slices=[])
    mask = np.zeros(-(-COLUMNS // 32), np.int32)
    for name, make in (*SCHEMAS.items(), *LARK.items()):
        source = make(_largest(name, make))
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if name in SCHEMAS:
            source = LLMatcher.grammar_from_json_schema(source)
        found: list[LLMatcher] = []
        thread = threading.Thread(target=lambda source=source, found=found: found.append(LLMatcher(reader, source)))
        threading.stack_size(STACK // MARGIN)
        thread.start()
        thread.join()
        threading.stack_size(0)
        copy = found[0].deep_copy()
        for _ in range(3):
            copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if copy.is_error() or not len(tokens):
                break
            copy.consume_token(int(tokens[0]))


if __name__ == "__main__":
    {"refused": refused, "allowed": allowed}[sys.argv[1]]()
