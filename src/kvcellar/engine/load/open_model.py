"""open_model: loads what a name stands for: a directory, a model of the library, or one in the Hugging Face cache.

A model of the library comes with settings of its own. What the caller sets has precedence over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcellar.engine.load.in_library import in_library, preamble_of, shown_name
from kvcellar.engine.load.settings import NO_DRAFT, Settings
from kvcellar.engine.models.generation_defaults import SAMPLING
from kvcellar.engine.models.load import Loaded, load
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.library.library import LibraryModel
from kvcellar.text.conversation import NO_PREAMBLE, Preamble
from kvcellar.text.tokens import TextAssets

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SETTINGS = ("context", "draft_depth")  # parameters of a model that are settings of an engine


@dataclass(frozen=True, slots=True)
class Opened:
    """A network, the messages in front of all conversations with it, and the settings of its engine. `base`: without
    the name, parameters and template that a model of the library was created with."""

    base: Loaded
    loaded: Loaded
    preamble: Preamble
    settings: Settings


def open_model(model: "str | Path | PreTrainedModel | None", settings: Settings) -> Opened:
    """Raises what `load` raises, and `ModelRefused` for a damaged model of the library."""
    found = in_library(model)
    settings = _settings(settings, found)
    path = model if found is None else found.directory
    base = load(path, dtype=settings.dtype, device=settings.device, weights=settings.weights)
    if found is None:
        return Opened(base, base, NO_PREAMBLE, settings)
    loaded = as_created(base, shown_name(found), found.manifest.parameters, found.manifest.template)
    return Opened(base, loaded, preamble_of(found.manifest), settings)


def as_created(loaded: Loaded, name: str, parameters: Mapping[str, Any], template: str | None) -> Loaded:
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
