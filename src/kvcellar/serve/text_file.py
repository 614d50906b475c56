"""text_file: reads the text of a file that a user has written for an option."""

from pathlib import Path

from kvcellar.errors import BadRequest


def text_of(file: Path, most: int, option: str, hint: str = "") -> str:
    """The text of a file of at most `most` bytes. Raises `BadRequest` for `option` with the place; `hint` is for one
    that is larger."""
    try:
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}", option) from error
    if len(content) > most:
        raise BadRequest(f"{file} is larger than {most} bytes{hint}", option)
    try:
        return content.decode("utf-8-sig")  # skips the byte order mark that some editors write
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadRequest(f"{file}, line {line}: it is not UTF-8 text", option) from error
