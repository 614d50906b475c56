"""Environment variables that the command sets before libraries read them."""

import os
import re
import runpy
import subprocess
import sys

import pytest

from kvcellar import __version__
from kvcellar.cli.main import ENVIRONMENT, main


@pytest.mark.parametrize("given", [None, "7"])
def test_the_kernel_cache_of_onednn_is_limited_unless_already_set(
    given: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    monkeypatch.setattr(sys, "argv", ["kvcellar", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    found = {name: os.environ.pop(name) for name in ENVIRONMENT}
    assert ended.value.code == 0, capsys.readouterr().err
    assert found == (ENVIRONMENT if given is None else dict.fromkeys(ENVIRONMENT, given))


def test_python_m_kvcellar_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(sys, "argv", ["kvcellar", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvcellar", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvcellar, version {__version__}\n"


def test_threads_of_torch_sleep_while_they_wait() -> None:
    """OpenMP says by which settings it runs: it reads them when torch is imported, after the command has set them."""
    program = "import sys; sys.argv[1:] = ['--help']\nfrom kvcellar.cli.main import main\n"
    program += "try: main()\nfinally: import torch"
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment |= {"OMP_DISPLAY_ENV": "true", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0
    assert re.search(r"OMP_WAIT_POLICY ?= ?'PASSIVE'", ran.stderr)
