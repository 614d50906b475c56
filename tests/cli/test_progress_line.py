"""The stages of loading a model are shown on stderr: at a terminal in one line, elsewhere where they last."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from kvcellar.cli import progress_line
from kvcellar.cli.progress_line import show_progress
from kvcellar.progress import Progress, report
from tests.cli.command import COMMAND, PATIENCE, Terminal, environment, kvcellar, ordinary_interrupts
from tests.zoo import ARCHS

HOW = ("--temperature", "0", "--threads", "1", "--cache-bytes", "32M", "--attention", "sdpa", "--max-tokens", "2")
ASKED = ("--ids", "5 6 7", *HOW)
ORDER = (
    "building llama", "loading weights", "packing weights", "testing the network", "measuring the largest steps",
    "allocating memory",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    ARCHS["llama"].build().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_each_stage_is_shown_and_the_line_erased(folder: str) -> None:
    ran = kvcellar("run", folder, *ASKED, typed="")
    places = [ran.err.index(stage) for stage in ORDER]
    assert places == sorted(places)
    assert "loading weights ...   0%|" in ran.err
    line, _, rest = ran.err.rpartition("\r")
    assert line.endswith(" " * len("allocating memory ..."))
    assert rest.lstrip("█·").startswith(" [2 tokens, ")
    assert not any(stage in ran.out for stage in ORDER)


def test_short_stages_are_not_shown_without_a_terminal(folder: str) -> None:
    assert kvcellar("run", folder, *ASKED, apart=3600.0).err == ""


@pytest.mark.parametrize("words", [("run",), ("doctor", "--no-kv-quality")])
def test_stages_that_last_are_shown_without_a_terminal(folder: str, words: tuple[str, ...]) -> None:
    ran = kvcellar(words[0], folder, *words[1:], *(ASKED if words[0] == "run" else ()), apart=1e-4)
    assert ran.code == 0
    assert ran.err.splitlines()
    assert all(line.endswith(" ...") for line in ran.err.splitlines())


def written(err: io.StringIO, text: str) -> None:
    """Wait for it."""
    limit = time.monotonic() + PATIENCE
    while text not in err.getvalue():
        assert time.monotonic() < limit, err.getvalue()
        time.sleep(0.001)


@pytest.mark.parametrize("again", [0.0, 3600.0])
def test_a_stage_has_one_line_or_one_each_half_minute(monkeypatch: pytest.MonkeyPatch, again: float) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    monkeypatch.setattr(progress_line, "APART", 0.001)
    monkeypatch.setattr(progress_line, "AGAIN", again)
    with show_progress() as shown:
        assert shown is not None
        report("loading weights", 2, 9)
        written(err, "loading weights (2 of 9) ...\n")
        report("loading weights", 3, 9)
        if not again:
            written(err, "loading weights (3 of 9) ...\n")
        shown(Progress("downloading", 1000, 4_000_000, "B"))
        written(err, "downloading (1 kB of 4 MB) ...\n")
    if again:
        assert err.getvalue() == "loading weights (2 of 9) ...\ndownloading (1 kB of 4 MB) ...\n"


@pytest.mark.parametrize("words", [("run",), ("doctor", "--no-kv-quality"), ("verify", "--no-kv-quality")])
def test_quiet_shows_nothing_at_a_terminal(folder: str, words: tuple[str, ...]) -> None:
    more = ASKED if words[0] == "run" else ("--tokens", "8") if words[0] == "verify" else ()
    ran = kvcellar(words[0], folder, *words[1:], *more, "--quiet", typed="")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out


def test_an_error_has_its_own_line(tmp_path: Path) -> None:
    ARCHS["llama"].build().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    ran = kvcellar("run", str(tmp_path), *ASKED, typed="")
    assert ran.code == 1
    assert ran.err.rpartition("\r")[2].startswith("kvcellar: ")


@pytest.mark.parametrize("stage", ["importing torch", "importing transformers"])
def test_ctrl_c_during_a_load_ends_the_command(tmp_path: Path, stage: str) -> None:
    with Terminal(tmp_path, ("run", "embedded", "import os", *HOW)) as terminal:
        terminal.until(stage)
        terminal.press("\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.seen
        assert "Error" not in terminal.seen


@pytest.mark.measures
@pytest.mark.parametrize(
    "place",
    [
        "engine.models.load._filled",
        "engine.models.weights.packing.pack",
        "engine.models.build_guest.whole_step_test",
        "engine.load.reserve._tried",
    ],
)
def test_an_interrupt_during_a_load_erases_the_line(folder: str, place: str) -> None:
    with mock.patch(f"kvcellar.{place}", side_effect=KeyboardInterrupt):
        ran = kvcellar("run", folder, *ASKED, typed="")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.endswith(" \r\n"), "click ends the line"


def test_an_interrupt_while_a_text_is_executed_has_the_same_exit_code(tmp_path: Path) -> None:
    """As that of a class of data, whose methods are compiled while its module is imported."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "from unittest import mock\n"
        "from kvcellar.cli.main import cli, main\n"
        "with mock.patch.object(cli, 'main', side_effect=lambda **_: exec('signal.raise_signal(2)\\nprint()')):\n"
        "    main()\n"
    )
    command = (sys.executable, "-m", "interrupted")
    ran = subprocess.run(command, cwd=tmp_path, preexec_fn=ordinary_interrupts, timeout=120, check=False)
    assert ran.returncode == 130


def test_progress_is_not_written_to_stdout(tmp_path: Path, folder: str) -> None:
    screen, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "run", folder, *ASKED],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(tmp_path),
        preexec_fn=ordinary_interrupts,
    ) as process:
        os.close(theirs)
        seen = b""
        while b"importing transformers" not in seen:
            seen += os.read(screen, 4096)
        assert b"importing torch" in seen
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait() == 130
    os.close(screen)


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "run --help",
        "serve --help",
        "doctor --help",
        "verify --help",
        "create --help",
        "list --help",
    ],
)
def test_help_needs_neither_torch_nor_transformers(words: str) -> None:
    code = (
        "import sys\nfrom kvcellar.cli.main import cli\n"
        f"try:\n    cli.main({words.split()!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr.split()) == (0, [])
    assert run.stdout
