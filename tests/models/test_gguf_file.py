"""The header of a GGUF file is read exactly, or refused; nothing that it declares is believed."""

import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.models.gguf.gguf_file import _Reader, read_header
from kvcellar.errors import ModelRefused
from tests.models import gguf_files as gguf

FIELDS: dict[str, Any] = {
    "general.architecture": "llama", "a.whole": 7, "a.negative": -7, "a.float": 0.5, "a.truth": True, "a.text": "ü🦙",
    "a.list": [1, 2, 3], "a.texts": ["x", "", "yz"], "a.truths": [True, False],
}  # fmt: skip
ROW = gguf.Blocks(gguf.F32, (2, 3), bytes(24))
CODES = gguf.Blocks(gguf.Q8_0, (2, 32), bytes(68))
TENSORS = {"one": ROW, "two": CODES, "three": gguf.Blocks(gguf.F16, (4,), bytes(8))}
MEMORY = 4 << 20  # bytes that reading a small file may take


def raw_of(fields: dict[str, Any] = FIELDS, infos: list[bytes] | None = None, data: int = 256, **how: Any) -> bytes:
    """A file with these entries for tensors, and so many bytes of data."""
    return gguf.padded(gguf.header(fields, infos or [], **how)) + bytes(data)


def read(raw: bytes, tmp_path: Path) -> Any:
    file = tmp_path / "m.gguf"
    file.write_bytes(raw)
    return read_header(file)


def refused(raw: bytes, tmp_path: Path) -> str:
    with pytest.raises(ModelRefused) as error:
        read(raw, tmp_path)
    assert str(error.value).startswith("m.gguf ")
    assert len(str(error.value)) < 2000
    return str(error.value)


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_what_was_written_is_read(alignment: int | None, tmp_path: Path) -> None:
    fields = {**FIELDS, **({"general.alignment": alignment} if alignment else {})}
    file = gguf.write(tmp_path / "m.gguf", fields, TENSORS)
    found = read_header(file)
    assert found.fields == fields
    assert [(one.name, one.shape, one.type) for one in found.tensors.values()] == [
        (name, one.shape, one.type) for name, one in TENSORS.items()
    ]
    assert [one.bytes for one in found.tensors.values()] == [24, 68, 8]
    assert found.tensors["two"].elements == 64
    assert all(one.offset % (alignment or 32) == 0 for one in found.tensors.values())


def test_version_2_is_read_and_others_are_not(tmp_path: Path) -> None:
    assert read(raw_of(version=2), tmp_path).fields == FIELDS
    assert "version 1, and 2 and 3" in refused(raw_of(version=1), tmp_path)
    assert "version 4" in refused(raw_of(version=4), tmp_path)
    assert "version 3 in big-endian order" in refused(raw_of(version=3 << 24), tmp_path)


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"PK\3\4" + bytes(60), b"GGUF" + bytes(60)])
def test_what_is_no_gguf_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    assert "GGUF file" in refused(raw, tmp_path)


def test_every_shortened_file_is_refused(tmp_path: Path) -> None:
    raw = gguf.write(tmp_path / "m.gguf", FIELDS, TENSORS).read_bytes().rstrip(b"\0")
    for length in range(len(raw)):
        refused(raw[:length], tmp_path)


HUGE = (2**31, 2**40, 2**60, 2**63, 2**64 - 1)


@pytest.mark.parametrize("number", HUGE)
def test_declared_numbers_are_not_believed(number: int, tmp_path: Path) -> None:
    """Of tensors, fields, texts, elements and dimensions, alone or as a product, and of places in the file."""
    start, long = b"GGUF" + struct.pack("<I", 3), struct.pack("<Q", number)
    key, one = gguf.text("k"), struct.pack("<QQ", 0, 1)
    info = gguf.info("t", (4,), gguf.F32, 0)
    raws = {
        "tensors": start + long + struct.pack("<Q", 0),
        "fields": start + struct.pack("<Q", 0) + long,
        "length of a key": start + one + long,
        "length of a text": start + one + key + struct.pack("<I", 8) + long,
        "texts": start + one + key + struct.pack("<II", 9, 8) + long,
        "numbers": start + one + key + struct.pack("<II", 9, 0) + long,
        "length of a name": start + struct.pack("<QQ", 1, 0) + long + info,
        "rows": raw_of(infos=[gguf.info("t", (number, 4), gguf.F32, 0)]),
        "columns": raw_of(infos=[gguf.info("t", (4, number & ~31), gguf.Q8_0, 0)]),
        "a product": raw_of(infos=[gguf.info("t", (number, number, number, 4), gguf.F32, 0)]),
        "an offset": raw_of(infos=[gguf.info("t", (4,), gguf.F32, number & ~31)]),
    }
    tracemalloc.start()
    try:
        for raw in raws.values():
            refused(raw + bytes(256), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("kind", range(14))
def test_arrays_of_each_type_are_bounded(number: int, kind: int, tmp_path: Path) -> None:
    array = gguf.text("k") + struct.pack("<IIQ", 9, kind, number)
    assert "elements" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(64), tmp_path)


@pytest.mark.parametrize(
    ("key", "kind", "number", "allowed"),
    [
        ("tokenizer.ggml.tokens", 8, 1 << 23, 3 << 19),
        ("tokenizer.ggml.merges", 8, (3 << 19) + 1, 3 << 19),
        ("general.languages", 8, 4097, 4096),
        ("tokenizer.ggml.scores", 6, (1 << 22) + 1, 1 << 22),
        ("a.truths", 7, (1 << 22) + 1, 1 << 22),
    ],
)
def test_arrays_that_no_model_needs_are_refused_before_an_element_is_read(
    key: str, kind: int, number: int, allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the file: each element is a text of no characters, or zeros."""
    file, taken = tmp_path / "m.gguf", list[int]()
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf.text(key) + struct.pack("<IIQ", 9, kind, number))
    os.truncate(file, 100 << 20)  # a sparse file
    take = _Reader._take
    monkeypatch.setattr(_Reader, "_take", lambda self, count, what: (taken.append(count), take(self, count, what))[1])
    with pytest.raises(ModelRefused, match=f"declares {number} elements; .* and {allowed} are allowed"):
        read_header(file)
    assert len(taken) < 10


def test_texts_of_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    number = (3 << 19) // 4096 + 1
    arrays = b"".join(gguf.text(f"k{n}") + struct.pack("<IIQ", 9, 8, 4096) + bytes(8 * 4096) for n in range(number))
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, number) + arrays
    assert f"'k{number - 1}' declares 4096 elements" in refused(raw, tmp_path)


@pytest.mark.parametrize(
    ("infos", "why"),
    [
        ([gguf.info("t", (), 0, 0)], "0 dimensions"),
        ([gguf.info("t", (1,) * 5, 0, 0)], "5 dimensions"),
        ([gguf.info("t", (0,), 0, 0)], r"shape \(0,\), which F32 cannot store"),
        ([gguf.info("t", (2, 31), gguf.Q8_0, 0)], "Q8_0 cannot store"),
        ([gguf.info("t", (4,), 40, 0)], "stored as NVFP4, which is not decoded. These types are: F32, F16, "),
        ([gguf.info("t", (4,), 77, 0)], "stored as type 77"),
        ([gguf.info("t", (4,), 0, 4)], "offset 4 of 256, aligned to 32"),
        ([gguf.info("t", (4,), 0, 256)], "16 bytes at offset 256 of 256"),
        ([gguf.info("t", (65,), 0, 0)], "260 bytes at offset 0 of 256"),
        ([gguf.info("t", (4,), 0, 0), gguf.info("t", (4,), 0, 32)], "the tensor 't' twice"),
        ([gguf.info("t", (12,), 0, 0), gguf.info("u", (4,), 0, 32)], "'t' and 'u' overlap"),
        ([gguf.info("t", (4,), 0, 0), gguf.info("u", (4,), 0, 0)], "'t' and 'u' overlap"),
        ([gguf.info("x" * 257, (4,), 0, 0)], "declares 257 bytes; 256 are allowed"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(infos: list[bytes], why: str, tmp_path: Path) -> None:
    assert re.search(why, refused(raw_of(infos=infos), tmp_path))


@pytest.mark.parametrize("alignment", [0, 1, 4, 24, 1 << 21, "32", -32])
def test_an_alignment_that_is_none_is_refused(alignment: Any, tmp_path: Path) -> None:
    assert "general.alignment" in refused(raw_of({"general.alignment": alignment}), tmp_path)


def test_fields_that_are_wrong_are_refused(tmp_path: Path) -> None:
    start, key = b"GGUF" + struct.pack("<IQQ", 3, 0, 1), gguf.text("k")
    wrong = {
        "'k' twice": b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (key + gguf.value(1)),
        "unknown type 13": start + key + struct.pack("<I", 13),
        "neither 0 nor 1": start + key + struct.pack("<IB", 7, 2),
        "elements of 'k' have type 9": start + key + struct.pack("<IIQ", 9, 9, 1),
        "not UTF-8": start + key + gguf.value(b"\xff\xfe"),
        "('a key') is not UTF-8": start + gguf.text(b"\xff") + gguf.value(1),
    }
    for why, raw in wrong.items():
        assert why in refused(raw + bytes(64), tmp_path)


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelRefused, match="cannot be read"):
            read_header(path)


WHOLE = gguf.padded(
    gguf.header(FIELDS, [gguf.info("one", (2, 3), gguf.F32, 0), gguf.info("two", (2, 32), gguf.Q8_0, 32)])
) + bytes(100)


@given(changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 101), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_a_header_that_holds_or_a_refusal(
    changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(WHOLE)
    for place, byte in changes:
        raw[place] = byte
    file = tmp_path_factory.getbasetemp() / "changed.gguf"
    file.write_bytes(raw)
    try:
        found = read_header(file)
    except ModelRefused:
        return
    for one in found.tensors.values():
        assert 0 <= one.offset <= one.offset + one.bytes <= len(raw)
        assert one.elements <= len(raw)


@given(raw=st.binary(max_size=200))
def test_any_bytes_after_the_counts_are_read_or_refused(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "any.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + raw)
    try:
        assert len(read_header(file).tensors) == 1
    except ModelRefused:
        pass
