"""What loading has freed goes back to the system."""

import ctypes
import subprocess
import sys
from unittest import mock

import pytest

from kvcellar.engine.load import build
from kvcellar.kernels import arena
from kvcellar.kernels.arena import trim_heap
from tests.engine.mixes import small_engine

FREED = """
import re
from kvcellar.kernels.arena import trim_heap

def used():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read()).group(1))

blocks = [b"x" * 60_000 for _ in range(1000)]  # written: else a part is never in memory
for block in range(0, 1000, 2):
    blocks[block] = None  # between two that stay
before = used()
trim_heap()
print(before - used(), sum(map(len, filter(None, blocks))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_between_what_is_used_goes_back() -> None:
    try:
        _ = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        pytest.skip("this C library has no malloc_trim")
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    less, kept = map(int, ran.stdout.split())
    assert kept == 500 * 60_000
    assert less > 20_000, "kilobytes, of 30 000"


def test_where_there_is_no_such_function_nothing_is_done() -> None:
    with mock.patch.object(arena.ctypes, "CDLL", return_value=object()) as opened:
        trim_heap()
    opened.assert_called_once_with(None)


def test_an_engine_gives_back_what_its_load_has_freed() -> None:
    with mock.patch.object(build, "trim_heap") as trimmed, small_engine("llama"):
        trimmed.assert_called_once_with()
