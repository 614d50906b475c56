"""Loading and testing a model logs nothing; records of other threads, and later ones, pass."""

import logging
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.load import load
from kvcellar.memory.attention.choose import backends
from tests.zoo import ARCHS

LIBRARY = logging.getLogger("transformers")
STRANGER = logging.getLogger("transformers.models.llama")
PROGRAM = """
import sys
from kvcellar.memory.attention.choose import backends
from kvcellar.errors import ModelRefused
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.load import load
for path in sys.argv[1:]:
    try:
        build_guest(load(path).model, backends())
    except ModelRefused:
        pass
"""


class _Ear(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@pytest.fixture
def handler() -> Any:
    handler = _Ear()
    LIBRARY.addHandler(handler)
    yield handler
    LIBRARY.removeHandler(handler)


@pytest.mark.slow
def test_a_program_that_loads_and_tests_models_prints_nothing(tmp_path: Path) -> None:
    with silence_transformers():
        for name in ("dbrx", "granite", "mamba"):  # the first warns when its attention is set, the last of slow kernels
            ARCHS[name].build().save_pretrained(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("dbrx", "granite", "mamba")]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_loading_and_testing_a_model_logs_nothing(
    handler: _Ear, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with silence_transformers():
        ARCHS["dbrx"].build().save_pretrained(tmp_path)
    build_guest(load(tmp_path).model, backends())
    assert handler.records == []
    assert capfd.readouterr() == ("", "")


def test_only_errors_of_transformers_are_logged(handler: _Ear) -> None:
    with silence_transformers():
        STRANGER.warning("once")
        STRANGER.error("broken")
        warnings.warn("soon gone", FutureWarning, stacklevel=1)
    STRANGER.warning("after")
    assert handler.records == ["broken", "after"]


def test_log_records_of_other_threads_pass(handler: _Ear) -> None:
    with silence_transformers():
        other = threading.Thread(target=STRANGER.warning, args=("from another thread",))
        other.start()
        other.join()
    assert handler.records == ["from another thread"]


def test_progress_bars_are_replaced_on_this_thread_only() -> None:
    made: list[str] = []

    def users(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made.append(kwargs["desc"])
        return transformers_logging.EmptyTqdm(*args)

    before = transformers_logging.set_tqdm_hook(users)
    try:
        with silence_transformers():
            assert list(transformers_logging.tqdm([1, 2], desc="here")) == [1, 2]
            other = threading.Thread(target=transformers_logging.tqdm, args=([1],), kwargs={"desc": "elsewhere"})
            other.start()
            other.join()
        transformers_logging.tqdm([1], desc="after")
        assert made == ["elsewhere", "after"]
    finally:
        assert transformers_logging.set_tqdm_hook(before) is users


def test_settings_are_restored_after_an_exception() -> None:
    level, filters = LIBRARY.level, [list(handler.filters) for handler in LIBRARY.handlers]
    with pytest.raises(ZeroDivisionError), silence_transformers():
        raise ZeroDivisionError
    assert LIBRARY.level == level
    assert [list(handler.filters) for handler in LIBRARY.handlers] == filters
    assert transformers_logging.set_tqdm_hook(None) is None
