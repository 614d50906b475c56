"""A picture at the terminal: half-blocks in the colours of the image, and only where they are wanted."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from kvcellar.cli.chat import Chat, PromptFormat
from kvcellar.cli.picture import COLUMNS, draws, lines
from kvcellar.images.image import ImageInput, ProcessedImage

COLOURS = {"COLORTERM": "truecolor"}
CELL = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+)(?:;48;2;(\d+);(\d+);(\d+))?m▀")


def jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.mark.parametrize(
    ("size", "columns", "rows"),
    [((96, 96), 40, 20), ((96, 48), 40, 10), ((8, 5), 8, 3), ((1, 96), 1, 20), ((96, 1), 40, 1)],
)
def test_a_picture_has_the_shape_of_the_image(size: tuple[int, int], columns: int, rows: int) -> None:
    drawn = list(lines(jpeg(Image.new("RGB", size, "red"))))
    assert len(drawn) == rows
    assert {len(CELL.findall(line)) for line in drawn} == {columns}
    assert columns <= COLUMNS
    assert all(line.endswith("\x1b[0m") for line in drawn)


def test_a_cell_has_the_colours_of_two_pixels() -> None:
    image = Image.new("RGB", (32, 32), "black")
    image.paste((255, 255, 255), (0, 0, 32, 16))
    drawn = list(lines(jpeg(image), columns=2))
    ((*upper, _, _, _), _) = CELL.findall(drawn[0])
    assert min(map(int, upper)) > 200
    (*_, red, green, blue) = CELL.findall(drawn[0])[0]
    assert max(int(red), int(green), int(blue)) < 60


@pytest.mark.parametrize(
    ("environ", "terminal", "drawn"),
    [
        (COLOURS, True, True),
        ({"COLORTERM": "24bit", "NO_COLOR": ""}, True, True),
        (COLOURS, False, False),
        (COLOURS | {"NO_COLOR": "1"}, True, False),
        ({"COLORTERM": "256"}, True, False),
        ({}, True, False),
    ],
)
def test_terminals_say_what_they_can(environ: dict[str, str], terminal: bool, drawn: bool) -> None:
    assert draws(environ, terminal=terminal) == drawn


@pytest.mark.parametrize("terminal", [True, False])
def test_a_chat_shows_the_image_that_is_sent_next(
    terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    thumbnail = jpeg(Image.new("RGB", (60, 30), "blue"))
    image = ProcessedImage(ImageInput(bytes(32), 7, ()), "", 600, 300, thumbnail=thumbnail)
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(has_chat=True), session=lambda chat, system: None, image=lambda source: image
    )
    chat = Chat(engine, PromptFormat(ids=False), {}, raw=False, quiet=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    chat._handle(f"/image {tmp_path / 'a.png'}")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (11 if terminal else 1)
    assert ("▀" in said[0]) == terminal
    assert said[-1] == "  600 x 300 pixels, 7 tokens; the next message has 1 image"
