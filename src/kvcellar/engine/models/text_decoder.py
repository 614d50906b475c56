"""text_decoder: texts without images, where a network's own forward needs an image with every text.

Such a network puts features in place of the embeddings of placeholders, and calls a language model that has a head of
its own. A text without images is what that language model makes of it, and so is every step, whose rows of images have
their features already (`vision`). The network stays whole: its own forward runs where it gets an image.
"""

import inspect
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from kvcellar.engine.models.input_limits import placeholder_of

if TYPE_CHECKING:  # recorded steps run without transformers
    from transformers import PreTrainedModel


class TextForward:
    """The forward of a network from now on: that of its decoder, where no argument is one that only its own has."""

    def __init__(self, network: "PreTrainedModel", decoder: "PreTrainedModel") -> None:
        self._own, self._decoder = network.forward, decoder
        self._names = inspect.signature(decoder.forward).parameters.keys()
        several = dict.fromkeys([*inspect.signature(network.forward).parameters, *self._names])
        self.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in several])

    def __call__(self, **given: Any) -> Any:
        return self._decoder(**given) if given.keys() <= self._names else self._own(**given)


def let_decoder_read(network: "PreTrainedModel") -> bool:
    """Let the decoder of a network read texts without images. False: it has none with a head of its own, or does not
    put features in place of tokens."""
    decoder = _decoder_with_head(network)
    if decoder is None or placeholder_of(network) is None:
        return False
    network.forward = TextForward(network, decoder)
    return True


def _decoder_with_head(network: "PreTrainedModel") -> "PreTrainedModel | None":
    from transformers import PreTrainedModel

    head = network.get_output_embeddings()
    for child in network.children():
        if isinstance(child, PreTrainedModel) and head is not None and child.get_output_embeddings() is head:
            return None if child.config.is_encoder_decoder else child
    return None
