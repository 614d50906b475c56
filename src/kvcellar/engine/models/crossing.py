"""crossing: layers of a decoder that attend to images by cross-attention.

Such a layer has no cells, for its keys and values are of images, whatever the text is: they are computed once, with the
image, and kept with its features. In a step the network runs these layers with one state that is not read, and their
attention gets the keys and values of the images that each row sees. A row that sees none gets zeros.

Some decoders run these layers without images, too. What their processors pass with text alone is an image that no token
sees; `with_no_image` does so without the pixels, so that no tower runs.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvcellar.errors import ModelRefused
from kvcellar.memory.shapes import Scoring

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Crossed(NamedTuple):
    """Of one image: keys [G,n,D] and values [G,n,Dv] of each attention module, and the arguments with which a decoder
    runs these modules, with one state."""

    kv: Mapping[nn.Module, tuple[Tensor, Tensor]]
    given: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.kv.values())


class Seen(NamedTuple):
    """Rows of a step [r], and the images that each of them sees."""

    rows: Tensor
    images: Sequence[Crossed]


SEES = {  # arguments that say which images a token sees by cross-attention, and which say what tiles these have
    "cross_attention_mask": "aspect_ratio_mask", "image_attention_mask": "",
}  # fmt: skip


def with_no_image(model: "PreTrainedModel") -> None:
    """Let a decoder that has images with every text have one that no token sees, wherever it gets none."""
    decoder = model.get_decoder()
    accepts = inspect.signature(decoder.forward).parameters
    sees = next((name for name in SEES if name in accepts), None)
    if sees is None or "image_encoder_embeddings" not in accepts:
        return
    resampled, width = bool(model.config.use_resampler), model.config.vision_config.hidden_size
    name = "perceiver_embeddings" if resampled else "image_encoder_embeddings"

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("pixel_values") is not None:
            return args, kwargs
        ids: Tensor = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        state = torch.zeros(1, 1, 1, width, dtype=model.dtype, device=ids.device)
        return args, {**kwargs, name: state, sees: ids.new_zeros(1, ids.shape[1], 1, dtype=torch.long)}

    decoder.register_forward_pre_hook(add, with_kwargs=True)


def attend_images(seen: Sequence[Seen], module: nn.Module, q: Tensor, size: int, scoring: Scoring) -> Tensor:
    """q [1,H,T,D] -> [1,T,H,size], of a module that attends to images."""
    if scoring.softcap is not None or scoring.sinks is not None:
        raise ModelRefused("its attention to images has a soft cap or sinks, which is not supported")
    out = q.new_zeros(1, q.shape[2], q.shape[1], size)
    for rows, images in seen:
        several = [one.kv[module] for one in images]
        k, v = several[0] if len(several) == 1 else (torch.cat(each, 1) for each in zip(*several, strict=True))
        found = scaled_dot_product_attention(
            q.index_select(2, rows), k[None], v[None], scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[0]
        )
        out.index_copy_(1, rows, found.transpose(1, 2))
    return out
