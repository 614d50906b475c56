"""picture: an image in lines of half-block characters, for terminals that say that they have colours of 24 bits."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvcellar.images.image import ProcessedImage

COLUMNS = 40
UPPER = "▀"  # has the colour of the text, and below it is that of the background
ESCAPE, PLAIN = "\x1b[", "\x1b[0m"


def draws(environ: Mapping[str, str], *, terminal: bool) -> bool:
    """Whether pictures are drawn on what may be a `terminal` (see no-color.org)."""
    return terminal and not environ.get("NO_COLOR") and environ.get("COLORTERM") in ("truecolor", "24bit")


def lines(thumbnail: bytes, columns: int = COLUMNS) -> Iterator[str]:
    """A JPEG in lines of at most so many characters, each of which is two pixels high."""
    from PIL import Image  # not at the top: only where there are images

    image = Image.open(BytesIO(thumbnail), formats=["JPEG"])
    image.thumbnail((columns, columns))
    width, height = image.size
    pixels = image.convert("RGB").tobytes()
    for row in range(0, height, 2):
        line = ""
        for at in range(3 * row * width, 3 * (row + 1) * width, 3):
            upper, lower = pixels[at : at + 3], pixels[at + 3 * width : at + 3 * width + 3]
            behind = f";48;2;{_numbers(lower)}" if lower else ""
            line += f"{ESCAPE}38;2;{_numbers(upper)}{behind}m{UPPER}"
        yield line + PLAIN


def _numbers(color: bytes) -> str:
    return ";".join(map(str, color))


def show(image: "ProcessedImage") -> None:
    """Print an image, where the terminal can show it."""
    if image.thumbnail and draws(os.environ, terminal=sys.stdout.isatty()):
        for line in lines(image.thumbnail, max(1, min(COLUMNS, shutil.get_terminal_size().columns - 2))):
            click.echo(f"  {line}")
