"""`kvcellar run` with one prompt: what goes to which stream, and which exit code says what."""

import errno
import io
import json
import os
import signal
import threading

import pytest

from kvcellar import Engine
from tests.cli.command import kvcellar, started

GREEDY = ("--temperature", "0", "--dtype", "float32", "--threads", "1", "--cache-bytes", "32M")


@pytest.fixture(scope="module")
def engine():
    with Engine(dtype="float32", cache_bytes=32_000_000, threads=1) as engine:
        yield engine


def user(text):
    return [{"role": "user", "content": text}]


def test_a_prompt_as_an_argument_is_answered_on_stdout(engine):
    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "9", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == engine.chat(user("import os"), max_tokens=9, temperature=0.0).text + "\n"


def test_a_prompt_from_a_pipe_is_answered_by_the_embedded_model(engine):
    ran = kvcellar("run", "--max-tokens", "9", *GREEDY, stdin=b"def main():\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == engine.chat(user("def main():"), max_tokens=9, temperature=0.0).text + "\n"


def test_raw_continues_the_text_as_it_is(engine):
    ran = kvcellar("run", "--raw", "--max-tokens", "9", *GREEDY, stdin=b"def main")
    assert ran.out == engine.generate("def main", max_tokens=9, temperature=0.0).text + "\n"


def test_json_is_one_object_with_everything(engine):
    ran = kvcellar("run", "embedded", "import os", "--json", "--max-tokens", "5", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    (line,) = ran.out.splitlines()
    said = json.loads(line)
    own = engine.chat(user("import os"), max_tokens=5, temperature=0.0)
    assert said["text"] == own.text
    assert said["token_ids"] == list(own.token_ids)
    assert said["finish_reason"] == own.finish_reason
    usage = own.usage
    assert said["usage"] == {"prompt_tokens": usage.prompt_tokens, "cached_tokens": 0, "completion_tokens": 5}
    assert set(said["timings"]) == {"queued", "first_token", "decoding"}


def test_sampling_is_as_it_was_said(engine):
    words = ("--seed", "7", "--top-p", "0.8", "--top-k", "30", "--min-p", "0.01", "--repetition-penalty", "1.1")
    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "12", *words, *GREEDY, "--temperature", "0.9")
    own = engine.chat(
        user("import os"),
        max_tokens=12,
        seed=7,
        top_p=0.8,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.1,
        temperature=0.9,
    )
    assert ran.out == own.text + "\n"


def test_the_answer_ends_where_a_stop_string_would_come(engine):
    whole = engine.chat(user("import os"), max_tokens=20, temperature=0.0).text
    stop = whole[4:7]
    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "20", "--stop", "\0", "--stop", stop, *GREEDY)
    assert ran.out == whole[: whole.index(stop)] + "\n"


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(*words, stdin=b""):
    """The one line that says why."""
    ran = kvcellar(*words, stdin=stdin)
    assert ran.code == 1
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("kvcellar: ")
    return line


@pytest.fixture
def broken(tmp_path):
    """A directory with what its name says."""

    def make(kind):
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        if kind != "empty":
            (folder / "config.json").write_text({"no-json": "{", "no-type": "{}"}.get(kind, '{"model_type": "llama"}'))
        if kind == "pickled":
            (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
        if kind == "cut":
            (folder / "model.safetensors").write_bytes(b"\xff" * 100)
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("empty", "no config.json"),
        ("no-json", "not JSON"),
        ("no-type", "of type None"),
        ("pickled", "only pickled weights"),
        ("weightless", "no model.safetensors"),
        ("cut", "not a whole safetensors file"),
    ],
)
def test_a_directory_that_is_no_model_is_refused_in_one_line(broken, kind, why):
    assert why in refused("run", broken(kind), "hello")
    assert why in refused("doctor", broken(kind), "--json")


@pytest.mark.parametrize("name", ["nosuch", "owner/nosuch", "../../etc/passwd", "-", "x" * 5000, "a\nb", "é/è"])
def test_a_name_that_is_no_model_is_refused_in_one_line(name):
    line = refused("run", "--", name, "hello")
    assert "there is no directory" in line or "is a file" in line or "neither a directory" in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--temperature", "-1"), "temperature must be"),
        (("--temperature", "nan"), "temperature must be"),
        (("--max-tokens", "0"), "max_tokens must be"),
        (("--seed", str(2**64)), "seed must be"),
        (("--stop", ""), "stop string"),
        (("--cache-bytes", "100"), "Raise cache_bytes"),
        (("--context", "1000000"), "this model is made for 4096"),
        (("--context", "-5"), "context must be"),
        (("--device", "gpu"), "device must be"),
        (("--dtype", "int8"), "dtype must be"),
        (("--attention", "magic"), "no attention backend"),
        (("--context", "2"), "the prompt has"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, why):
    assert why in refused("run", "embedded", "hello there", *words)


def test_what_comes_through_a_pipe_must_be_text():
    assert "not UTF-8: byte 2" in refused("run", stdin=b"ab\xff")
    assert "half of a surrogate pair" in refused("run", "embedded", "a\udcff")


def test_a_prompt_beyond_the_context_is_refused_in_one_line():
    assert "the model's context allows 4096" in refused("run", stdin=b"\n" * 10**5 + b"x")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "embedded", ""),
        ("run",),
        ("run", "embedded", "x", "y"),
        ("run", "embedded", "x", "--temperature", "hot"),
        ("run", "embedded", "x", "--cache-bytes", "10Q"),
        ("run", "embedded", "x", "--cache-bytes", ""),
        ("run", "--frobnicate"),
        ("frobnicate",),
        ("serve", "--port", "http"),
        ("serve", "--api-key-file", "nosuch"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two_and_says_how_it_would_be_right(words):
    ran = kvcellar(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert "Usage: " in ran.err
    assert "Error: " in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("800", 800),
        ("8k", 8000),
        ("1.5M", 1_500_000),
        ("2G", 2 * 10**9),
        ("1KiB", 1024),
        ("2gib", 2 << 30),
        ("7 MB", 7 * 10**6),
        ("3B", 3),
    ],
)
def test_sizes_are_read_as_people_write_them(said, size):
    from kvcellar.cli.options import Size

    assert Size().convert(said, None, None) == size


@pytest.mark.parametrize("words", [(), ("--help",), ("run", "--help"), ("serve", "--help"), ("doctor", "--help")])
def test_help_is_there(words):
    ran = kvcellar(*words)
    assert "Usage: " in ran.out + ran.err
    assert ran.code == (0 if words else 2)


def test_the_version_is_said():
    from kvcellar import __version__

    assert kvcellar("--version").out == f"kvcellar, version {__version__}\n"


# -- as a process -----------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path):
    process = started(tmp_path, "run", "embedded", "import os", "--ignore-eos", "--max-tokens", "4000", *GREEDY)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_ends_it_without_a_word(tmp_path):
    process = started(tmp_path, "run", "embedded", "import os", "--ignore-eos", "--max-tokens", "4000", *GREEDY)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(120) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_output_that_cannot_be_written_is_an_error_in_one_line():
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "3", *GREEDY, stdout=Full())
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert line.startswith("kvcellar: ")
    assert "No space left on device" in line


def test_nothing_is_left_running_after_a_command():
    before = set(threading.enumerate())
    kvcellar("run", "embedded", "import os", "--max-tokens", "3", *GREEDY)
    refused("run", "embedded", "hello", "--context", "1")
    assert set(threading.enumerate()) <= before
