"""The bench runs completely with tiny sizes, and its last line has all results. No time is compared."""

import json
import math
from typing import Any

import pytest
from click import BadParameter

from benchmarks import run as bench
from benchmarks.attention import TINY_CASES
from benchmarks.gaps import BESIDE
from benchmarks.profile import PARTS, RECORDED, profile
from benchmarks.report import Findings, as_json, line
from benchmarks.run import (
    ATTENTION,
    BOOKKEEPING,
    DRAFTS,
    FRAGMENTED,
    GAPS,
    LINEAR,
    NAMES,
    OTHER_KINDS,
    PREFIX,
    REPLAY,
    RESTART,
    REVERTIBLE,
    SERVE_LOAD,
    SPECULATE,
    START,
    STRUCTURED,
    THREADS,
    TURNS,
    TWO_MODELS,
    WAITS,
    run,
    run_profile,
)
from benchmarks.start import Start, lines
from benchmarks.workloads import Row
from kvcellar.attention.choose import backends
from kvcellar.bench import hf_baseline
from kvcellar.bench.kinds import KINDS
from kvcellar.bench.network import RECURRENT, TINY, write
from kvcellar.cli.bench import command
from kvcellar.errors import BadRequest
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.models.load import load

ABOUT = {
    "kvcellar",
    "torch",
    "transformers",
    "cpu",
    "threads",
    "dtype",
    "parameters",
    "quick",
    "results",
    "bookkeeping",
    "turns",
    "revertible",
    "forks",
    "prefix",
}
pytestmark = pytest.mark.filterwarnings("default")  # transformers issues warnings


def measured(capsys: pytest.CaptureFixture[str], **how: Any) -> tuple[list[str], dict[str, Any]]:
    """The lines of the table, and the JSON of the last line."""
    run(quick=True, **how)
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)


ALONE = (
    *(
        BOOKKEEPING,
        TURNS,
        REVERTIBLE,
        START,
        FRAGMENTED,
        RESTART,
        REPLAY,
        PREFIX,
        SPECULATE,
        DRAFTS,
        TWO_MODELS,
        STRUCTURED,
        SERVE_LOAD,
        GAPS,
        WAITS,
        OTHER_KINDS,
    ),
    LINEAR,
    ATTENTION,
    THREADS,
    *KINDS,
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALONE])
def test_a_workload_prints_a_line_and_its_numbers(name: str, capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=name)
    assert set(last) == ABOUT
    assert last["quick"] is True
    assert list(last["results"]) == [name]
    row = last["results"][name]
    assert {"what", "ours_ms", "baseline_ms", "ratio", "target"} <= set(row)
    assert row["ours_ms"] > 0
    assert row["baseline_ms"] > 0
    assert math.isclose(row["ratio"], row["baseline_ms"] / row["ours_ms"], rel_tol=0.05)
    assert [line.split()[0] for line in table[2:]] == [name]
    assert math.isclose(float(table[2].split()[1]), row["ours_ms"], abs_tol=0.06), "each is rounded by itself"
    assert (row["target"] is None) == (name == "ragged-32")
    if name.startswith("ragged"):
        assert row["generate_batch_ms"] > 0


def test_a_row_without_a_target():
    targets = {"ragged-8": 3.0, "ragged-32": None}
    rows = [Row(name, "a step", 1.0, 2.0, target) for name, target in targets.items()]
    assert [line(row).split()[-3:] for row in rows] == [["3.0x", "a", "step"], ["none", "a", "step"]]
    results = json.loads(as_json(Findings(rows=rows), {}))["results"]
    assert {name: row["target"] for name, row in results.items()} == targets


def test_bookkeeping_needs_no_network(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=BOOKKEEPING)
    assert last["results"] == {}
    assert list(last["bookkeeping"]["step_ms"]) == ["1000", "10000"]
    assert len(table) == 2


def test_gaps_are_measured_beside_each_of_what_others_do(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("zmq")
    table, last = measured(capsys, only=GAPS)
    assert list(last["gaps"]) == list(BESIDE)
    assert [row[:16].strip() for row in table] == list(BESIDE)
    for gap in last["gaps"].values():
        assert 0 <= gap["cpu_ms"]
        assert 0 < gap["gap_ms"] <= 1e3 * gap["seconds"] + 1e4
        assert gap["tokens"] >= 1


@pytest.mark.slow
def test_waits_are_measured_for_both_keys(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=WAITS)
    assert len(table) == len(last["waits"]) == 2
    for found in last["waits"]:
        assert 0 < found["half"] <= found["longest"]
        assert found["failed"] == 0


def test_attention_is_timed_for_each_case(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=ATTENTION)
    found = last["attention"]
    assert len(table) == len(found)
    assert list(found) in ([], list(TINY_CASES))
    assert all(min(one["cpu_ms"], one["sdpa_ms"], one["ratio"]) > 0 for one in found.values())


def test_fragmented_and_compacted_memory_hold_the_same_cells(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=FRAGMENTED)
    found = last["fragmented"]
    assert [line.split()[0] for line in table] == [FRAGMENTED] * len(found)
    assert "sdpa" in found
    for one in found.values():
        assert (one["cells"], one["runs_after"]) == (4 * 128, 4)
        assert one["runs_before"] > 16
        assert one["moved"] > 0
        assert one["ratio"] > 0


def test_linear_layers_are_measured_for_each_type_and_number_of_rows(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=LINEAR, threads=2)
    assert set(last["linear"]) == {"bfloat16", "float32"}
    assert len(table) == 8
    for by_rows in last["linear"].values():
        assert list(by_rows) == ["1", "8", "32", "512"]
        for one in by_rows.values():
            assert all(value is None or value > 0 for value in one.values())
    assert all("2 threads" in line for line in table)


def test_a_conversation_is_found_after_its_process_was_killed(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=RESTART)
    found = last["restart"]
    assert len(table) == 5
    assert found["bytes"] >= found["tokens"] * 2 * 2 * 2 * 16 * 2, (
        "K and V of two layers with two heads of 16, bfloat16"
    )
    assert min(found["cold"], found["warm"], found["restarted"], found["reading"]) > 0


def test_the_costs_of_the_prefix_tree_are_measured(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=PREFIX)
    found = last["prefix"]
    assert [line.split()[0] for line in table] == ["lookup", "eviction", "cached", "tree"]
    assert (last["results"], found["tokens"], list(found["eviction"])) == ({}, 5000, ["100", "1000"])
    assert 0 < found["lookup_p50"] <= found["lookup_p99"]
    assert 0 < found["tree"] < found["step"]
    assert math.isclose(found["cached_ratio"], found["cached"] / found["forward"])


def test_turns_are_counted_for_every_number_of_checkpoints(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=TURNS)
    assert last["results"] == {}
    assert list(last["turns"]) == ["32"]
    found = last["turns"]["32"]
    assert found["by_token"] <= found["ideal"]
    assert found["by_token"] <= found["ours"] <= 1.02 * found["ideal"]
    assert [line.split()[:2] for line in table] == [["turns", str(found["ours"])]]


def test_revertible_steps_are_measured_for_every_kind_of_recurrence(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=REVERTIBLE)
    assert last["results"] == {}
    assert list(last["revertible"]) == list(RECURRENT)
    assert all(list(by_width) == ["8", "1"] for by_width in last["revertible"].values())
    costs = [cost for by_width in last["revertible"].values() for cost in by_width.values()]
    assert all(took > 0 for cost in costs for took in cost.values())
    assert [line.split()[1] for line in table[: len(costs)]] == [f"{cost['all_kept']:.2f}x" for cost in costs]


def test_a_fork_allocates_no_state_and_its_first_token_one_row(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=REVERTIBLE)
    assert list(last["forks"]) == list(RECURRENT)
    for fork in last["forks"].values():
        assert fork["row"] > 0
        assert (fork["at_once"], fork["first_write"]) == (0, fork["row"])
    assert [line.split()[0] for line in table[-len(RECURRENT) :]] == ["fork"] * len(RECURRENT)


def test_a_start_is_reported_in_three_parts():
    found = {"first": Start(0.1, 2.0, 4.0, 8.0), "second": Start(0.1, 2.5, 4.5, 0.75)}
    _, first, second, wanted = lines(found)
    assert first.split() == ["first", "start", "2.00", "s", "4.00", "s", "8.00", "s"]
    assert second.split() == ["second", "start", "2.50", "s", "4.50", "s", "0.75", "s"]
    assert wanted.split()[:2] == ["1.00", "s"]


@pytest.mark.slow
def test_starts_are_measured_in_new_processes(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=START)
    assert [line.split()[0] for line in table[1:3]] == ["first", "second"] == list(last["start"])
    for start in last["start"].values():
        assert all(took > 0 for part, took in start.items() if part != "python")


def test_a_recorded_step_has_a_profile(tmp_path):
    """Each kernel's time is that of its part, and what is left of the forward is more than nothing."""
    write(TINY, tmp_path)
    try:
        attention, parts = profile(tmp_path, [[5, 6, 7], [8, 9]], 3, recorded=True)
    except NotCompiled as error:
        pytest.skip(f"not compiled here: {error}")
    assert attention == "cpu"
    assert list(parts) == list(RECORDED)
    assert all(took > 0 for took in parts.values())


def test_profile_reports_every_part_of_a_step(capsys: pytest.CaptureFixture[str]):
    run_profile("ragged-8", quick=True)
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert set(found) == (ABOUT - {"results", "bookkeeping", "turns", "revertible", "forks", "prefix"}) | {
        "profile",
        "attention",
        "ms",
        "per_layer",
    }
    assert found["profile"] == "ragged-8"
    assert found["attention"] in {backend.name for backend in backends()}
    assert list(found["ms"]) == list(PARTS) == [line[:20].strip() for line in table[: len(PARTS)]]
    by_number = [counts for by_n in found["per_layer"].values() for counts in by_n.values()]
    assert len(by_number) == len(table) - len(PARTS)
    assert all(counts["calls"] > 0 < counts["operations"] for counts in by_number)
    assert all(took > 0 for took in found["ms"].values())
    with pytest.raises(BadRequest, match=r"prefill-512, .* gemma3-8, .*; not 'restart'"):
        run_profile("restart")


@pytest.mark.parametrize("name", ["prefill-512", "mamba2-8"])
def test_reading_and_other_kinds_have_profiles(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench, "all_counts", dict)  # they are the same for all profiles, and counted above
    run_profile(name, quick=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["profile"] == name
    assert {part for part, took in found["ms"].items() if took > 0} >= set(PARTS) - {"attention"}
    assert (found["ms"]["attention"] > 0) == (name == "prefill-512")


def test_the_stalls_of_a_stream_beside_a_load_are_measured(capsys: pytest.CaptureFixture[str]):
    run(quick=True, only=TWO_MODELS)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["two_models"]
    assert found["tokens"] > 0
    assert 0 < found["median"] <= found["worst"]
    assert 0 < found["worst_loading"]
    assert found["load_seconds"] > 0


def test_masks_are_measured_beside_a_step(capsys: pytest.CaptureFixture[str]):
    run(quick=True, only=STRUCTURED)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["structured"]
    assert set(found) == {"2"}
    assert all(value > 0 for value in found["2"].values())


def test_a_server_with_many_connections_is_measured(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, only=SERVE_LOAD)
    found = last["serve_load"]
    assert [line.split()[0] for line in table] == ["event", "tokens", "/health", "throughput"]
    assert (found["connections"], found["streams"]) == (12, 4)
    assert found["steps"] > 0
    assert min(found["step_cpu_ms"], found["loop_cpu_ms"], found["tokens_per_second"]) > 0
    assert math.isclose(found["loop_share"], found["loop_cpu_ms"] / found["step_cpu_ms"])
    assert 0 < found["delay_p50_ms"] <= found["delay_p99_ms"]
    assert 0 <= found["delay_steps"]
    assert 0 <= found["late"] <= 1
    assert found["asked"] > 0
    assert 0 < found["health_p50_ms"] <= found["health_p99_ms"]


def test_unknown_workload_is_refused_by_name():
    with pytest.raises(BadRequest, match="ragged-8"):
        run(quick=True, only="ragged")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--record", "auto"), "not for runs without --only"),
        (("--record", "auto", "--only", "linear"), "not for --only linear"),
        (("--size", "0.5b"), "size is for --against; leave it out"),
        (("--size", "0.5b", "--against", "transformers", "--only", "replay"), "but not with --only replay"),
    ],
)
def test_options_that_a_run_does_not_have_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        command.main([*options], standalone_mode=False)


def test_both_engines_generate_the_same_tokens(tmp_path):
    """The bench compares equal work: greedy tokens of both are equal, padded and not."""
    from kvcellar import Engine

    write(TINY, tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    network = load(tmp_path, dtype="float32", device="cpu").model.eval()
    with Engine(tmp_path, dtype="float32", device="cpu", cache_bytes=1 << 20) as engine:
        ours = [engine.generate(prompt, temperature=0.0, max_tokens=6, ignore_eos=True) for prompt in prompts]
    steps: list[int] = []
    ids = hf_baseline.generate(network, prompts, 6, lambda tokens: steps.append(1))
    assert [list(result.token_ids) for result in ours] == ids[:, -6:].tolist()
    assert len(steps) == 6


def test_network_is_the_same_each_time(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    counts = [write(TINY, tmp_path / name) for name in ("one", "two")]
    assert counts[0] == counts[1] == sum(p.numel() for p in load(tmp_path / "one", device="cpu").model.parameters())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
