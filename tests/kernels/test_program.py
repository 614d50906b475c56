"""Sizes are expressions of symbols and nothing else, and a program is checked for what it reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.recording.program import Number, Op, Program, Ref, Value, size_of

TEXTS = st.recursive(
    st.sampled_from(["T", "W", "3", "7"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.just("5")).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(st.sampled_from(["Min", "Max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
    ),
    max_leaves=6,
)


@given(TEXTS, st.integers(0, 99), st.integers(0, 99))
def test_a_size_has_the_value_of_its_expression(text, t, w) -> None:
    assert size_of(text, {"T": t, "W": w}) == eval(text, {"T": t, "W": w, "Min": min, "Max": max})


@pytest.mark.parametrize("text", ["X", "T.real", "T ** 9", "open('x')", "Max(T)", "[T]", "T if W else 1", "T +", "1.5"])
def test_what_is_no_expression_of_the_symbols_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"is no (size|expression)"):
        size_of(text, {"T": 1, "W": 1})


def program(*ops: Op) -> Program:
    values = tuple(Value("float32", ("T",), (1,), storage) for storage in range(3))
    return Program(("T",), values, {}, {"x": 0}, ops, {"y": 2})


def test_a_program_that_reads_what_was_not_written_is_noticed() -> None:
    first = Op("aten.neg.default", (Ref(0),), {}, (1,))
    second = Op("aten.add.Tensor", (Ref(1), Ref(0)), {"alpha": Number("T")}, (2,))
    program(first, second).check()
    assert second.reads == [1, 0]
    with pytest.raises(AssertionError, match=r"aten\.add\.Tensor reads value 1"):
        program(second, first).check()
    with pytest.raises(AssertionError, match="y is never written"):
        program(first).check()
