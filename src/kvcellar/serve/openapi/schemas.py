"""schemas: JSON Schemas of the types of bodies and answers, described by the comments of their fields."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import get_original_bases

from kvcellar.serve.openai.usage import DRAFT_TIMINGS, TIMINGS
from kvcellar.serve.openapi.answers_openai import TimingsFields
from kvcellar.serve.openapi.answers_shared import RecallFields, SpeculationFields
from kvcellar.serve.openapi.comments import Comments, plain
from kvcellar.serve.recalls import RECALL
from kvcellar.serve.speculations import SPECULATION

Json = dict[str, Any]
Mode = Literal["validation", "serialization"]
BODY: Mode = "validation"
ANSWER: Mode = "serialization"

# Fields that are described elsewhere than in comments.
MEANINGS: Mapping[type, Mapping[str, str]] = MappingProxyType(
    {RecallFields: RECALL, SpeculationFields: SPECULATION, TimingsFields: {**TIMINGS, **DRAFT_TIMINGS}}
)
Found = tuple[Callable[[Hashable, Mode], Json], dict[str, Json]]


def schemas(types: Iterable[tuple[Hashable, Mode, Any]]) -> Found:
    """`types` are keys, what each is of, and the types. Returns the schema of a key, and what all refer to by name."""
    inputs: list[tuple[Hashable, Mode, TypeAdapter[Any]]] = [(key, mode, TypeAdapter(of)) for key, mode, of in types]
    made, definitions = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_generator(Comments())
    )
    return lambda key, mode: made[key, mode], definitions.get("$defs", {})


def _generator(comments: Comments) -> type[GenerateJsonSchema]:
    class Described(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def model_schema(self, schema: Any) -> Json:
            return _described(super().model_schema(schema), schema["cls"], comments)

        def typed_dict_schema(self, schema: Any) -> Json:
            return _described(super().typed_dict_schema(schema), schema["cls"], comments)

    return Described


def _described(made: Json, cls: type, comments: Comments) -> Json:
    found = {_name_sent(cls, name): text for name, text in _comments(cls, comments).items()}
    for name, schema in made.get("properties", {}).items():
        if text := found.get(name):
            schema["description"] = plain(text)
    return made


def _name_sent(cls: type, name: str) -> str:
    """The name of a field as clients write it."""
    found = cls.model_fields.get(name) if issubclass(cls, BaseModel) else None
    return found.alias or name if found is not None else name


def _comments(cls: type, comments: Comments) -> dict[str, str]:
    """Of its own fields and of those of its bases."""
    found: dict[str, str] = {}
    for base in get_original_bases(cls):
        if isinstance(base, type) and base.__module__.startswith("kvcellar."):
            found |= _comments(base, comments)
    own = {name: text for name, text in comments.of(cls).items() if text}
    return {**found, **MEANINGS.get(cls, {}), **own}
