"""open_vision: whether a model takes images: its network is compared with its own forward over a text with two."""

import torch

from kvcellar.engine.models.build_guest import reason_of
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import Loaded
from kvcellar.engine.models.registered import our_attention
from kvcellar.engine.models.selftest import image_test
from kvcellar.engine.models.vision import Vision, vision_of
from kvcellar.images.processing import Processor, a_test_image
from kvcellar.progress import report
from kvcellar.values import MOST


def open_vision(guest: Guest, loaded: Loaded) -> None:
    """Let a guest take images, if its network does, and gives its own logits with them; else say why it does not."""
    if (vision := vision_of(guest.model)) is None:
        return
    if loaded.path is None:
        guest.not_seeing = "the network was given without an image processor; load it from a directory"
        return
    report("testing images")
    try:
        with silence_transformers():
            processor = Processor(loaded.path, loaded.path.name, vision.placeholder, MOST)
            guest.not_seeing = _refused(guest, vision, processor)
    except MODEL_ERRORS as error:
        guest.not_seeing = reason_of(error)
    finally:
        if guest.mode == "flat":
            our_attention(guest.model)
    if not guest.not_seeing:
        guest.vision = vision


def _refused(guest: Guest, vision: Vision, processor: Processor) -> str:
    """Why its logits with images are not those of its own forward; "": they are."""
    made = processor.process(a_test_image())
    tokens = processor.tokens(made.text)
    places = [at for at, token in enumerate(tokens) if token == vision.placeholder]
    if len(places) != made.input.rows or not places:
        return f"its processor writes {len(places)} placeholders for an image of {made.input.rows} rows"
    inputs = {one.name: torch.tensor(one.array(), device=guest.device) for one in made.input.arrays}
    inputs = {name: one.to(guest.dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    ids = tokens[places[0] : places[-1] + 1]
    guest.vision = vision
    try:
        verdict = image_test(guest, vision, ids, inputs)
        guest.ahead = vision.encode(ids, inputs).ahead
    finally:
        guest.vision = None
    return "" if verdict.passed else f"with images, {verdict}"
