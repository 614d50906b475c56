"""`kvcellar run` with one prompt: output, errors and exit codes."""

import errno
import io
import json
import os
import re
import signal
import threading

import click
import pytest

from kvcellar import Engine
from kvcellar.cli.config import OF_ENGINE
from kvcellar.cli.main import COMMANDS, cli
from kvcellar.cli.options import EVERYDAY
from kvcellar.frontend.request_builder import RequestBuilder
from kvcellar.sampling_params import SamplingParams
from tests.cli.command import kvcellar, started
from tests.zoo import ARCHS

GREEDY = ("--temperature", "0", "--dtype", "float32", "--threads", "1", "--cache-bytes", "32M")


@pytest.fixture(scope="module")
def engine():
    with Engine(dtype="float32", cache_bytes=32_000_000, threads=1) as engine:
        yield engine


def user(text):
    return [{"role": "user", "content": text}]


def test_a_prompt_as_an_argument(engine):
    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "9", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == engine.chat(user("import os"), max_tokens=9, temperature=0.0).text + "\n"


def test_a_prompt_from_a_pipe(engine):
    ran = kvcellar("run", "--max-tokens", "9", *GREEDY, stdin=b"def main():\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == engine.chat(user("def main():"), max_tokens=9, temperature=0.0).text + "\n"


def test_an_image_is_sent_with_the_prompt(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    image = ("--image", str(tmp_path / "a.png"))
    ran = kvcellar("run", "embedded", "what is this", *image, *GREEDY)
    assert ran.code != 0
    assert "messages[0].content[0].image: embedded takes no images: its network reads text only" in ran.err
    assert "--image needs the chat template" in kvcellar("run", "embedded", "x", "--raw", *image).err


def test_raw_uses_no_chat_template(engine):
    ran = kvcellar("run", "--raw", "--max-tokens", "9", *GREEDY, stdin=b"def main")
    assert ran.out == engine.generate("def main", max_tokens=9, temperature=0.0).text + "\n"


def test_json_output(engine):
    ran = kvcellar("run", "embedded", "import os", "--json", "--max-tokens", "5", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    (line,) = ran.out.splitlines()
    record = json.loads(line)
    own = engine.chat(user("import os"), max_tokens=5, temperature=0.0)
    assert record["text"] == own.text
    assert record["token_ids"] == list(own.token_ids)
    assert record["finish_reason"] == own.finish_reason
    usage = own.usage
    assert record["usage"] == {"prompt_tokens": usage.prompt_tokens, "cached_tokens": 0, "completion_tokens": 5}
    assert set(record["timings"]) == {"queued", "first_token", "decoding"}
    assert record["logprobs"] is None


def test_json_output_with_logprobs(engine):
    ran = kvcellar("run", "embedded", "import os", "--json", "--logprobs", "2", "--max-tokens", "3", *GREEDY)
    own = engine.chat(user("import os"), max_tokens=3, temperature=0.0, logprobs=2)
    assert json.loads(ran.out)["logprobs"] == [
        {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top], "rank": 0}
        for one in own.logprobs
    ]


def test_token_ids_for_a_model_without_a_tokenizer(tmp_path, monkeypatch):
    ARCHS["llama"].build().save_pretrained(tmp_path)
    with Engine(tmp_path, cache_bytes=10**6, threads=1) as engine:
        own = engine.generate([5, 6, 7], max_tokens=6, temperature=0.0)
    words = ("--temperature", "0", "--max-tokens", "6", "--cache-bytes", "1M", "--threads", "1")
    first = " ".join(map(str, own.token_ids)) + "\n"
    assert kvcellar("run", str(tmp_path), "5 6,7", "--ids", *words).out == first
    assert kvcellar("run", str(tmp_path), "--ids", *words, stdin=b"[5, 6, 7]\n").out == first
    record = json.loads(kvcellar("run", str(tmp_path), "5 6 7", "--ids", "--json", *words).out)
    assert (record["text"], record["token_ids"]) == ("", list(own.token_ids))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    talk = kvcellar("run", str(tmp_path), "--ids", *words, typed="5 6 7\rfive\r8\r/bye\r")
    assert "a completion model, in token ids" in talk.out
    (begun, *_), (more, cached, prompt) = re.findall(r"^(\d[\d ]*\n).* (\d+) of (\d+) prompt tokens", talk.out, re.M)
    assert begun == first
    assert (len(more.split()), cached, prompt) == (6, "8", "10"), "it continues the prompt and the completion"
    assert "like 12 7 99, not 'five'" in talk.err

    for ran in (kvcellar("run", str(tmp_path), "hello", *words), kvcellar("run", str(tmp_path), *words, typed="")):
        assert (ran.code, ran.out) == (1, "")
        assert "this model has no tokenizer" in ran.err
        assert "The reason: the directory has no tokenizer. With --ids, prompt and completion are token ids." in ran.err


def test_sampling_options_are_used(engine):
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


OPTIONS = {  # by field: the words on the command line, and the value that they mean
    "typical_p": (("--typical-p", "0.4"), 0.4),
    "repetition_penalty": (("--repetition-penalty", "1.5"), 1.5),
    "presence_penalty": (("--presence-penalty", "1.5"), 1.5),
    "frequency_penalty": (("--frequency-penalty", "1.5"), 1.5),
    "repeat_last_n": (("--repeat-last-n", "64"), 64),
    "logit_bias": (("--logit-bias", "35=50", "--logit-bias", "9=-100"), {35: 50.0, 9: -100.0}),
    "min_tokens": (("--min-tokens", "7"), 7),
    "min_length": (("--min-length", "7"), 7),
    "top_h": (("--top-h", "0.5"), 0.5),
    "epsilon_cutoff": (("--epsilon-cutoff", "0.01"), 0.01),
    "eta_cutoff": (("--eta-cutoff", "0.01"), 0.01),
    "no_repeat_ngram_size": (("--no-repeat-ngram-size", "3"), 3),
    "bad_words_ids": (("--bad-words", "9,11", "--bad-words", "7"), ((9, 11), (7,))),
    "sequence_bias": (("--sequence-bias", "9,11=-5", "--sequence-bias", "7=2"), {(9, 11): -5.0, (7,): 2.0}),
    "suppress_tokens": (("--suppress-token", "9", "--suppress-token", "7"), (9, 7)),
    "begin_suppress_tokens": (("--begin-suppress-token", "9"), (9,)),
    "exponential_decay_length_penalty": (("--exponential-decay", "5", "1.1"), (5, 1.1)),
    "stop_token_ids": (("--stop-id", "9", "--stop-id", "11"), (9, 11)),
    "logprobs": (("--logprobs", "3"), 3),
}


def test_every_option_of_sampling_reaches_the_engine(monkeypatch):
    params_seen, honest = [], RequestBuilder.submit

    def submit(self, ids, params, deliver, how):
        params_seen.append(params)
        return honest(self, ids, params, deliver, how)

    monkeypatch.setattr(RequestBuilder, "submit", submit)
    words = [word for given, _ in OPTIONS.values() for word in given]
    assert kvcellar("run", "embedded", "import os", "--json", "--max-tokens", "9", *words, *GREEDY).code == 0
    (params,) = params_seen
    expected = {field: value for field, (_, value) in OPTIONS.items()}
    assert {field: getattr(params, field) for field in OPTIONS} == expected
    assert all(value != getattr(SamplingParams(), field) for field, value in expected.items())


def test_a_stop_string_ends_the_output(engine):
    whole = engine.chat(user("import os"), max_tokens=20, temperature=0.0).text
    stop = whole[4:7]
    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "20", "--stop", "\0", "--stop", stop, *GREEDY)
    assert ran.out == whole[: whole.index(stop)] + "\n"


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(*words, stdin=b""):
    """The line with the reason."""
    ran = kvcellar(*words, stdin=stdin)
    assert ran.code == 1
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("kvcellar: ")
    return line


@pytest.fixture
def broken(tmp_path):
    """A directory that is not a model, of the given kind."""

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
        ("pickled", "pickled weights can run code"),
        ("weightless", "has neither model.safetensors nor model.safetensors.index.json"),
        ("cut", "not a whole safetensors file"),
    ],
)
def test_a_directory_without_a_model_is_refused(broken, kind, why):
    assert why in refused("run", broken(kind), "hello")
    assert why in refused("doctor", broken(kind), "--json")


@pytest.mark.parametrize("name", ["nosuch", "owner/nosuch", "../../etc/passwd", "-", "x" * 5000, "a\nb", "é/è"])
def test_an_unknown_model_name_is_refused(name):
    line = refused("run", "--", name, "hello")
    assert "there is no directory" in line or "is a file" in line or "neither a directory" in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--cache-bytes", "100"), "Raise --cache-bytes"),
        (("--context", "2"), "the prompt has"),
        (("--ids",), "with --ids a prompt is token ids, like 12 7 99, not 'hello there'"),
    ],
)
def test_impossible_requests_are_refused(words, why):
    assert why in refused("run", "embedded", "hello there", *words)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--temperature", "-1", "temperature must be"),
        ("--temperature", "nan", "temperature must be"),
        ("--top-k", "-1", "top_k must be"),
        ("--typical-p", "0", "typical_p must be"),
        ("--repetition-penalty", "0", "repetition_penalty must be"),
        ("--presence-penalty", "3", "presence_penalty must be"),
        ("--frequency-penalty", "-3", "frequency_penalty must be"),
        ("--logit-bias", "5", "not a token id and a number, like 13=-100"),
        ("--logit-bias", "x=1", "not a token id and a number, like 13=-100"),
        ("--logit-bias", "5=101", "logit_bias must be"),
        ("--logit-bias", "999999=1", "names token 999999; this model's tokens are 0 to"),
        ("--max-tokens", "0", "max_tokens must be"),
        ("--min-tokens", "600", "min_tokens 600 is more than --max-tokens 512"),
        ("--seed", str(2**64), "seed must be"),
        ("--stop", "", "stop must be a string"),
        ("--stop-id", "-1", "stop_token_ids must be"),
        ("--stop-id", "999999", "names token 999999; this model's tokens are 0 to"),
        ("--context", "1000000", "this model is made for 4096"),
        ("--context", "-5", "context must be"),
        ("--device", "gpu", "device must be"),
        ("--dtype", "int8", "dtype must be"),
        ("--attention", "magic", "no attention backend"),
    ],
)
def test_an_invalid_value_is_refused_with_its_option(option, value, why):
    ran = kvcellar("run", "embedded", "hello there", option, value)
    assert (ran.code, ran.out) == (2, "")
    assert "Usage: " in ran.err
    assert ran.err.splitlines()[-1].startswith(f"Error: Invalid value for '{option}': ")
    assert why in ran.err


def test_input_that_is_not_text_is_refused():
    assert "not UTF-8: byte 2" in refused("run", stdin=b"ab\xff")
    assert "half of a surrogate pair" in refused("run", "embedded", "a\udcff")


def test_a_prompt_beyond_the_context_is_refused():
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
        ("run", "embedded", "x", "--logprobs", "2"),
        ("run", "--frobnicate"),
        ("frobnicate",),
        ("serve", "--port", "http"),
        ("serve", "--api-key-file", "nosuch"),
    ],
    ids=" ".join,
)
def test_wrong_usage_has_exit_code_2(words):
    ran = kvcellar(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert "Usage: " in ran.err
    assert "Error: " in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "size"),
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
def test_forms_of_sizes(text, size):
    from kvcellar.cli.options import SIZE

    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize("words", [(), ("--help",), ("run", "--help"), ("serve", "--help"), ("doctor", "--help")])
def test_help(words):
    ran = kvcellar(*words)
    assert "Usage: " in ran.out + ran.err
    assert ran.code == (0 if words else 2)


@pytest.mark.parametrize("command", ["run", "serve", "doctor", "list"])
def test_help_has_everyday_options_first_and_says_how_to_see_the_others(command):
    everyday, found = kvcellar(command, "--help").out, kvcellar(command, "--help-all")
    assert "--help" in everyday
    if "--help-all" not in everyday:
        assert found.code == 2, "it has few options, all of which were shown"
        return
    (more,) = re.findall(r"(\d+) more options: .*--help-all", everyday)
    options = [set(re.findall(r"^  (-\S+)", text, re.M)) for text in (everyday, found.out)]
    assert options[0] < options[1]
    assert len(options[1]) - len(options[0]) == int(more)
    assert {"--cache-bytes", "--device", "--help"} <= options[0]
    assert "more options" not in found.out


def test_names_of_options_in_groups_are_those_of_options():
    params = [
        one.name for name in COMMANDS if (found := cli.get_command(click.Context(cli), name)) for one in found.params
    ]
    of_all = {"_click_default_help", "help_all", "config"}
    ours = of_all | {"images", "replicas", "gateways"}  # of cluster's, too
    assert {*EVERYDAY, *OF_ENGINE} - ours <= set(params)


def test_version():
    from kvcellar import __version__

    assert kvcellar("--version").out == f"kvcellar, version {__version__}\n"


def test_a_prompt_that_was_taken_as_a_model_is_said():
    ran = kvcellar("run", "what is this?")
    assert ran.code == 2
    assert "'what is this?' was taken as MODEL, and there is no prompt: give one behind MODEL" in ran.err


# -- as a process -----------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path):
    process = started(tmp_path, "run", "embedded", "import os", "--ignore-eos", "--max-tokens", "4000", *GREEDY)
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_closed_stdout_ends_the_command_silently(tmp_path):
    words = ("run", "embedded", "import os", "--quiet", "--ignore-eos", "--max-tokens", "4000")
    process = started(tmp_path, *words, *GREEDY)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(120) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_full_disk_is_reported_in_one_line():
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ran = kvcellar("run", "embedded", "import os", "--max-tokens", "3", *GREEDY, stdout=Full())
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert line.startswith("kvcellar: no space left on the disk of the file that the output goes to")
    assert "No space left on device" in line


def test_nothing_is_left_running_after_a_command():
    before = set(threading.enumerate())
    kvcellar("run", "embedded", "import os", "--max-tokens", "3", *GREEDY)
    refused("run", "embedded", "hello", "--context", "1")
    assert set(threading.enumerate()) <= before
