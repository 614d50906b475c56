"""The rows run completely with tiny sizes, and the last line has all results. No time is compared."""

import json
import math
from typing import Any

import pytest

from benchmarks import profile as profiles
from benchmarks import start
from benchmarks.attached import CASES
from benchmarks.attention import TINY_CASES
from benchmarks.gaps import BESIDE
from benchmarks.networks import RECURRENT
from benchmarks.profile import PARTS, RECORDED, profile
from benchmarks.run import FEW, ROWS, main
from benchmarks.start import Start
from kvcellar.bench.network import TINY, write
from kvcellar.kernels.built import level_here
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.memory.attention.choose import backends

pytestmark = pytest.mark.filterwarnings("default")  # transformers issues warnings


def measured(capsys: pytest.CaptureFixture[str], row: str, *options: str) -> tuple[list[str], Any]:
    """The lines of the table, and what the last line has of the row."""
    main([row, "--quick", *options])
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)["rows"][row]


@pytest.mark.slow
def test_without_a_row_a_few_are_measured(capsys: pytest.CaptureFixture[str]):
    main(["--quick"])
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["quick"] is True
    assert list(found["rows"]) == list(FEW)
    assert {line.split()[0] for line in table} >= {"begin+commit", "turns", "revertible", "lookup"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ragged"], ", ".join(repr(name) for name in ROWS)),
        (["linear", "--record", "auto"], "--record is for the rows profile, start, threads"),
        (["--record", "auto"], "--record is for the rows"),
        (["linear", "--profile", "mla"], "--profile is for the row profile, not for linear"),
        (["--profile", "restart"], "'prefill-512', "),
    ],
)
def test_what_there_is_not_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_bookkeeping_needs_no_network(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "bookkeeping")
    assert list(last) == ["1000", "10000"]
    assert len(table) == 2


@pytest.mark.slow
def test_gaps_are_measured_beside_each_of_what_others_do(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("zmq")
    table, last = measured(capsys, "gaps")
    assert list(last) == list(BESIDE)
    assert [row[:16].strip() for row in table] == list(BESIDE)
    for gap in last.values():
        assert 0 <= gap["cpu_ms"]
        assert 0 < gap["gap_ms"] <= 1e3 * gap["seconds"] + 1e4
        assert gap["tokens"] >= 1


@pytest.mark.slow
def test_waits_are_measured_for_both_keys(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "waits")
    assert len(table) == len(last) == 2
    for found in last:
        assert 0 < found["half"] <= found["longest"]
        assert found["failed"] == 0


def test_attention_is_timed_for_each_case(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "attention")
    assert len(table) == len(found)
    assert list(found) in ([], list(TINY_CASES))
    assert all(min(one["cpu_ms"], one["sdpa_ms"], one["ratio"]) > 0 for one in found.values())


def test_fragmented_and_compacted_memory_hold_the_same_cells(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "fragmented")
    assert [line.split()[0] for line in table] == ["fragmented"] * len(found)
    assert "sdpa" in found
    for one in found.values():
        assert (one["cells"], one["runs_after"]) == (4 * 128, 4)
        assert one["runs_before"] > 16
        assert one["moved"] > 0
        assert one["ratio"] > 0


@pytest.mark.slow  # an engine, and the process that reads files
def test_images_are_measured_in_slices_and_at_once(capsys: pytest.CaptureFixture[str]):
    _, last = measured(capsys, "images")
    assert last["towers"]["CLIP"]["slices"] == 3
    assert last["towers"]["Qwen3-VL"]["slices"] > 18, "positions of several axes, and one for each layer at least"
    assert list(last["streams"]) == ["alone", "a text as long", "in slices", "at once"]
    assert [one["status"] for one in last["files"].values()] == [200, 400]


def test_linear_layers_are_measured_for_each_type_and_number_of_rows(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "linear", "--threads", "2")
    assert set(last) == {"bfloat16", "float32"}
    assert len(table) == 8
    for by_rows in last.values():
        assert list(by_rows) == ["1", "8", "32", "512"]
        for one in by_rows.values():
            assert all(value is None or value > 0 for value in one.values())
    assert all("2 threads" in line for line in table)


@pytest.mark.slow
@pytest.mark.skipif(level_here() is None, reason="no wheel has kernels for this kind of processor")
def test_kernels_of_a_level_are_measured_beside_those_of_this_cpu(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "levels")
    (by_kind,) = last.values()
    assert list(by_kind) == ["bfloat16", "int8", "int4"]
    assert len(table) == 9
    assert all(one["ratio"] > 0 for by_rows in by_kind.values() for one in by_rows.values())


@pytest.mark.slow
def test_a_conversation_is_found_after_its_process_was_killed(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "restart")
    assert len(table) == 5
    assert found["bytes"] >= found["tokens"] * 2 * 2 * 2 * 16 * 2, (
        "K and V of two layers with two heads of 16, bfloat16"
    )
    assert min(found["cold"], found["warm"], found["restarted"], found["reading"]) > 0


def test_the_costs_of_the_prefix_tree_are_measured(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "prefix")
    assert [line.split()[0] for line in table] == ["lookup", "eviction", "cached", "tree"]
    assert (found["tokens"], list(found["eviction"])) == (5000, ["100", "1000"])
    assert 0 < found["lookup_p50"] <= found["lookup_p99"]
    assert 0 < found["tree"] < found["step"]
    assert math.isclose(found["cached_ratio"], found["cached"] / found["forward"])


def test_what_checkpoints_take_of_a_prompt_and_of_decoding_is_measured_with_them_and_without(
    capsys: pytest.CaptureFixture[str],
):
    table, found = measured(capsys, "checkpoints")
    assert [line.split()[0] for line in table[1:]] == list(found)
    assert {one["spare"] > 0 for one in found.values()} == {False, True}
    assert all(one[name] > 0 for one in found.values() for name in ("seconds", "prompt", "milliseconds", "step"))


def test_whole_engines_of_several_kinds_replay_traces(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "replay-engines")
    assert [tuple(line.split()[:2]) for line in table[1:]] == [tuple(name.split()) for name in found]
    for name, one in found.items():
        assert one["ideal"] <= one["computed"] < one["tokens"]
        assert one["computed"] == one["ideal"] or "lfm2" in name


def test_hits_are_measured_with_room_and_without(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "hits")
    assert list(found) == ["full", "sliding", "hybrid"]
    assert len(table) == 1 + sum(map(len, found.values()))
    for few, many in found.values():
        assert 0 < few["tokens"] < many["tokens"]
        assert 0 < few["nodes"] < many["nodes"]
        assert min(few["room"], few["full"], many["room"], many["full"]) > 0


def test_rules_of_eviction_are_compared_on_traces(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "policies")
    assert len(table) == 1 + len(found)
    assert {"users 0.1", "chats 0.5", "2 rounds 0.5", "held out 0.1"} <= found.keys()


def test_turns_are_counted_for_every_number_of_checkpoints(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "turns")
    assert list(last) == ["32"]
    found = last["32"]
    assert found["by_token"] <= found["ideal"]
    assert found["by_token"] <= found["ours"] <= 1.02 * found["ideal"]
    assert [line.split()[:2] for line in table] == [["turns", str(found["ours"])]]


def test_revertible_steps_are_measured_for_every_kind_of_recurrence(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "revertible")
    assert list(last["steps"]) == list(RECURRENT)
    assert all(list(by_width) == ["8", "1"] for by_width in last["steps"].values())
    costs = [cost for by_width in last["steps"].values() for cost in by_width.values()]
    assert all(took > 0 for cost in costs for took in cost.values())
    assert [line.split()[1] for line in table[: len(costs)]] == [f"{cost['all_kept']:.2f}x" for cost in costs]


def test_a_fork_allocates_no_state_and_its_first_token_one_row(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "revertible")
    assert list(last["forks"]) == list(RECURRENT)
    for fork in last["forks"].values():
        assert fork["row"] > 0
        assert (fork["at_once"], fork["first_write"]) == (0, fork["row"])
    assert [line.split()[0] for line in table[-len(RECURRENT) :]] == ["fork"] * len(RECURRENT)


def test_a_start_is_reported_beside_the_import_of_torch(capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    each = iter([Start(0.1, 2.0, 8.0, True), Start(0.1, 2.5, 0.9, False)])
    asked = list[list[str]]()
    monkeypatch.setattr(start, "_started", lambda environment, settings: asked.append(settings) or next(each))
    (_, first, second, wanted), found = measured(capsys, "start", "--record", "off")
    assert first.split() == ["first", "start", "2.00", "s", "8.00", "s", "5.05"]
    assert second.split() == ["second", "start", "2.50", "s", "0.90", "s", "1.40", "without", "transformers"]
    assert wanted.split()[0] == "1.60"
    assert found["second"] == {"python": 0.1, "torch": 2.5, "rest": 0.9, "transformers": False, "ratio": 1.4}
    assert asked == [["--threads", "1", "--record", "off"]] * 2


@pytest.mark.slow
def test_starts_are_measured_in_new_processes(capsys: pytest.CaptureFixture[str]):
    table, last = measured(capsys, "start")
    assert [line.split()[0] for line in table[1:3]] == ["first", "second"] == list(last)
    assert [one["transformers"] for one in last.values()] == [True, False]
    assert all(one["torch"] > 0 < one["rest"] for one in last.values())


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


@pytest.mark.slow
def test_profile_reports_every_part_of_a_step(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "profile", "--profile", "ragged-8")
    assert found["of"] == "ragged-8"
    assert found["attention"] in {backend.name for backend in backends()}
    assert list(found["ms"]) == list(PARTS) == [line[:20].strip() for line in table[: len(PARTS)]]
    by_number = [counts for by_n in found["per_layer"].values() for counts in by_n.values()]
    assert len(by_number) == len(table) - len(PARTS)
    assert all(counts["calls"] > 0 < counts["operations"] for counts in by_number)
    assert all(took > 0 for took in found["ms"].values())


@pytest.mark.parametrize("name", ["prefill-512", "mamba2-8"])
def test_reading_and_other_kinds_have_profiles(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profiles, "all_counts", dict)  # they are the same for all profiles, and counted above
    _, found = measured(capsys, "profile", "--profile", name)
    assert found["of"] == name
    assert {part for part, took in found["ms"].items() if took > 0} >= set(PARTS) - {"attention"}
    assert (found["ms"]["attention"] > 0) == (name == "prefill-512")


def test_the_stalls_of_a_stream_beside_a_load_are_measured(capsys: pytest.CaptureFixture[str]):
    _, found = measured(capsys, "two-models")
    assert found["tokens"] > 0
    assert 0 < found["median"] <= found["worst"]
    assert 0 < found["worst_loading"]
    assert found["load_seconds"] > 0


def test_masks_are_measured_beside_a_step(capsys: pytest.CaptureFixture[str]):
    _, found = measured(capsys, "structured")
    assert set(found) == {"2"}
    assert all(value > 0 for value in found["2"].values())


def test_a_server_with_many_connections_is_measured(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "serve-load")
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


def test_no_stream_fails_and_nothing_kept_is_lost_where_replicas_and_gateways_are_killed(
    capsys: pytest.CaptureFixture[str],
):
    _, found = measured(capsys, "cluster-kills")
    assert (found["failed"], found["wrong"], found["lost"]) == ([], [], 0)
    assert (found["kills"], found["gateways"]) == (3, 1)
    assert found["streams"] >= 6
    assert found["kept"] == 2


@pytest.mark.slow
def test_what_one_engine_has_computed_is_restored_by_another_one(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    table, found = measured(capsys, "cluster-store")
    assert len(table) == len(found) >= 4
    for each in found.values():
        assert all(0 <= one["written"] < one["restored"] for one in each)


@pytest.mark.slow
def test_what_a_gateway_costs_is_measured_beside_a_server(capsys: pytest.CaptureFixture[str]):
    _, found = measured(capsys, "cluster-cost")
    for place in ("single", "cluster"):
        assert [*found[place]] == ["1", "8", "32"]
        assert all(cpu > 0 and messages > 0 for cpu, messages in found[place].values())
    assert min(*found["first"], found["start"]) > 0


@pytest.mark.slow
def test_what_replicas_compute_is_counted_by_the_rule_of_their_router(capsys: pytest.CaptureFixture[str]):
    _, found = measured(capsys, "cluster-replay")
    assert [*found] == ["agent, 2", "users, 2", "edits, 2", "chats, 2"]
    for ratios in found.values():
        assert all(ratio >= 0.9 for ratio in ratios.values())


def test_generate_beside_a_memory_is_measured(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "attached")
    assert len(table) == 6
    assert {kind: list(ratios) for kind, ratios in found.items()} == {kind: list(CASES) for kind in ("llama", "lfm2")}
    assert all(ratio > 0 for ratios in found.values() for by_length in ratios.values() for ratio in by_length.values())
