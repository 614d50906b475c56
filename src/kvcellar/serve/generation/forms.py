"""forms: what those fields of bodies may be that are checked where they are read, and not with the rest of the body.

`of(form)` declares the form of a field for the OpenAPI document; the value is not looked at. Tests send what the forms
allow and what they do not.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

CLOSED = ConfigDict(extra="forbid")
Schema = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Inputs = str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]


def of(form: Any) -> BeforeValidator:
    return BeforeValidator(_as_sent, json_schema_input_type=form)


def _as_sent(value: object) -> object:
    return value


# -- tools --------------------------------------------------------------------------------------------------------


class FunctionForm(TypedDict):
    name: Name
    description: NotRequired[Any]  # is part of the prompt
    parameters: NotRequired[Schema | None]  # a JSON schema of an object
    strict: NotRequired[Any]  # `true`: the arguments are valid by the schema


class ToolForm(TypedDict):
    type: NotRequired[Literal["function"]]
    function: FunctionForm


class FlatToolForm(FunctionForm):
    type: NotRequired[Literal["function"]]


class NamedForm(TypedDict):
    name: str


class NamedFunctionForm(TypedDict):
    type: NotRequired[Literal["function"]]
    function: NamedForm


class FlatNamedFunctionForm(NamedForm):
    type: NotRequired[Literal["function"]]


class ChosenFunctionForm(TypedDict):
    """The function must be called."""

    type: Literal["function"]
    function: NamedForm


class FlatChosenFunctionForm(NamedForm):
    type: Literal["function"]


class AllowedForm(TypedDict):
    mode: NotRequired[Literal["auto", "required"]]
    tools: Annotated[list[NamedFunctionForm | FlatNamedFunctionForm], Field(min_length=1, max_length=512)]


class AllowedToolsForm(TypedDict):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedForm


class FlatAllowedToolsForm(AllowedForm):
    type: Literal["allowed_tools"]


ToolForms = list[ToolForm | FlatToolForm] | None
ToolChoiceForms = (
    Literal["none", "auto", "required"]
    | ChosenFunctionForm
    | FlatChosenFunctionForm
    | AllowedToolsForm
    | FlatAllowedToolsForm
    | None
)


# -- structured output --------------------------------------------------------------------------------------------


class TextFormat(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]

    type: Literal["text"]


class JsonObjectFormat(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]

    type: Literal["json_object"]
    schema: NotRequired[Schema | None]  # llama.cpp's form of `json_schema`


class NamedSchemaForm(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]

    name: NotRequired[str | None]
    description: NotRequired[str | None]
    schema: Schema
    strict: NotRequired[bool | None]


class JsonSchemaFormat(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]

    type: Literal["json_schema"]
    json_schema: NamedSchemaForm


class FlatJsonSchemaFormat(NamedSchemaForm):
    __pydantic_config__ = CLOSED  # type: ignore[misc]

    type: Literal["json_schema"]


ResponseFormats = TextFormat | JsonObjectFormat | JsonSchemaFormat | None
TextFormats = TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None


class StructuredOutputsForm(TypedDict):
    """One of the first five says what the answer has to match."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]

    json: NotRequired[Schema | str | Literal[False] | None]  # a schema, or its text
    json_object: NotRequired[bool | None]
    regex: NotRequired[str | Literal[False] | None]
    choice: NotRequired[list[str] | Literal[False] | None]
    grammar: NotRequired[str | Literal[False] | None]
    disable_any_whitespace: NotRequired[bool | None]
    disable_additional_properties: NotRequired[bool | None]
    disable_fallback: NotRequired[bool | None]
    structural_tag: NotRequired[None]
    whitespace_pattern: NotRequired[None]


# -- prompts ------------------------------------------------------------------------------------------------------

# A text or token ids, or a list of either; a conversation is continued by one of them, which may be empty.
Prompts = str | Texts | list[int] | Annotated[list[TokenIds], Field(min_length=1)]
OnePrompt = str | list[int] | None


class ResponseTextPart(TypedDict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ResponseRefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


ResponseContent = str | list[ResponseTextPart | ResponseRefusalPart]


class ResponseMessageItem(TypedDict):
    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: ResponseContent


class ResponseCallItem(TypedDict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseResultItem(TypedDict):
    type: Literal["function_call_output"]
    call_id: str
    output: ResponseContent


class ResponseReasoningPart(TypedDict):
    text: str


class ResponseReasoningItem(TypedDict):
    """Its content, else its summary; what another server has encrypted is ignored."""

    type: Literal["reasoning"]
    content: NotRequired[list[ResponseReasoningPart] | None]
    summary: NotRequired[list[ResponseReasoningPart] | None]


ResponseInput = (
    str
    | Annotated[
        list[ResponseMessageItem | ResponseCallItem | ResponseResultItem | ResponseReasoningItem],
        Field(min_length=1, max_length=4096),
    ]
)


class AnthropicTextForm(TypedDict):
    type: Literal["text"]
    text: str


ToolResultContent = str | list[AnthropicTextForm] | None
Duration = str | float | None  # `5m`, `1h30m`, a number of seconds; below 0: for ever
