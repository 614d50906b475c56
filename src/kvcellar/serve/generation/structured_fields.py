"""structured_fields: the fields by which clients ask for structured output, by the names of several servers, as one
`Constraint`.

Each has a closed set of keys: an unknown one is refused, because it may be a constraint that would not be honoured.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvcellar.constraint import Constraint
from kvcellar.errors import BadRequest, shown

Object = Mapping[str, Any]

FORMATS = ("text", "json_object", "json_schema")
SCHEMA_KEYS = ("name", "description", "schema", "strict")
KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of vLLM's `structured_outputs`
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
REFUSED = ("structural_tag", "whitespace_pattern")  # vLLM's that are not followed: null only


def constraint_of(
    response_format: Object | None = None,
    structured_outputs: Object | None = None,
    grammar: str | None = None,
    json_schema: Object | None = None,
) -> Constraint | None:
    """What these fields of a request say together. Raises `BadRequest` with the field, also where two of them ask for
    something."""
    found: dict[str, Constraint] = {}
    if response_format is not None and (made := of_response_format(response_format)) is not None:
        found["response_format"] = made
    if structured_outputs is not None and (made := of_structured_outputs(structured_outputs)) is not None:
        found["structured_outputs"] = made
    if grammar:
        found["grammar"] = Constraint("grammar", grammar, param="grammar")
    if json_schema is not None:
        found["json_schema"] = Constraint.json_schema(json_schema, param="json_schema")
    if len(found) > 1:
        names = list(found)
        raise BadRequest(f"{names[0]} and {names[1]} both say what the answer has to match; send one", names[1])
    return next(iter(found.values()), None)


def of_response_format(given: Object, param: str = "response_format") -> Constraint | None:
    """OpenAI's `response_format`. None for free text."""
    kind = given.get("type")
    if kind == "json_schema":
        _check_keys(given, ("type", "json_schema"), param)
        return of_named_schema(_object(given, "json_schema", param), f"{param}.json_schema")
    if kind == "json_object":
        _check_keys(given, ("type", "schema"), param)  # `schema` is llama.cpp's
        if given.get("schema") is None:
            return Constraint("json_object", param=param)
        return Constraint.json_schema(_object(given, "schema", param), param=param)
    if kind == "text":
        _check_keys(given, ("type",), param)
        return None
    formats = ", ".join(FORMATS)
    raise BadRequest(f"{param}.type must be one of {formats}", f"{param}.type")


def of_named_schema(given: Object, param: str, keys: tuple[str, ...] = SCHEMA_KEYS) -> Constraint:
    """A schema with its name, its description and `strict`, as OpenAI and others write it. Name and description say
    nothing about the answer."""
    _check_keys(given, keys, param)
    for name in ("name", "description"):
        if not isinstance(given.get(name), str | None):
            raise BadRequest(f"{param}.{name} must be a string", f"{param}.{name}")
    strict = _flag(given, "strict", param)
    return Constraint.json_schema(_object(given, "schema", param), strict=strict, param=f"{param}.schema")


def of_structured_outputs(given: Object, param: str = "structured_outputs") -> Constraint | None:
    """vLLM's `structured_outputs`. None where it asks for nothing."""
    _check_keys(given, (*KINDS, *OPTIONS, *REFUSED), param)
    for name in REFUSED:
        if given.get(name) is not None:
            raise BadRequest(f"{param}.{name} is not supported; leave it out", f"{param}.{name}")
    compact, strict, _, _ = (_flag(given, name, param) for name in (*OPTIONS, "json_object"))
    asked = [name for name in KINDS if given.get(name) is not None and given[name] is not False]  # 0 is not false
    if len(asked) > 1:
        raise BadRequest(f"{param} has {asked[0]} and {asked[1]}; send one of them", param)
    if not asked:
        return None
    value, param = given[asked[0]], f"{param}.{asked[0]}"
    if asked == ["json"]:
        if not isinstance(value, str | Mapping):
            raise BadRequest(f"{param} must be a schema, as an object or as JSON text", param)
        return Constraint.json_schema(value, strict=strict, compact=compact, param=param)
    if asked == ["json_object"]:
        return Constraint("json_object", compact=compact, param=param)
    return _TEXTS[asked[0]](value, param)


_TEXTS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "regex": lambda value, param: Constraint("regex", value, param=param),
    "choice": lambda value, param: Constraint.choice(value, param=param),
    "grammar": lambda value, param: Constraint("grammar", value, param=param),
}


def _check_keys(given: Object, known: tuple[str, ...], param: str) -> None:
    for name in given:
        if name not in known:
            raise BadRequest(f"{param} has an unknown key {shown(name)}; it may have {', '.join(known)}", param)


def _object(given: Object, name: str, param: str) -> Object:
    value = given.get(name)
    if not isinstance(value, Mapping):
        what = "is required" if value is None else "must be an object"
        raise BadRequest(f"{param}.{name} {what}", f"{param}.{name}")
    return value


def _flag(given: Object, name: str, param: str) -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{param}.{name} must be true or false", f"{param}.{name}")
    return bool(value)
