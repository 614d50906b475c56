"""From bytes to cells: what fits is taken, no more, and every group is full at the same number of tokens."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvcellar import BadRequest, CapacityTooSmall
from kvcellar.engine.load.capacity import Demand, resolve_capacity
from kvcellar.engine.load.machine import free_cpu_bytes
from kvcellar.engine.load.settings import Settings, step_tokens_of
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding

LAYOUTS = st.one_of(
    st.just(Causal()),
    st.builds(Sliding, st.integers(1, 200)),
    st.builds(Chunked, st.integers(1, 200)),
)
SIZES = st.fixed_dictionaries(
    {"context": st.integers(1, 5000), "max_sequences": st.integers(1, 64), "step_tokens": st.integers(1, 600)}
)


def made(name, layout, per_cell, padding, fixed, staged):
    """A group whose places are a multiple of `padding`, and of which an edit takes a piece."""

    def size(cells):
        return -(-(cells + 1) // padding) * padding * per_cell + fixed

    return Demand(name, layout, size, lambda cells: staged * min(cells, 100))


DEMANDS = st.lists(
    st.tuples(
        LAYOUTS,
        st.integers(1, 5000),
        st.sampled_from([1, 1, 8, 128]),
        st.sampled_from([0, 0, 4096]),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=4,
).map(lambda groups: [made(f"group {i}", *group) for i, group in enumerate(groups)])


def step(longest, tokens, sequences):
    return 7 + 3 * longest + tokens // 2 + 11 * sequences


def resolved(demands, budget, sizes):
    try:
        return resolve_capacity(demands, budget=budget, because="cache_bytes", scratch=step, **sizes)
    except CapacityTooSmall:
        return None


def needed(demand, tokens, sizes, windows):
    """Cells of a group with so many tokens in use, none of whose sequences is longer than the context."""
    holding = sizes["max_sequences"] + (windows if demand.bounded(sizes["context"]) else 0)
    return min(tokens, holding * demand.layout.most_cells(sizes["context"], 0) + sizes["step_tokens"])


def total(demands, tokens, sizes, windows):
    """Bytes of planes, of a step on the longest sequence that all groups can hold, and of an edit."""
    cells = {demand.name: needed(demand, tokens, sizes, windows) for demand in demands}
    fits = (
        n for n in range(sizes["context"], 0, -1) if all(d.layout.most_cells(n, 1) <= cells[d.name] for d in demands)
    )
    edit = max(demand.staging(cells[demand.name]) for demand in demands)
    return sum(d.bytes(cells[d.name]) for d in demands) + edit + step(next(fits, 1), tokens, sizes["max_sequences"])


@given(DEMANDS, st.integers(1, 10**8), SIZES)
def test_groups_are_full_together_and_one_token_more_would_not_fit(demands, budget, sizes):
    got = resolved(demands, budget, sizes)
    assume(got is not None)
    assert got.bytes == sum(demand.bytes(got.cells[demand.name]) for demand in demands)
    assert got.total == total(demands, got.tokens, sizes, got.windows) <= budget == got.budget
    for demand in demands:
        assert got.cells[demand.name] == needed(demand, got.tokens, sizes, got.windows)
    all_there_is = sizes["max_sequences"] * sizes["context"] + sizes["step_tokens"]
    if got.tokens < all_there_is:
        assert got.because == "cache_bytes"
        assert total(demands, got.tokens + 1, sizes, got.windows) > budget
    else:
        assert str(sizes["max_sequences"]) in got.because
        assert got.tokens == all_there_is


@given(DEMANDS, st.integers(1, 10**8), SIZES)
def test_bounded_groups_have_cells_for_as_many_checkpoints_as_a_quarter_of_the_bytes_holds(demands, budget, sizes):
    got = resolved(demands, budget, sizes)
    assume(got is not None)
    bounded = [demand for demand in demands if demand.bounded(sizes["context"])]
    window = sum(d.bytes(d.layout.most_cells(sizes["context"], 0)) - d.bytes(0) for d in bounded)
    assert 0 <= got.windows * window <= budget / 4
    assert not window or (got.windows + 1) * window > budget / 4
    assert (f"windows of {got.windows} checkpoints" in str(got)) == (got.windows > 0)


def test_windows_of_checkpoints_do_not_take_the_cells_of_running_sequences():
    window = made("window", Sliding(100), 10, 1, 0, 0)
    full = made("full", Causal(), 10, 1, 0, 0)
    sizes = {"context": 1000, "max_sequences": 4, "step_tokens": 50}
    got = resolved([full, window], 50_000, sizes)
    assert (got.windows, got.cells["window"]) == (12, (4 + 12) * 100 + 50)
    assert resolved([full], 50_000, sizes).windows == 0


@given(DEMANDS, st.integers(1, 10**7), st.integers(0, 10**6), SIZES)
def test_more_bytes_never_give_fewer_cells(demands, budget, more, sizes):
    small, large = resolved(demands, budget, sizes), resolved(demands, budget + more, sizes)
    if small is None:
        return
    assert large is not None
    assert large.tokens >= small.tokens
    assert all(large.cells[name] >= cells for name, cells in small.cells.items())


@given(DEMANDS, SIZES)
def test_the_least_that_works_is_named_and_a_byte_less_is_refused(demands, sizes):
    with pytest.raises(CapacityTooSmall, match=r"^1 bytes \(the lot\) hold 0 tokens.*Raise cache_bytes") as caught:
        resolve_capacity(demands, budget=1, because="the lot", scratch=step, **sizes)
    least = int(str(caught.value).split("which is ")[1].split()[0])
    assert resolved(demands, least, sizes).tokens >= 2
    assert resolved(demands, least - 1, sizes) is None


@given(DEMANDS, st.integers(1, 10**8), SIZES)
def test_whatever_a_prompt_may_be_fits_alone(demands, budget, sizes):
    """A single sequence can always use all that is there, up to its context."""
    got = resolved(demands, budget, sizes)
    assume(got is not None)
    for demand in demands:
        tokens = min(got.tokens, sizes["context"])
        assert demand.layout.most_cells(tokens, 1) <= got.cells[demand.name]


@given(st.integers(1, 300), st.integers(1, 10**5), SIZES)
@example(10, 10_000, {"context": 100, "max_sequences": 4, "step_tokens": 20_000})  # for shorter texts it would do
def test_without_cells_the_largest_step_that_is_allowed_is_set_aside_or_the_model_refused(row, budget, sizes):
    """Recurrent state does not grow with the text, so nothing but the settings keeps a step small."""
    try:
        got = resolve_capacity([], budget=budget, because="the lot", scratch=step, bytes_per_row=row, **sizes)
    except CapacityTooSmall:
        most = min(sizes["max_sequences"], (budget // 2 // row - 1) // 4)
        tokens = most * sizes["context"] + sizes["step_tokens"]
        assert most < 1 or (4 * most + 1) * row + step(sizes["context"], tokens, most) > budget
        return
    most = got.states.sequences
    assert got.scratch == step(sizes["context"], most * sizes["context"] + sizes["step_tokens"], most)
    assert budget - row < got.total == got.states.bytes + got.scratch <= budget or got.states.checkpoints >= 1 << 16
    assert f"{most} sequences of any length" in str(got)


# -- what is free -----------------------------------------------------------------------------------------------------


def machine(root, *, available=8_000_000, membership="", groups=()):
    """A kernel's files, as far as they matter; `available` in KiB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 16000000 kB\nMemFree: 100 kB\nMemAvailable: {available} kB\nBuffers: 5 kB\n"
    )
    if membership:
        (root / "proc/self/cgroup").write_text(membership)
    for path, text in dict(groups).items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_what_the_kernel_calls_available_is_free(tmp_path):
    assert free_cpu_bytes(machine(tmp_path, available=3_000)) == 3_000 * 1024


def test_a_limit_on_the_container_counts(tmp_path):
    files = {
        "memory.max": "5000\n",
        "memory.current": "2000\n",
        "memory.stat": "anon 900\ninactive_file 700\nfile 1100\n",
    }
    assert free_cpu_bytes(machine(tmp_path, membership="0::/\n", groups=files)) == 5000 - 2000 + 700


def test_the_tightest_of_the_groups_above_counts(tmp_path):
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "10\n",
        "a/memory.max": "9000\n",
        "a/memory.current": "1000\n",
        "memory.max": "50000\n",
        "memory.current": "1500\n",
    }
    assert free_cpu_bytes(machine(tmp_path, membership="0::/a/b\n", groups=files)) == 8000


def test_a_group_outside_of_what_is_mounted_is_passed_over(tmp_path):
    files = {"memory.max": "5000\n", "memory.current": "2000\n"}
    assert free_cpu_bytes(machine(tmp_path, membership="0::/not/here\n", groups=files)) == 3000


def test_groups_of_the_first_version_count(tmp_path):
    files = {
        "memory/box/memory.limit_in_bytes": "7000\n",
        "memory/box/memory.usage_in_bytes": "6000\n",
        "memory/box/memory.stat": "cache 3000\ntotal_inactive_file 2500\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
        "cpu/box/memory.limit_in_bytes": "1\n",
    }
    membership = "9:name=systemd:/\n5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"
    assert free_cpu_bytes(machine(tmp_path, membership=membership, groups=files)) == 7000 - 6000 + 2500


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path):
    files = {"memory.max": "5000\n", "memory.current": "9000\n"}
    assert free_cpu_bytes(machine(tmp_path, membership="0::/\n", groups=files)) == 0


def test_this_machine_has_some():
    assert free_cpu_bytes() > 0


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("max_sequences", "max_waiting") for value in (0, -1, 1.5, True, None)],
        *[
            (name, value)
            for name in ("cache_bytes", "context", "step_tokens", "threads")
            for value in (0, -1, 2.0, "5", False, 2**63)
        ],
        *[("device", value) for value in (None, "gpu", "cuda:", "cuda:x", "cpu:1", "mps", 0)],
        *[("dtype", value) for value in (None, "int8", "float64", 32)],
        ("attention", 5),
        ("kv_dtype", 8),
        ("kv_dtype", "int7"),
        ("pack", "yes"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_by_name(name, value):
    with pytest.raises(BadRequest, match=name if value != "int7" else "int7") as caught:
        Settings(**{name: value})
    assert caught.value.param == name


@given(DEMANDS, SIZES, st.integers(0, 10**8), st.integers(1, 100))
def test_who_can_fill_the_context_can_be_shifted_there_when_it_is_alone(demands, sizes, budget, share):
    """Keys for which no cell is free are turned in place: what they held goes into what is left for a step."""
    demands = [replace(demand, undo=1 + (demand.bytes(2) - demand.bytes(1)) * share // 200) for demand in demands]
    got = resolved(demands, budget, sizes)
    assume(got is not None)
    context = sizes["context"]
    assert got.total <= budget
    if all(demand.layout.most_cells(context, 1) <= got.cells[demand.name] for demand in demands):
        room = budget - got.bytes - got.staging
        for demand in demands:
            held = demand.layout.most_cells(context, 0)
            moved = min(held, context - context // 2)
            room -= demand.undo * max(0, moved - (got.cells[demand.name] - held))
        assert room >= 0


def test_a_step_has_as_many_tokens_as_is_set_or_as_suits_the_device():
    assert [step_tokens_of(Settings(), kind) for kind in ("cpu", "cuda")] == [512, 4096]
    assert {step_tokens_of(Settings(step_tokens=7), kind) for kind in ("cpu", "cuda")} == {7}
