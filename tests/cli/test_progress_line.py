"""While a model is loaded, one line at the terminal says what is being done; it goes to stderr, and nowhere else."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.command import COMMAND, Terminal, environment, kvcellar, ordinary_interrupts
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


def test_a_terminal_is_told_each_stage_and_the_line_is_erased(folder: str) -> None:
    ran = kvcellar("run", folder, *ASKED, typed="")
    places = [ran.err.index(stage) for stage in ORDER]
    assert places == sorted(places)
    assert "loading weights ...   0%|" in ran.err
    line, _, rest = ran.err.rpartition("\r")
    assert line.endswith(" " * len("allocating memory ..."))
    assert rest.startswith("[2 tokens, ")
    assert not any(stage in ran.out for stage in ORDER)


def test_a_pipe_is_told_nothing(folder: str) -> None:
    assert kvcellar("run", folder, *ASKED).err == ""


@pytest.mark.parametrize("words", [("run",), ("doctor", "--no-kv-quality"), ("verify", "--no-kv-quality")])
def test_quiet_is_quiet_at_a_terminal_too(folder: str, words: tuple[str, ...]) -> None:
    more = ASKED if words[0] == "run" else ("--tokens", "8") if words[0] == "verify" else ()
    ran = kvcellar(words[0], folder, *words[1:], *more, "--quiet", typed="")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out


def test_a_refusal_has_a_line_of_its_own(tmp_path: Path) -> None:
    ARCHS["llama"].build().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    ran = kvcellar("run", str(tmp_path), *ASKED, typed="")
    assert ran.code == 1
    assert ran.err.rpartition("\r")[2].startswith("kvcellar: ")


@pytest.mark.parametrize("stage", ["importing torch", "importing transformers"])
def test_ctrl_c_while_it_loads_ends_it_at_once_and_cleanly(tmp_path: Path, stage: str) -> None:
    with Terminal(tmp_path, ("run", "embedded", "import os", *HOW)) as terminal:
        terminal.until(stage)
        terminal.press("\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.seen
        assert "Error" not in terminal.seen


@pytest.mark.parametrize(
    "place", ["models.load._build", "engine.build.pack", "models.build_guest.whole_step_test", "engine.reserve._tried"]
)
def test_an_interrupt_in_the_middle_of_a_load_ends_it_with_nothing_but_the_line_erased(folder: str, place: str) -> None:
    with mock.patch(f"kvcellar.{place}", side_effect=KeyboardInterrupt):
        ran = kvcellar("run", folder, *ASKED, typed="")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.endswith(" \r\n"), "click ends the line"


def test_stdout_has_the_answer_alone_where_stderr_is_a_terminal(tmp_path: Path, folder: str) -> None:
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
    "words", ["--help", "--version", "run --help", "serve --help", "doctor --help", "verify --help"]
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
