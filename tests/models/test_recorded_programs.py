"""Programs: what passes leave out, and what is kept on disk."""

import logging
import os
import time
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.capture import capture
from kvcellar.engine.recording.facts import Unsettled
from kvcellar.engine.recording.kept import MOST_FILES, Damaged
from kvcellar.engine.recording.passes import simplified
from kvcellar.engine.recording.program import Constant, Op, Program, Ref, Value
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.recording import Captured, NotRecordable
from kvcellar.engine.recording.replay import Replay
from kvcellar.engine.recording.saved import FORMAT, Programs, decoded, digest_of, encoded
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import backends
from tests.zoo import ARCHS


@cache
def guest() -> Guest:
    return build_guest(ARCHS["llama"].build(), backends())


@cache
def captured() -> Captured:
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # else pytest keeps what torch logs of each size
    return capture(guest())


def names(program: Program) -> list[str]:
    return [op.name for op in program.ops]


def test_linear_layers_of_one_input_are_one_operator_and_nothing_is_left_that_is_not_read() -> None:
    program = captured().program
    linears = [op.args[1] for op in program.ops if op.name == "kvcellar.linear"]
    layers = [tuple(f"model.layers.{n}.self_attn.{p}_proj" for p in "qkv") for n in range(4)]
    assert [paths for paths in linears if isinstance(paths, tuple) and len(paths) == 3] == layers
    assert "aten.ones.default" not in names(program), "a mask that is not read"
    assert simplified(program) == program, "passes find nothing more"


def value(storage: int, *shape: int | str, strides: tuple[int | str, ...], dtype: str = "float32") -> Value:
    return Value(dtype, shape, strides, storage)


def small(*ops: Op, values: tuple[Value, ...], constants: dict[int, Constant] | None = None) -> Program:
    """Of ids, whose value is the first, to logits, whose value is the last."""
    inputs = dict.fromkeys(("ids", "positions", "wanted"), 0)
    return Program(("T", "W"), values, constants or {}, inputs, tuple(ops), {"logits": len(values) - 1})


ROWS = value(0, "T", 4, strides=(4, 1))


def test_a_copy_is_left_out_unless_one_side_is_written_again() -> None:
    values = (ROWS, replace(ROWS, storage=1), replace(ROWS, storage=2))
    neg = Op("aten.neg.default", (Ref(1),), {}, (2,))
    copied = small(Op("aten.mul.Tensor", (Ref(0), 1.0), {}, (1,)), neg, values=values)
    assert names(simplified(copied)) == ["aten.neg.default"]
    assert simplified(copied).ops[0].args == (Ref(0),)
    added = Op("aten.add_.Tensor", (Ref(1), 2), {}, (1,))
    written = small(Op("aten.mul.Tensor", (Ref(0), 1.0), {}, (1,)), added, neg, values=values)
    assert simplified(written) == written
    turned = small(Op("aten.clone.default", (Ref(0),), {}, (1,)), neg,
                   values=(ROWS, value(1, "T", 4, strides=(1, "T")), replace(ROWS, storage=2)))  # fmt: skip
    assert simplified(turned) == turned, "its result is in another order in memory"


def two_linears(width: int, reader: str, view: Value | None = None) -> Program:
    """Two layers on one input, of which the first result is read by `reader`, and both are added."""
    rows = [value(n, "T", width, strides=(width, 1)) for n in (1, 2, 3, 4)]
    values = (ROWS, rows[0], rows[1], view or rows[0], rows[2], rows[3])
    return small(
        Op("kvcellar.linear", (Ref(0), ("a",)), {}, (1,)),
        Op("kvcellar.linear", (Ref(0), ("b",)), {}, (2,)),
        Op(reader, (Ref(3),), {}, (4,)),
        Op("aten.add.Tensor", (Ref(4), Ref(2)), {}, (5,)),
        values=values,
    )


@pytest.mark.parametrize(
    ("width", "reader", "merged"),
    [(96, "aten.neg.default", True), (128, "aten.silu.default", True), (96, "aten.silu.default", False)],
)
def test_results_are_views_of_a_wider_row_where_functions_give_the_same_bits(
    width: int, reader: str, merged: bool
) -> None:
    """Torch computes the end of a row with a gap behind it by other code than whole vectors."""
    program = simplified(two_linears(width, reader))
    linears = [op for op in program.ops if op.name == "kvcellar.linear"]
    assert len(linears) == (1 if merged else 2)
    if merged:
        assert linears[0].args[1] == ("a", "b")
        read = program.values[program.ops[1].reads[0]]
        other = program.values[program.ops[2].reads[1]]
        assert (read.shape, read.strides, read.offset) == (("T", width), (2 * width, 1), 0)
        assert (other.shape, other.strides, other.offset) == (("T", width), (2 * width, 1), width)


def test_rows_that_are_read_as_one_are_not_made_wider() -> None:
    flat = value(1, "(T * 128)", strides=(1,))
    assert names(simplified(two_linears(128, "aten.neg.default", flat))).count("kvcellar.linear") == 2


@pytest.mark.parametrize(
    "name",
    ["llama", pytest.param("gemma3n", marks=pytest.mark.slow), "deepseek-v3", "lfm2", "llama-rope-dynamic"],
)
def test_what_is_written_is_read_again(name: str) -> None:
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    made = capture(build_guest(ARCHS[name].build(), backends()))
    content = encoded(made)
    assert decoded(content) == made
    assert len(zlib.compress(content, 9)) < 20_000


def changes() -> list[tuple[str, Any]]:
    """Where in a stored program something else is put."""
    value = {"dtype": "float32", "shape": ["T"], "strides": [1], "storage": 0, "offset": 0}
    op = {"name": "aten.neg.default", "args": [], "kwargs": {}, "outputs": [0]}
    return [
        ("symbols", ["T", "__import__"]),
        ("symbols", "TW"),
        ("values", [{"dtype": "float32", "shape": ["T"], "strides": [1]}]),
        ("values", [{**value, "dtype": "object"}]),
        ("values", [{**value, "shape": ["T.real"]}]),
        ("values", [{**value, "strides": [1, 1]}]),
        ("values", [{**value, "shape": [-1]}]),
        ("values", [{**value, "storage": -1}]),
        ("constants", {10**9: {"path": "lm_head.weight"}}),
        ("constants", {0: {"path": None, "data": None}}),
        ("constants", {0: {"data": ["x"]}}),
        ("inputs", {"ids": 0}),
        ("inputs", {"ids": -1, "positions": 0, "wanted": 0}),
        ("outputs", {"logits": 10**6}),
        ("ops", [{**op, "name": "os.system", "outputs": []}]),
        ("ops", [{**op, "args": [{"type": "Ref", "value": 10**6}]}]),
        ("ops", [{**op, "args": [{"type": "Ref", "value": -1}]}]),
        ("ops", [{**op, "args": [{"type": "Dtype", "name": "object"}]}]),
        ("ops", [{**op, "args": [{"type": "Other"}]}]),
        ("ops", [{**op, "args": [{"type": "Number", "size": "T("}]}]),
        ("ops", []),
    ]


@pytest.mark.parametrize(("field", "content"), changes())
def test_a_stored_program_is_checked_field_by_field(field: str, content: Any) -> None:
    stored = msgspec.msgpack.decode(encoded(captured()))
    assert decoded(msgspec.msgpack.encode(stored)) == captured()
    stored["program"][field] = content
    with pytest.raises(Damaged):
        decoded(msgspec.msgpack.encode(stored))


def test_a_kept_program_is_used_and_a_damaged_one_is_captured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, served = Programs(tmp_path), guest()
    record(served, lambda program: Replay(program, served.model), kept)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert path.name == f"{digest_of(served)}.kept"
    assert kept.read(digest_of(served)) == captured()
    for damage in (content[:-1], content[:60] + b"\0" + content[61:], b"", FORMAT, content[1:], FORMAT + bytes(32)):
        path.write_bytes(damage)
        caplog.clear()
        assert kept.read(digest_of(served)) is None
        assert "is not used" in caplog.text
    record(served, lambda program: Replay(program, served.model), kept)
    assert path.read_bytes() == content
    monkeypatch.setattr("kvcellar.engine.recording.capture.capture", lambda _: pytest.fail("it is captured again"))
    record(served, lambda program: Replay(program, served.model), kept)
    assert served.not_recorded is None


def test_a_digest_is_of_the_network_and_not_of_its_numbers() -> None:
    one = digest_of(guest())
    again = ARCHS["llama"].build()
    with torch.no_grad():
        next(again.parameters()).add_(1)
    assert digest_of(build_guest(again, backends())) == one
    for other in (ARCHS["llama"].build(rms_norm_eps=1e-3), ARCHS["llama"].build().bfloat16(), ARCHS["qwen2"].build()):
        assert digest_of(build_guest(other, backends())) != one


def test_a_network_whose_head_is_its_embedding_has_another_digest_and_runs_no_program_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    """Packed, so that the names and shapes of all parameters are the same."""
    guests = []
    for tied in (False, True):
        network = ARCHS["llama"].build()
        if tied:
            network.lm_head.weight = network.model.embed_tokens.weight
        pack(network)
        guests.append(build_guest(network, backends()))
    untied, tied_guest = guests
    assert digest_of(untied) != digest_of(tied_guest)
    record(untied, lambda program: Replay(program, untied.model))
    assert untied.recording is not None
    with pytest.raises(NotRecordable, match="is a PanelWeight, of which a program reads no memory"):
        Replay(untied.recording.captured.program, tied_guest.model)


def test_a_network_of_a_console_is_recorded_and_nothing_is_kept(tmp_path: Path) -> None:
    """Its classes have no file."""
    network, kept = ARCHS["llama"].build(), Programs(tmp_path)
    places: dict[str, Any] = {"nn": nn, "__name__": "__console__"}
    exec("class Norm(nn.Module):\n    def forward(self, x):\n        return x * 2.0", places)
    network.model.norm = places["Norm"]()
    served = build_guest(network, backends())
    with pytest.raises(Unsettled, match="Norm has no source file"):
        digest_of(served)
    record(served, lambda program: Replay(program, served.model), kept)
    assert served.not_recorded is None
    assert list(tmp_path.iterdir()) == []


def test_what_killed_writers_have_left_is_deleted_and_what_is_no_file_stays(tmp_path: Path) -> None:
    for name, age in (("old.new", 2 * 3600), ("young.new", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    for number in range(MOST_FILES + 2):
        (tmp_path / f"{number:040}.kept").mkdir()
    kept = Programs(tmp_path)
    kept.write("made", captured())
    assert kept.read("made") == captured()
    assert {path.name for path in tmp_path.glob("*.new")} == {"young.new"}


def test_a_directory_keeps_the_programs_that_were_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.engine.recording.kept.MOST_FILES", most := 6)
    kept = Programs(tmp_path)
    for number in range(most + 2):
        (tmp_path / f"{number:040}.kept").touch()
        os.utime(tmp_path / f"{number:040}.kept", (number, number))
    kept.write("new", captured())
    assert kept.read("new") == captured()
    assert {path.stem for path in tmp_path.iterdir()} == {
        "new", *(f"{number:040}" for number in range(3, most + 2))
    }  # fmt: skip


def test_a_program_that_gives_other_logits_is_refused() -> None:
    served = build_guest(ARCHS["llama"].build(), backends())

    def wrong(program: Program) -> Replay:
        ops = [replace(op, name="aten.neg.default") if op.name == "aten.silu.default" else op for op in program.ops]
        return Replay(replace(program, ops=tuple(ops)), served.model)

    record(served, wrong)
    assert served.recording is None
    assert served.not_recorded is not None
    assert "its results differ from those of its modules" in served.not_recorded
