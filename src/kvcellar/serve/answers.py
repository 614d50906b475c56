"""answers: what all JSON objects have in common that the server sends, and the shapes that several APIs share.

An `Answer` is written by its fields, and declared by them in the OpenAPI document: one that may be `UNSET` may be
absent, and all others are always there, those with a default, too. The comment on a field is its description. An
`Iterable` may be an iterator, which is encoded in chunks and makes its items meanwhile.
"""

from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as json_string
from typing import TYPE_CHECKING, Any, Self, Union, get_args, get_type_hints
from uuid import uuid4

from msgspec import Struct, UnsetType

from kvcellar.serve.http.json_text import to_json

if TYPE_CHECKING:  # commands that only send requests need no pydantic
    from pydantic import GetCoreSchemaHandler

Anything = dict[str, Any]  # an object whose keys are not declared here


@dataclass(frozen=True, slots=True)
class EncodedAs:
    """In the annotation of a `Raw`: the JSON of what it is."""

    type: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        return handler.generate_schema(self.type)


class Answer(Struct):
    @classmethod
    def of(cls, value: object, **more: Any) -> Self:
        """With `more`, and the attributes of `value` that have the names of the other fields."""
        return cls(**{name: getattr(value, name) for name in cls.__struct_fields__ if name not in more}, **more)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: "GetCoreSchemaHandler") -> Any:
        """For the document, whose schemas are pydantic's."""
        fields: dict[str, Any] = {}
        for name, of in get_type_hints(cls, include_extras=True).items():
            kinds = get_args(of) if UnsetType in get_args(of) else ()
            declared = Union[tuple(kind for kind in kinds if kind is not UnsetType)] if kinds else of  # noqa: UP007
            schema = handler.generate_schema(declared)
            fields[name] = {"type": "typed-dict-field", "schema": schema, "required": not kinds}
        ref = f"{cls.__module__}.{cls.__qualname__}:{id(cls)}"
        return {"type": "typed-dict", "fields": fields, "cls": cls, "ref": ref}


TEXT, OTHER = uuid4().hex, uuid4().hex  # values that a `Template` replaces; no client knows them


class Template:
    """What a stream sends for each token: the constant parts are encoded once."""

    def __init__(self, written: bytes) -> None:
        """`written`: encoded answers in which some texts are `TEXT`, and some values `OTHER`."""
        text, other = to_json(TEXT).decode(), to_json(OTHER).decode()
        self._parts = [part.split(text) for part in written.decode().split(other)]

    def fill(self, text: str, other: str = "") -> bytes:
        """`other` is JSON."""
        json = json_string(text)
        return other.join([json.join(parts) for parts in self._parts]).encode()
