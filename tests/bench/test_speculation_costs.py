"""What speculation costs, and how often drafts are accepted, is measured with tiny sizes. No time is compared."""

import json
from typing import Any

import pytest

from benchmarks.decoding import decode
from benchmarks.drafts import drafters, held_out
from benchmarks.run import main
from benchmarks.speculate import DEEPEST, ERRORS, SMALLEST, USELESS, Oracle
from kvcellar import Engine
from kvcellar.bench.network import TINY, write
from kvcellar.sampling_params import SamplingParams
from tests.speculate.chains import chain, sampler

pytestmark = pytest.mark.filterwarnings("default")  # transformers issues warnings


def measured(capsys: pytest.CaptureFixture[str], row: str) -> tuple[list[str], Any]:
    """The lines of the table, and what the last line has of the row."""
    main([row, "--quick"])
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)["rows"][row]


def test_rounds_are_compared_with_forwards_of_their_width(capsys: pytest.CaptureFixture[str]):
    table, results = measured(capsys, "speculate")
    errors, depths = [str(error) for error in ERRORS], [str(depth) for depth in SMALLEST.depths]
    assert list(results) == [str(sequences) for sequences in SMALLEST.sequences]
    for found in results.values():
        assert list(found["forward_ms"]) == [str(rows) for rows in range(1, DEEPEST + 2)]
        assert min(found["plain_ms"], *found["forward_ms"].values()) > 0
        assert list(found["fixed"]) == errors
        assert all(list(by_depth) == depths for by_depth in found["fixed"].values())
        assert [one["tokens"] for one in found["fixed"]["0.0"].values()] == [depth + 1 for depth in SMALLEST.depths]
        assert list(found["chosen"]) == [*errors, str(USELESS)]
        useless = found["chosen"][str(USELESS)]
        assert (useless["tokens"], useless["best"]) == (1, 0)
    lines = 1 + len(errors) * len(depths) + len(errors) + 1
    assert len(table) == lines * len(SMALLEST.sequences)
    assert {line.split()[0] for line in table} == {"plain", "fixed", "chosen"}


def test_acceptance_is_counted_on_texts_that_do_not_end(capsys: pytest.CaptureFixture[str]):
    table, found = measured(capsys, "drafts")
    assert "ngram" in drafters()
    assert [one["drafter"] for one in found if one["temperature"] == 0.8] == drafters()
    for one in found:
        tried, accepted = one["fixed"]["tried"], one["fixed"]["accepted"]
        assert len(tried) == len(accepted) <= 4
        assert all(kept <= of for kept, of in zip(accepted, tried, strict=True))
        assert tried == sorted(tried, reverse=True)
        assert 1 <= one["tokens"] <= 17
    assert [line.split()[0] for line in table] == ["accepted"] * len(found) + ["chosen"] * len(found)


def test_held_out_code_is_of_modules_that_were_not_trained_on():
    assert {"difflib.py", "threading.py"} <= {path.name for path in held_out()}
    assert not any("test" in path.parts for path in held_out())


@pytest.mark.parametrize("error", [0.0, 0.5, 1.0])
def test_an_oracle_is_wrong_at_its_rate(error: float):
    oracle, wrong, drafted = Oracle(error=error), 0, 0
    for _ in range(200):
        one = chain(sampler(vocab=9), DEEPEST, text=[3, 5])
        oracle.propose([one])
        drafted, wrong = drafted + len(one.tokens), wrong + sum(token != 5 for token in one.tokens)
    assert drafted == 200 * DEEPEST
    assert wrong == {0.0: 0, 0.5: wrong, 1.0: drafted}[error]
    assert abs(wrong / drafted - error) < 0.05


def test_a_network_repeats_its_last_token_and_a_burst_counts_its_tokens(tmp_path):
    write(TINY, tmp_path, repeats=True)
    with Engine(tmp_path, device="cpu", cache_bytes=1 << 20, threads=1) as engine:
        assert set(engine.generate([5, 6, 7], temperature=0.0, max_tokens=8, ignore_eos=True).token_ids) == {7}
        burst = decode(engine, [[5, 6, 7], [8, 9]], 4)
        assert (burst.steps, burst.tokens) == (4, 8)
        assert burst.seconds > 0
        with pytest.raises(RuntimeError, match="ended with length"):
            decode(engine, [[5, 6]], 4, SamplingParams(temperature=0.0, max_tokens=2))
