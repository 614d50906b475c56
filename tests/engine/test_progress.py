"""What is being done while a model is loaded is reported to the callback that was passed, on the thread that loads."""

import shutil
import threading
from pathlib import Path

import pytest

from kvcellar import Engine, Progress
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.progress import listening, report
from tests.zoo import ARCHS

pytestmark = pytest.mark.measures

HOW = {"threads": 1, "cache_bytes": 40_000_000, "attention": "sdpa", "record": "auto"}
STAGES = [
    "building llama",
    "loading weights",
    "packing weights",
    "testing the network",
    *["recording a step"] * any(map(shutil.which, COMPILERS)),
    "measuring the largest steps",
    "allocating memory",
]


def test_a_load_reports_its_stages_in_order_and_how_many_weights_it_has_loaded(tmp_path: Path) -> None:
    ARCHS["llama"].build().save_pretrained(tmp_path)
    heard: list[Progress] = []
    Engine(tmp_path, progress=heard.append, **HOW).close()
    assert list(dict.fromkeys(one.stage for one in heard)) == STAGES
    weights = [one for one in heard if one.stage == "loading weights"]
    assert [one.done for one in weights] == list(range(weights[0].total))
    assert len(weights) > 10
    assert all(one.total == 0 for one in heard if one.stage != "loading weights")


def test_nothing_is_reported_after_a_load_nor_to_another_thread() -> None:
    heard: list[Progress] = []
    with Engine(ARCHS["llama"].build(), progress=heard.append, **HOW) as engine:
        loaded = len(heard)
        assert loaded > 0
        engine.generate([5, 6, 7], max_tokens=2)
        report("something else")
        with listening(heard.append):
            other = threading.Thread(target=report, args=("another thread",))
            other.start()
            other.join()
    assert len(heard) == loaded


def test_a_listener_within_a_listener_hears_alone_and_none_changes_nothing() -> None:
    outer: list[Progress] = []
    inner: list[Progress] = []
    with listening(outer.append):
        with listening(None):
            report("a", 1, 2)
        with listening(inner.append):
            report("b")
        report("c")
    report("d")
    assert outer == [Progress("a", 1, 2), Progress("c")]
    assert inner == [Progress("b")]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in ("building llama", "loading weights")])
def test_what_a_listener_raises_ends_the_load_and_leaves_the_network_as_it_was(stage: str) -> None:
    class Enough(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.stage == stage:
            raise Enough

    network = ARCHS["llama"].build().train()
    before = {name: type(module) for name, module in network.named_modules()}
    bits = {name: value.clone() for name, value in network.state_dict().items()}
    attention = network.config._attn_implementation
    with pytest.raises(Enough):
        Engine(network, progress=stop, **HOW)
    assert {name: type(module) for name, module in network.named_modules()} == before
    assert network.config._attn_implementation == attention
    assert network.training
    assert all(bool((value == bits[name]).all()) for name, value in network.state_dict().items())
    with Engine(network, **HOW) as engine:
        assert len(engine.generate([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids) == 2
