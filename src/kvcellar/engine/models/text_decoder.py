"""text_decoder: texts without images, where a network's own forward needs an image with every text.

Such a network puts features in place of the embeddings of placeholders, and calls a language model that has a head of
its own. A text without images is what that language model makes of it, and so is every step, whose rows of images have
their features already (`vision`). The network stays whole: its own forward runs where it gets an image.
"""

import inspect
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

from transformers import PreTrainedModel

from kvcellar.engine.models.input_limits import placeholder_of


def let_decoder_read(model: PreTrainedModel) -> bool:
    """From now on, a call of the network without arguments that only its own forward has is one of its decoder. False:
    it has none with a head and a cache of its own, or does not put features in place of tokens."""
    found = _inner(model)
    if found is None or placeholder_of(model) is None:
        return False
    inner, own = found, model.forward
    names = inspect.signature(inner.forward).parameters

    def forward(**given: Any) -> Any:
        return inner(**given) if given.keys() <= names.keys() else own(**given)

    accepted = dict.fromkeys([*inspect.signature(own).parameters, *names])
    forward.__signature__ = _of_names([*accepted])  # pyright: ignore[reportFunctionMemberAccess]
    model.forward = forward
    return True


def _inner(model: PreTrainedModel) -> PreTrainedModel | None:
    decoder = model.get_output_embeddings()
    for child in model.children():
        if isinstance(child, PreTrainedModel) and decoder is not None and child.get_output_embeddings() is decoder:
            return None if child.config.is_encoder_decoder else child
    return None


def _of_names(names: Sequence[str]) -> inspect.Signature:
    return inspect.Signature([Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names])
