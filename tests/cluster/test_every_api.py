"""Tests of the server pass through two gateways and two replicas, too (`two_gateways.py`): a few of each API here, and
in the slow part those of all files but what is of one process, each for the reason that is told."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.conftest import ROOT

SERVE = Path(ROOT, "tests/serve")
LOOP = "the event loop and the threads of one process, or no server at all"
LIBRARY = "models that a server loads and frees itself; gateways have those that they were started with"
SOCKETS = "sockets, signals and the end of one process"
COUNTS = "what one process counts and logs"
RECORDS = "lists what one gateway has recorded"
MEMORY = "the memory of one process for bodies"
LOCAL = "counts and reads the local store of one engine; two replicas have one each"
SHORT = "prompts below a block of KV events, of which no other gateway knows where they are"
INSIDE = "changes the inside of one front end or engine"
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("test_arrivals.py", "test_event_loop.py", "test_field_names.py", "test_json_text.py"), LOOP),
        **dict.fromkeys(("test_host.py", "test_http_request.py", "test_logprobs.py", "test_middleware.py"), LOOP),
        **dict.fromkeys(("test_parse_queue.py", "test_parsing.py", "test_reader_threads.py"), LOOP),
        **dict.fromkeys(("test_openapi.py", "test_written_texts.py", "test_served_engines.py"), LOOP),
        **dict.fromkeys(("test_library_embeddings.py", "test_several_models.py", "test_shared_engines.py"), LIBRARY),
        **dict.fromkeys(("test_shown_models.py", "test_startup.py", "test_uploads.py"), LIBRARY),
        **dict.fromkeys(("test_connection.py", "test_sending.py", "test_server.py", "test_settings.py"), SOCKETS),
        **dict.fromkeys(("test_strict_http.py", "test_key_ring.py", "test_panics.py"), SOCKETS),
        **dict.fromkeys(("test_dashboard.py", "test_metrics.py", "test_request_log.py", "test_traces.py"), COUNTS),
        "test_admin_cache.py": LOCAL,
        "test_admin.py::test_the_last_requests_are_listed": RECORDS,
        "test_end_to_end.py::test_a_continued_response_finds_its_conversation_in_memory": RECORDS,
        "test_bodies.py::test_long_bodies_beyond_the_limit_are_refused_and_short_ones_are_not": MEMORY,
        "test_body_memory.py::test_what_a_response_needs_of_its_body_counts_until_it_has_ended": MEMORY,
        "test_shared_prefixes.py::test_each_turn_of_a_conversation_reads_only_what_is_new": SHORT,
        "test_messages.py::test_limits_of_memory_and_queue": INSIDE,
        "test_faults.py::test_a_fault_is_answered_and_the_server_goes_on[30]": INSIDE,
        "test_faults.py::test_a_fault_is_answered_and_the_server_goes_on[34]": INSIDE,
    }
)
ALWAYS = ("test_equal_answers.py",)  # the same text by each API, streamed or not, and cached tokens


def files() -> list[str]:
    return sorted(path.name for path in SERVE.glob("test_*.py") if path.name not in LEFT_OUT)


def through_a_cluster(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--gateways"]
    command += [f"--deselect=tests/serve/{one}" for one in LEFT_OUT if one.startswith(f"{name}::")]
    ran = subprocess.run([*command, f"tests/serve/{name}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in files()]
)
def test_tests_of_the_server_pass(name: str) -> None:
    through_a_cluster(name)


def test_what_is_left_out_is_there() -> None:
    for one in LEFT_OUT:
        file, _, name = one.partition("::")
        assert f"def {name.partition('[')[0]}(" in (SERVE / file).read_text() if name else (SERVE / file).exists(), one
