"""Tests of the server run through two gateways and two replicas (`two_gateways.py`): here a few of each API, and in the
slow part all files but those which are of one process, each for the reason that is told."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.conftest import ROOT

ONE_PROCESS: Mapping[str, str] = MappingProxyType({})  # by file, why
ALWAYS = ("test_equal_answers.py",)


def through_a_cluster(*chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--gateways", *chosen]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def files() -> list[str]:
    return sorted(path.name for path in Path(ROOT, "tests/serve").glob("test_*.py"))


def test_a_few_of_each_api() -> None:
    through_a_cluster(*(f"tests/serve/{name}" for name in ALWAYS))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in files() if name not in ONE_PROCESS and name not in ALWAYS])
def test_all_of(name: str) -> None:
    through_a_cluster(f"tests/serve/{name}")


def test_what_is_left_out_is_there() -> None:
    assert ONE_PROCESS.keys() <= {*files()}
    assert all(ONE_PROCESS.values())
