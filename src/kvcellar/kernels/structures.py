"""structures: structures and constants of our C++ sources, read from them for ctypes: each is written once, in C++.

The structures of calls are written in a part of C++ that is read here: each line declares fields of one type, which is
`int64_t`, `int32_t`, `float`, `double`, a pointer, a pointer to a function, or another such structure. Functions of a
structure stand behind an empty line. Anything else raises, when the module of the kernel is imported. Both sides have
the sizes and places of fields that C has on the platform.
"""

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kvcellar.kernels.built import sources

_NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}
_FUNCTION = re.compile(r"\w+ \(\*(\w+)\)\(.*\)")


def structure(source: Path, name: str) -> Any:
    """The structure of that name in a source, or in a header of ours that it includes."""
    return _made(name, *_defined(source, rf"struct {name} {{(.*?)\n(?:\n|}})", name))


@cache
def _made(name: str, file: Path, body: str) -> Any:
    """One for each definition, whichever source asks for it."""
    fields = [field for line in re.sub("//.*", "", body).split(";") if line.strip() for field in _fields(file, line)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def constant(source: Path, name: str) -> int:
    """The whole number of that name in a source, or in a header of ours that it includes."""
    return int(_defined(source, rf"\b{name} = (\d+)\b", name)[1])


def _fields(source: Path, declaration: str) -> Iterator[tuple[str, Any]]:
    if function := _FUNCTION.fullmatch(declaration.strip()):
        yield function[1], ctypes.c_void_p
        return
    kind, names = declaration.strip().removeprefix("const ").split(maxsplit=1)
    for one in names.split(","):
        name = re.findall(r"\w+", one)[-1]
        pointer = "*" in one or kind.endswith("*")
        yield name, ctypes.c_void_p if pointer else _NUMBERS.get(kind) or structure(source, kind)


def _defined(source: Path, pattern: str, name: str) -> tuple[Path, str]:
    """The file that has the one definition, and what the first group of its pattern matches there."""
    found = [(file, one) for file in sources(source) for one in re.findall(pattern, file.read_text(), re.DOTALL)]
    assert len(found) == 1, f"{source.name} and its headers have {len(found)} definitions of {name}"
    return found[0]
