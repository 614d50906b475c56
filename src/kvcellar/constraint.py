"""constraint: what an answer has to match, validated and bounded when it is created, and immutable.

The bounds hold before any library reads the source: its size, and of a schema the depth, the properties and the values
of enums. Whether the grammar can be honoured is known when it is compiled (`grammars`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvcellar.errors import BadRequest, shown
from kvcellar.values import deeper, no_number

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

PARAM = "constraint"
MAX_SOURCE_BYTES = 2**18
MAX_DEPTH = 64  # of JSON in a schema: an object in an object is two levels more
MAX_PROPERTIES = 2000
MAX_VALUES = 10_000  # of enums, and of a choice
OVERRIDES = "x-guidance"  # would replace what is set here, and let keywords be ignored
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
_DATA = ("enum", "const", "default", "examples", "example")  # JSON that is no schema
_JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # beside `properties`: other schemas of the same object


@dataclass(frozen=True, slots=True)
class Constraint:
    """What each answer to a request has to match. Raises `BadRequest` for what is no source of its kind, or too large.

    `source` is, by kind: a JSON Schema as JSON; "" (`json_object`: any object); a regular expression that matches the
    whole answer; a JSON list of strings; a grammar in Lark's or llama.cpp's notation. With `compact`, JSON has no
    whitespace between its parts; else a space, or a new line and its indentation. `around` is a grammar in Lark's
    notation in which `@answer` stands for all this: reasoning and calls of tools may come before it, or in its place;
    it is absent where calls are required.
    """

    kind: Kind
    source: str = ""
    compact: bool = False
    around: str = ""  # "": the whole text has to match
    param: str = field(default=PARAM, compare=False)  # the field of the request that it comes from, for messages

    def __post_init__(self) -> None:
        param = self.param
        if not isinstance(self.kind, str) or self.kind not in get_args(Kind):
            raise _bad(f"a constraint is one of {', '.join(get_args(Kind))}, not {shown(self.kind)}", param)
        if not isinstance(self.source, str):
            raise _bad(f"the {self.kind} of a constraint is text, not {shown(self.source)}", param)
        if not isinstance(self.compact, bool):
            raise _bad(f"compact is True or False, not {shown(self.compact)}", param)
        if not isinstance(self.around, str):
            raise _bad(f"what is around a constraint is text, not {shown(self.around)}", param)
        _check_text("tool part", self.around, param)
        object.__setattr__(self, "around", str.__str__(self.around))
        object.__setattr__(self, "kind", str.__str__(self.kind))
        object.__setattr__(self, "source", _checked(self.kind, str.__str__(self.source), param))

    @staticmethod
    def json_schema(schema: Any, *, strict: bool = False, compact: bool = False, param: str = PARAM) -> "Constraint":
        """JSON that a schema describes: a mapping, JSON text, or a class of pydantic. With `strict`, objects have no
        properties but those that their schemas name, where a schema does not say `additionalProperties` itself."""
        if not isinstance(strict, bool):
            raise _bad(f"strict is True or False, not {shown(strict)}", param)
        text = schema if isinstance(schema, str) else _dumped(_of_class(schema), param)
        if strict:
            _check_text("json_schema", text, param)
            text = _dumped(_closed(_loaded(text, param), joined=False), param)
        return Constraint("json_schema", text, compact, param=param)

    @staticmethod
    def json_object(*, compact: bool = False) -> "Constraint":
        """Any JSON object."""
        return Constraint("json_object", "", compact)

    @staticmethod
    def regex(pattern: str) -> "Constraint":
        """Text that `pattern` matches from its first character to its last."""
        return Constraint("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str], *, param: str = PARAM) -> "Constraint":
        """One of these texts."""
        return Constraint("choice", _dumped(list(texts) if isinstance(texts, tuple) else texts, param), param=param)

    @staticmethod
    def grammar(source: str) -> "Constraint":
        """Text of a grammar: Lark's notation, with `start` as the first rule, or GBNF, with `root`."""
        return Constraint("grammar", source)


def _bad(why: str, param: str) -> BadRequest:
    return BadRequest(f"{param}: {why}", param)


def _checked(kind: Kind, source: str, param: str) -> str:
    """The source, in one form if it is JSON."""
    _check_text(kind, source, param)
    if kind in ("json_schema", "choice"):
        source = _checked_schema(source, param) if kind == "json_schema" else _checked_choices(source, param)
        _check_text(kind, source, param)
    elif (kind == "json_object") != (not source):
        needs = "no source" if source else "a source that is not empty"
        raise _bad(f"a constraint of kind {kind} has {needs}", param)
    return source


def _check_text(kind: str, source: str, param: str) -> None:
    """Raise `BadRequest` for a source that is too long, or is no text that can be encoded."""
    try:
        size = len(source) if len(source) > MAX_SOURCE_BYTES else len(source.encode())
    except UnicodeEncodeError:
        raise _bad(f"the {kind} of a constraint has half a surrogate pair, which is no text", param) from None
    if size > MAX_SOURCE_BYTES:
        raise _bad(f"the {kind} of a constraint has {size} bytes; {MAX_SOURCE_BYTES} are allowed", param)


def _of_class(schema: Any) -> Any:
    """The schema of a class of pydantic; anything else as it is."""
    if not isinstance(schema, type):
        return schema
    from pydantic import BaseModel  # 0.1 s, for those who pass a class

    return schema.model_json_schema() if issubclass(schema, BaseModel) else schema


def _dumped(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"a constraint is made of JSON, and {shown(value)} is none: {shown(str(error))}", PARAM) from error


def _loaded(text: str, param: str) -> Any:
    """JSON of at most `MAX_DEPTH` levels."""
    try:
        found = json.loads(text, parse_constant=no_number)
    except RecursionError:
        found = None
    except ValueError as error:
        raise _bad(f"a constraint is made of JSON, and this is none: {shown(str(error))}", param) from error
    else:
        if not deeper(found, MAX_DEPTH):
            return found
    raise _bad(f"a schema is nested more than {MAX_DEPTH} deep", param)


def _checked_choices(source: str, param: str) -> str:
    choices = _loaded(source, param)
    if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_VALUES:
        raise _bad(f"a choice is a list of 1 to {MAX_VALUES} strings, not {shown(choices)}", param)
    for text in choices:
        if not isinstance(text, str) or not text:
            raise _bad(f"each choice is a string that is not empty, not {shown(text)}", param)
    return _dumped(list(dict.fromkeys(choices)), param)


def _checked_schema(source: str, param: str) -> str:
    """The schema in one form of JSON. Raises `BadRequest` where it is over a bound."""
    schema = _loaded(source, param)
    if not isinstance(schema, dict):
        raise _bad(f"a schema is a JSON object, not {shown(schema)}", param)
    properties = values = 0
    for each in _schemas(schema):
        properties += sum(len(each[name]) for name in _NAMED if isinstance(each.get(name), dict))
        values += len(each["enum"]) if isinstance(each.get("enum"), list) else 0
        if OVERRIDES in each:
            raise _bad(f"a schema cannot have {OVERRIDES}; remove it", param)
    for found, most, what in ((properties, MAX_PROPERTIES, "properties"), (values, MAX_VALUES, "values of enums")):
        if found > most:
            raise _bad(f"the schema has {found} {what}; {most} are allowed", param)
    return _dumped(schema, param)


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Each schema in a schema, itself first."""
    if isinstance(node, list):
        for each in node:
            yield from _schemas(each)
    elif isinstance(node, dict):
        yield node
        for name, child in node.items():
            if name in _NAMED and isinstance(child, dict):
                yield from _schemas(list(child.values()))
            elif name not in _DATA:
                yield from _schemas(child)


def _closed(node: Any, *, joined: bool) -> Any:
    """A schema whose objects have the properties that they name and no others. Objects that several schemas describe
    together (`joined`) stay open: each would forbid what the others name."""
    if isinstance(node, list):
        return [_closed(each, joined=joined) for each in node]
    if not isinstance(node, dict):
        return node
    joined = joined or any(name in node for name in _JOINED)
    found: dict[str, Any] = {}
    for name, child in node.items():
        if name in _NAMED and isinstance(child, dict):
            found[name] = {each: _closed(schema, joined=False) for each, schema in child.items()}
        else:
            same = name in _JOINED and (name == "allOf" or "properties" in node)
            found[name] = child if name in _DATA else _closed(child, joined=same)
    if not joined and "additionalProperties" not in node and ("properties" in node or "patternProperties" in node):
        found["additionalProperties"] = False
    return found
