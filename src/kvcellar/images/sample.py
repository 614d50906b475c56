"""sample: an image to test a network with, as a front end would send it."""

from pathlib import Path

from PIL import Image

from kvcellar.images.image import ImageInput
from kvcellar.images.processing import Processor

SIZE = (200, 120)  # pixels: what processors cut, pad and scale by sides shows
MOST_ROWS = 1 << 16


def sample_of(folder: Path, placeholder: int) -> tuple[list[int], ImageInput]:
    """The tokens of an image for the model in `folder`, and what its processor makes of it. Raises `ModelRefused`, with
    the reason, if its processor cannot be used."""
    width, height = SIZE
    image = Image.frombytes("RGB", SIZE, bytes(at * at % 251 for at in range(3 * width * height)))
    processor = Processor(folder, "", placeholder, MOST_ROWS)
    made = processor.process(image)
    return processor.tokens(made.text), made.input
