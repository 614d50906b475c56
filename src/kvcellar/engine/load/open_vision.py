"""open_vision: whether a model takes images: its network is compared with its own forward over a text with two."""

from dataclasses import replace

import torch

from kvcellar.engine.models.build_guest import reason_of
from kvcellar.engine.models.features import Features
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.input_limits import random_tokens
from kvcellar.engine.models.load import Loaded
from kvcellar.engine.models.registered import our_attention
from kvcellar.engine.models.selftest import image_test
from kvcellar.engine.models.vision import Vision, vision_of
from kvcellar.errors import ModelRefused
from kvcellar.images.image import ImageInput
from kvcellar.images.sample import sample_of
from kvcellar.progress import report


def open_vision(guest: Guest, loaded: Loaded) -> None:
    """Let a guest take images, if its network does, and gives its own logits with them; else say why it does not."""
    try:
        vision = vision_of(guest.model)
    except ModelRefused as error:
        guest.not_seeing = str(error)
        return
    if vision is None:
        return
    if loaded.path is None:
        guest.not_seeing = "the network was given without an image processor; load it from a directory"
        return
    report("testing images")
    try:
        with silence_transformers():
            guest.not_seeing, like = _tested(guest, vision, *sample_of(loaded.path, vision.placeholder))
            vision = replace(vision, like=like)
    except MODEL_ERRORS as error:
        guest.not_seeing = reason_of(error)
    finally:
        if guest.mode == "flat":
            our_attention(guest.model)
    if not guest.not_seeing:
        guest.vision = vision


def _tested(guest: Guest, vision: Vision, tokens: list[int], image: ImageInput) -> tuple[str, Features | None]:
    """Why its logits with images are not those of its own forward ("": they are), and what its features are like."""
    places = [at for at, token in enumerate(tokens) if token == vision.placeholder]
    if len(places) != image.rows or not places:
        return f"its processor writes {len(places)} placeholders for an image of {image.rows} rows", None
    if vision.sees is not None and image.rows > 1:
        return f"an image is {image.rows} tokens; with cross-attention it has to be one", None
    inputs = {one.name: torch.tensor(one.array(), device=guest.device) for one in image.arrays}
    inputs = {name: one.to(guest.dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    ids = tokens[places[0] : places[-1] + 1]
    guest.vision = vision
    try:
        if guest.mode == "flat":
            our_attention(guest.model)  # its masks are asked for, and say what looks ahead
        guest.whole = vision.whole_prompts(random_tokens(guest.model, 8, torch.Generator().manual_seed(2)))
        features = vision.encode(ids, inputs)
        guest.ahead = features.ahead
        if features.in_windows:
            guest.shape = guest.shape.ahead_in_windows()
        verdict = image_test(guest, vision, tokens, inputs, features)
    finally:
        guest.vision = None
    like = features.holding([one.to("meta") for one in features.tensors(features)])
    return "" if verdict.passed else f"with images, {verdict}", like
