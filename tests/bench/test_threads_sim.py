"""What many cores would take follows from counts: bytes, waits and threads."""

import json

import pytest

from benchmarks.run import main
from benchmarks.threads_sim import CORES, NODES, Call, Machine, predicted, seconds

MACHINE = Machine(core=10.0, wait=1e-6, memory=100.0, link=20.0)
LARGE = Call(bytes=1_000_000_000, threads=1000)


def test_a_call_takes_as_long_as_what_is_read_slowest() -> None:
    of = {
        (cores, nodes): seconds(Call(10**9, cores), MACHINE, cores, nodes, divided=True)
        for cores in (1, 8, 64)
        for nodes in (1, 4)
    }
    assert of[1, 1] == of[1, 4] == pytest.approx(0.1)
    assert of[8, 1] == pytest.approx(1 / 80 + 7e-6)
    assert of[64, 1] == pytest.approx(1 / 100 + 63e-6), "the memory of a node"
    assert of[64, 4] == pytest.approx(1 / 400 + 63e-6 * 1.75), "of four, and waits for threads elsewhere"


def test_without_a_partition_one_node_has_all_weights() -> None:
    assert seconds(LARGE, MACHINE, 64, 1, divided=False) == seconds(LARGE, MACHINE, 64, 1, divided=True)
    assert seconds(LARGE, MACHINE, 64, 2, divided=False) == pytest.approx(0.5 / 20 + 63e-6 * 1.5), "half by the link"


def test_a_step_is_the_sum_of_its_calls() -> None:
    found = predicted([LARGE, Call(4_000_000, 2)], MACHINE, 8, 1)
    assert found["mb_a_thread"] == pytest.approx(125 + 2)
    assert found["waits_ms"] == pytest.approx(0.008)
    assert found["divided_ms"] == found["undivided_ms"] == pytest.approx(12.5 + 0.2 + 0.008)


@pytest.mark.filterwarnings("default")  # transformers issues warnings
def test_the_row_counts_a_recorded_step(capsys: pytest.CaptureFixture[str]) -> None:
    main(["threads-sim", "--quick"])
    *table, last = capsys.readouterr().out.splitlines()
    row = json.loads(last)["rows"]["threads-sim"]
    assert len(row["predicted"]) == len(CORES) * len(NODES) == len(table) - 4
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert row["bytes"] == 2 * (2 * layer + 64 * 512)
