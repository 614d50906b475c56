"""ollama_fields: the bodies of Ollama's routes. Unknown fields are ignored, as Ollama does; types are strict.

Ollama's clients send the name of a model as `model`, older ones as `name`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvcellar.errors import BadRequest


class OllamaBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class NamedBody(OllamaBody):
    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """Raises `BadRequest` without a name."""
        if not (found := self.model or self.name):
            raise BadRequest("model is required", "model")
        return found


class ShowBody(NamedBody):
    verbose: bool | None = None


class GenerateBody(NamedBody):
    prompt: str | None = None
    messages: list[Any] | None = None
    keep_alive: Any = None  # see `durations`


class CopyBody(OllamaBody):
    source: str
    destination: str


class PullBody(NamedBody):
    stream: bool | None = None


class CreateMessage(OllamaBody):
    role: str
    content: str


class CreateBody(NamedBody):
    from_: str | None = Field(default=None, alias="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    draft: str | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[CreateMessage] | None = Field(default=None, max_length=4096)
    requires: str | None = None
    quantize: str | None = None
    draft_quantize: str | None = None
    stream: bool | None = None
