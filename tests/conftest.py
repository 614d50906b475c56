"""The ground every test stands on: one thread, no network, the same random numbers each time.

`pytest --long` runs the slow tests too, and gives Hypothesis `KVCELLAR_EXAMPLES` examples (2000) instead of 50. `--part
3/48` runs the third of 48 parts of the slow tests, and nothing else.

Parametrized tests are slow in all cells but a few that cover them (`selection.py`).

Engines of the tests in the folders `RECORDED` run recorded steps, as those of users do, unless a test says `record=`
itself; those of other tests run their modules. `pytest --record auto`, or `off`, says it for all.
"""

import os
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before anything imports torch or transformers: they read these once.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    KVCELLAR_MODELS="/nonexistent/kvcellar/models",  # so that no test finds the models of the user
)

# Nor the values of options of the user. Browsers that tests start create this directory.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir(), f"kvcellar-tests-{os.getuid()}"))

# So that processes which tests start find the package `tests`, in whatever directory they are.
ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

RECORD = ("auto", "off")
RECORDED = ("cli", "engine", "serve")  # what users run
TESTS = Path(__file__).parent
_SHARING = pytest.StashKey[Any]()
_END = pytest.StashKey[float]()

hypothesis.settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "long",
    max_examples=int(os.environ.get("KVCELLAR_EXAMPLES", "2000")),
    derandomize=True,
    deadline=None,
    database=None,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the slow tests too, with many more examples")
    parser.addoption("--part", type=_part, help="run only this part of the slow tests: 3/48 is the third of 48")
    parser.addoption("--seconds", type=float, help="skip what has not begun after so many seconds of tests")
    parser.addoption("--gateways", action="store_true", help="two gateways and two replicas in place of each server")
    parser.addoption("--record", choices=RECORD, help="`record` of engines of which a test does not say it")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "ci")
    sys.addaudithook(_watch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """`record` of the engines of a test and of its fixtures."""
    if (seconds := item.config.getoption("--seconds")) is not None:
        end = item.config.stash.setdefault(_END, time.monotonic() + seconds)
        if time.monotonic() > end:
            pytest.skip(f"not begun after {seconds} seconds")
    from kvcellar.engine.load.settings import Settings

    recorded = _folder(item.path) in RECORDED
    Settings.__init__.__kwdefaults__["record"] = item.config.getoption("--record") or ("auto" if recorded else "off")
    if recorded or "kvcellar.engine.load.build" in sys.modules:
        from tests.sharing import Sharing  # imports torch

        sharing = item.config.stash.setdefault(_SHARING, Sharing())
        measures = item.get_closest_marker("measures") is None
        sharing.start(measures=measures, passed=_folder(item.path) != "models", recordings=recorded)


def _folder(path: Path) -> str:
    """That of a test, below this one; "" for a test elsewhere."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.getoption("--record") or f"auto in {', '.join(RECORDED)}, else off"
    return f"engines of tests: record={chosen}, unless a test says it"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "tests.zoo" in sys.modules:  # it imports torch, which tests that do not use it run without
        from tests.selection import left_out

        for item in left_out(items):
            item.add_marker(pytest.mark.slow)
    if (part := config.getoption("--part")) is not None:
        chosen = {id(item) for item in items if item.get_closest_marker("slow") and _is_in(item, *part)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = [item for item in items if id(item) in chosen]
    elif not (config.getoption("--long") or "slow" in config.getoption("markexpr")):
        slow = pytest.mark.skip(reason="slow: `make test-long` runs it")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(slow)
    for item in items:
        if item.get_closest_marker("gpu") and (why := _no_accelerator()):
            item.add_marker(pytest.mark.skip(reason=why))


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not 1 <= int(number) <= int(of):
        raise ValueError(text)
    return int(number), int(of)


def _is_in(item: pytest.Item, number: int, of: int) -> bool:
    """Whether a test is in this part: each is in one, whatever other tests there are."""
    return zlib.crc32(item.nodeid.encode()) % of == number - 1


def _no_accelerator() -> str | None:
    import torch  # only for tests that need an accelerator; others run without torch

    return None if torch.cuda.is_available() else f"gpu: torch {torch.__version__} sees no accelerator here"


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """Seed whatever has been imported so far; what is imported later starts from its own fixed seed or a generator."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


# The audit hook sees every socket of the process, on any thread and below asyncio. It refuses, and remembers, so that a
# test fails too when the code under test swallows the refusal.
_ADDRESS_AT = {"socket.connect": 1, "socket.bind": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0}
_reached: list[str] = []


class NetworkReached(OSError):
    """A test went further than this machine."""


def _watch(event: str, args: tuple[Any, ...]) -> None:
    at = _ADDRESS_AT.get(event)
    if at is None:
        return
    address = args[at]
    host = address[0] if isinstance(address, tuple) else address if event == "socket.getaddrinfo" else None
    if not _stays_here(host):
        _reached.append(f"{event} to {host!r}")
        raise NetworkReached(f"tests stay on the loopback interface; this one wanted {event} to {host!r}")


def _stays_here(host: str | bytes | None) -> bool:
    """None stands for a local socket (a path), or for a lookup without a host."""
    if host is None:
        return True
    name = host.decode() if isinstance(host, bytes) else host
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    yield
    reached, _reached[:] = list(_reached), []
    assert not reached, f"the test left this machine: {reached}"
