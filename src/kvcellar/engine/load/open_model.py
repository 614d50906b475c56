"""open_model: what a name stands for: a directory, a model of the library, or one in the Hugging Face cache.

A model of the library comes with settings of its own. What the caller sets has precedence over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcellar.engine.load.in_library import in_library, preamble_of, shown_name
from kvcellar.engine.load.settings import NO_DRAFT, Settings
from kvcellar.engine.models.described import Described
from kvcellar.engine.models.generation_defaults import SAMPLING
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.library.library import LibraryModel
from kvcellar.text.conversation import NO_PREAMBLE, Preamble
from kvcellar.text.tokens import TextAssets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Model: TypeAlias = "str | Path | PreTrainedModel | None"
_SETTINGS = ("context", "draft_depth")  # parameters of a model that are settings of an engine


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a name stands for: a directory, another name, or a network; and the settings of its engine. `found` is the
    model of the library, if it is one."""

    model: Model
    settings: Settings
    found: LibraryModel | None

    def created(self, base: Described) -> tuple[Described, Preamble]:
        """As it was created in the library, and the messages in front of all conversations. Raises `ModelRefused`."""
        if self.found is None:
            return base, NO_PREAMBLE
        manifest = self.found.manifest
        loaded = as_created(base, shown_name(self.found), manifest.parameters, manifest.template)
        return loaded, preamble_of(manifest)


def chosen(model: Model, settings: Settings) -> Chosen:
    """Raises `ModelRefused` for a damaged model of the library."""
    found = in_library(model)
    return Chosen(model if found is None else found.directory, _settings(settings, found), found)


def as_created(loaded: Described, name: str, parameters: Mapping[str, Any], template: str | None) -> Described:
    """With the name, the sampling parameters and the chat template that a model of the library was created with. Raises
    `ModelRefused`."""
    text, given = loaded.text, {name: value for name, value in parameters.items() if name not in _SETTINGS}
    if text is None and (template is not None or "stop" in given):
        what = "chat template" if template is not None else "stop texts"
        raise ModelRefused(f"{name} was created with {what}, which need a tokenizer: {loaded.without_text}")
    if text is not None and template is not None:
        text = with_template(text, template)
    because = loaded.defaults_because
    if chosen := sorted(SAMPLING.keys() & given.keys()):
        because = f"{', '.join(chosen)}: as it was created; else {because}"
    defaults = {**loaded.defaults, **given}
    return replace(loaded, name=name, defaults=defaults, defaults_because=because, text=text)


def with_template(text: TextAssets, template: str) -> TextAssets:
    """With another chat template, whose answers are not read as the checkpoint says for its own."""
    own = text.response_template if template == text.chat_template else None
    return replace(text, chat_template=template, response_template=own)


def _settings(settings: Settings, found: LibraryModel | None) -> Settings:
    """What the caller has left open is as the model was created. Raises `BadRequest` for settings of drafts without a
    draft."""
    parameters = {} if found is None else found.manifest.parameters
    if settings.context is None and "context" in parameters:
        settings = replace(settings, context=parameters["context"])
    if settings.adapters is None and found is not None and found.adapters:
        name = shown_name(found) if settings.adapter is None else settings.adapter
        settings = replace(settings, adapters={shown_name(found): found.adapters}, adapter=name)
    depth = parameters.get("draft_depth") if settings.draft_depth is None else settings.draft_depth
    if settings.draft is None and found is not None and found.draft is not None and depth != 0:
        settings = replace(settings, draft=found.draft, draft_depth=depth)
    elif settings.draft == NO_DRAFT:
        settings = replace(settings, draft=None)
    for name in ("draft_depth", "draft_bytes"):
        if settings.draft is None and getattr(settings, name) is not None:
            raise BadRequest(f"{name} needs draft", name)
    return settings
