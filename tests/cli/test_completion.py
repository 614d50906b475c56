"""Shells complete commands, options, values of options, and names of models, without importing what loads models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.library.library import Library
from tests.cli.command import environment
from tests.library.made import made
from tests.serve.fake_library import source_in

PROGRAM = (
    "import sys; sys.argv = ['kvcellar']\n"
    "from kvcellar.cli.main import main\n"
    "heavy = {'torch', 'transformers', 'numpy', 'uvicorn', 'pydantic'}\n"
    "try:\n    main()\n"
    "finally:\n    print(*heavy & set(sys.modules), file=sys.stderr)\n"
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a model of the library, and one of the Hugging Face cache."""
    source = source_in(tmp_path)
    made(Library(tmp_path / "models"), "mine", f"FROM {source}", source.parent)
    (tmp_path / "hub/models--owner--model").mkdir(parents=True)
    return tmp_path


def completed(home: Path, *words: str, shell: str = "bash") -> list[str]:
    """What is offered for the last word."""
    variables = {
        "COMP_WORDS": " ".join(("kvcellar", *words)),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
        "_KVCELLAR_COMPLETE": f"{shell}_complete",
        "KVCELLAR_MODELS": str(home / "models"),
        "HF_HUB_CACHE": str(home / "hub"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(home) | variables, capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stderr.strip()) == (0, "")
    return ran.stdout.splitlines()


def plain(*names: str) -> list[str]:
    return [f"plain,{name}" for name in names]


OURS = plain("embedded", "embedded-vision")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("cre",), plain("create")),
        (("serve", "--log-f"), plain("--log-format")),
        (("serve", "--log-format", ""), plain("text", "json")),
        (("run", "--dtype", "bf"), plain("bfloat16")),
        (("run", "--device", "c"), plain("cpu", "cuda")),
        (("run", "--kv-dtype", "int"), plain("int8", "int4")),
        (("create", "a", "-q", "i"), plain("int8", "int4")),
        (("run", "--draft", "n"), ["dir,", *plain("ngram")]),
        (("serve", ""), ["dir,", *plain("mine"), *OURS, *plain("owner/model")]),
        (("serve", "embedded", "m"), ["dir,", *plain("mine")]),
        (("doctor", "ow"), ["dir,", *plain("owner/model")]),
        (("show", ""), plain("mine")),
        (("stop", "mi"), plain("mine")),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_last_word_is_completed(home: Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(home, *words) == offered


def test_other_shells_get_the_same(home: Path) -> None:
    assert completed(home, "rm", "mi", shell="zsh") == ["plain", "mine", "_"]
    assert completed(home, "rm", "mi", shell="fish") == ["plain,mine"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_ask(tmp_path: Path, shell: str) -> None:
    variables = environment(tmp_path) | {"_KVCELLAR_COMPLETE": f"{shell}_source"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=120)
    assert f"_KVCELLAR_COMPLETE={shell}_complete" in ran.stdout
    if shell == "bash":
        bash = {"PATH": os.environ["PATH"]}
        assert subprocess.run(["bash", "-n"], input=ran.stdout, text=True, env=bash, check=False).returncode == 0
