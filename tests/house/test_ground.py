"""The rules of tests/conftest.py hold, seen from outside: a small suite of its own runs on that ground."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SUITE = """
import random
import socket

import hypothesis
import pytest

NOWHERE = ("192.0.2.1", 9)  # an address that is reserved for documentation


def test_passes_on_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass


def test_fails_at_a_far_socket():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(NOWHERE)


def test_fails_although_the_refusal_is_swallowed():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(NOWHERE)
        except OSError:
            pass


def test_fails_at_a_server_on_all_addresses():
    with socket.create_server(("0.0.0.0", 0)):
        pass


def test_fails_at_a_far_name():
    socket.getaddrinfo("kvcellar.invalid", 80)


@pytest.mark.slow
def test_skips():
    raise AssertionError("slow tests run only with --long")


@pytest.mark.parametrize("again", range(2))
def test_passes_with_the_same_numbers(again):
    assert random.random() == 0.8444218515250481


def test_passes_with_repeatable_examples():
    assert hypothesis.settings().derandomize and hypothesis.settings().deadline is None
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What became of each test of the suite: its outcomes by name (a test may pass and then fail at its end)."""
    here = tmp_path_factory.mktemp("ground")
    shutil.copy(TESTS / "conftest.py", here)
    (here / "test_suite.py").write_text(SUITE)
    (here / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  gpu\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(here)]
    report = subprocess.run(command, cwd=here, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    found: dict[str, set[str]] = {}
    for line in report.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in {"PASSED", "FAILED", "ERROR", "SKIPPED"}:
            name = "test_skips" if word == "SKIPPED" else rest.partition("::")[2].partition(" ")[0].partition("[")[0]
            found.setdefault(name, set()).add(word)
    return found


def test_every_test_of_the_suite_ran(outcomes):
    assert len(outcomes) == SUITE.count("\ndef test_")


def test_names_of_the_suite_say_what_becomes_of_them(outcomes):
    for name, became in outcomes.items():
        expected = {"passes": {"PASSED"}, "skips": {"SKIPPED"}, "fails": {"FAILED", "ERROR"}}[name.split("_")[1]]
        assert became & expected, f"{name} became {became}"
        assert not became & {"FAILED", "ERROR"} or expected == {"FAILED", "ERROR"}, f"{name} became {became}"
