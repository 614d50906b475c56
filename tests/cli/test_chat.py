"""`kvcellar run` at a terminal: the chat, the cost of each completion, commands, and Ctrl-C."""

import errno
import logging
import os
import re
import stat

import pytest

from kvcellar.engine.core.scheduler import Scheduler
from tests.cli.command import Terminal, kvcellar
from tests.zoo import ARCHS

COST = r"\[(\d+) tokens, ([\d.]+) tokens/s, first after (\d+) ms; (\d+) of (\d+) prompt tokens came from memory\]"
WORDS = ("run", "--temperature", "0", "--max-tokens", "12", "--threads", "1", "--cache-bytes", "32M")


def cost(terminal):
    """Wait for a completion: (tokens, tokens per second, ms to the first, cached tokens, prompt tokens)."""
    found = re.search(COST, terminal.until(COST))
    terminal.until(">>>")
    return tuple(map(float, found.groups()))


def type_line(terminal, line, pattern):
    """Type a line, and read until `pattern` matches."""
    terminal.type(line)
    text = terminal.until(pattern)
    terminal.until(">>>")
    return text


def test_a_chat(tmp_path):
    with Terminal(tmp_path, (*WORDS, "--system", "Answer in Python.")) as terminal:
        terminal.until(">>>")
        answers_tell_what_they_cost(terminal)
        commands_are_told_where_they_are_wrong(terminal)
        what_is_forgotten_is_read_again(terminal)
        what_came_from_memory_is_shown(terminal)
        a_fork_is_a_point_to_return_to(terminal)
        a_system_prompt_begins_a_conversation(terminal)
        ctrl_c_ends_an_answer_and_not_the_conversation(terminal)
        terminal.press("\x04")
        assert terminal.end() == 0
    history = tmp_path / "state/kvcellar/history"
    assert "+def main():" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def answers_tell_what_they_cost(terminal):
    terminal.type("def main():")
    tokens, speed, first, remembered, prompt = cost(terminal)
    assert (tokens, remembered) == (12, 0)
    assert prompt > 0
    assert speed > 0
    assert first > 0

    terminal.type("import os")
    _, _, _, remembered, longer = cost(terminal)
    assert longer > prompt
    assert prompt <= remembered < longer


def commands_are_told_where_they_are_wrong(terminal):
    type_line(terminal, "/set max_tokens 3", "max_tokens is 3 from now on")
    terminal.type("import re")
    assert cost(terminal)[0] == 3
    for wrong, why in {
        "/set top_p 2": "top_p must be",
        "/set top_p NaN": "top_p must be",
        "/set stop 5": "stop must be",
        "/set stop_token_ids 5": "stop_token_ids must be",
        "/set frobnicate 1": "no sampling parameter 'frobnicate'",
        "/rewind 17": "17 turns cannot be discarded; there are 3",
        "/rewind x": "'x' turns cannot be discarded",
        "/rewind ²": "'²' turns cannot be discarded",
        "/frobnicate": "there is no command /frobnicate; /help lists them",
        "/help": "set a sampling parameter, like",
        "/image": "send an image with the next message",
        "/image nothing.png": "nothing.png is no file",
        f"/image {__file__}": "image: embedded takes no images: its network reads text only",
        "/save": "keep the conversation under a name",
        "/list all": "show what was saved",
        "/rewind 1 2": "remove the last N turns",
        "/save a/b": "a conversation must have a name of 1 to 128",
        "/load nothing": "there is no conversation nothing",
        "/delete nothing": "there is no conversation nothing",
        "/set a": "set a sampling parameter, like",
        "/": "there is no command /;",
    }.items():
        type_line(terminal, wrong, re.escape(why))

    shown = type_line(terminal, "/show", r"sampling .*\n")
    assert "cells in use" in shown
    assert re.search(r"conversation  3 turns, \d+ tokens; it ends: ", shown)
    assert "max_tokens 3" in shown
    assert 5 < sum(line.startswith("  ") for line in shown.rpartition("/show")[2].splitlines()) <= 10
    assert "max_tokens 3" in type_line(terminal, "/set", r"sampling .*\n")


def what_is_forgotten_is_read_again(terminal):
    type_line(terminal, "/rewind 2", "removed 2 turns; 1 turn left")
    terminal.type("import os")
    *_, remembered, prompt = cost(terminal)
    assert 0 < remembered < prompt
    type_line(terminal, "/clear", "/clear")
    terminal.type("def main():")
    *_, remembered, shorter = cost(terminal)
    assert remembered < shorter < prompt  # the beginning of every chat is remembered

    terminal.type('"""def f():')
    terminal.until(r"\.\.\.")
    terminal.type('    return 1"""')
    cost(terminal)


def what_came_from_memory_is_shown(terminal):
    type_line(terminal, "/clear", "/clear")
    type_line(terminal, "/why", "no turn of this chat has ended yet")
    terminal.type("import os")
    cost(terminal)
    terminal.type("import sys")
    *_, remembered, prompt = cost(terminal)
    text = type_line(terminal, "/why", r"\n  [a-z ]+: ")
    assert 0 < remembered < prompt
    assert f"{int(remembered)} of {int(prompt)} tokens came from memory" in text


def a_fork_is_a_point_to_return_to(terminal):
    type_line(terminal, "/fork here", "/load here returns to this point")
    type_line(terminal, "/fork here", "there is a conversation here already")
    terminal.type("import re")
    cost(terminal)
    type_line(terminal, "/load here", "loaded here: 2 turns")
    type_line(terminal, "/rewind 3", "3 turns cannot be discarded; there are 2")
    type_line(terminal, "/delete here", "/delete here")


def a_system_prompt_begins_a_conversation(terminal):
    """The first one comes from the command line."""
    type_line(terminal, "/system", "Answer in Python.")
    type_line(terminal, "/clear", "with the system prompt: Answer in Python.")
    terminal.type("import os")
    prompt = cost(terminal)[-1]
    type_line(terminal, "/system Answer briefly and in words.", "with the system prompt: Answer briefly and in words.")
    type_line(terminal, "/system", "Answer briefly and in words.")
    terminal.type("import os")
    longer = cost(terminal)[-1]
    assert longer > prompt
    type_line(terminal, "/save spoken", r"saved as spoken: 1 turn, \d+ tokens")
    type_line(terminal, "/clear", "with the system prompt: Answer briefly")
    terminal.type("import os")
    assert cost(terminal)[-1] == longer
    type_line(terminal, "/system Another.", "Another")
    type_line(terminal, "/load spoken", r"loaded spoken: 1 turn, \d+ tokens; it ends: ")
    type_line(terminal, "/system", "Answer briefly and in words.")
    type_line(terminal, "/delete spoken", "deleted")


def ctrl_c_ends_an_answer_and_not_the_conversation(terminal):
    type_line(terminal, "/set max_tokens 4000", "max_tokens 4000")
    type_line(terminal, "/set ignore_eos true", "ignore_eos true")
    terminal.type("class A:")
    terminal.until(r"class A:[^\n]*\n(?s:.{80})")  # longer than a redrawn prompt, so it is a completion
    terminal.press("\x03")
    terminal.until("interrupted; what has come of the answer is kept")
    assert 0 < cost(terminal)[0] < 4000
    type_line(terminal, "/set max_tokens 3", "max_tokens 3")
    terminal.type("import os")
    tokens, _, _, remembered, prompt = cost(terminal)
    assert tokens == 3
    assert 0 < remembered < prompt
    terminal.press("\x03")  # at the prompt it only clears the line
    type_line(terminal, "/rewind 17", "17 turns cannot be discarded; there are 3")


def test_an_unwritable_home_disables_only_the_history(tmp_path, monkeypatch):
    (tmp_path / "state").write_text("this is no directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ran = kvcellar(*WORDS, typed="import os\r/bye\r")
    assert ran.code == 0
    assert "not saved for the next chat" in ran.err
    assert re.search(COST, ran.out)


def test_a_full_disk_disables_only_the_history(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("prompt_toolkit.history.FileHistory.store_string", no_space)
    ran = kvcellar(*WORDS, typed="import os\rimport re\r/bye\r")
    assert ran.code == 0
    assert ran.err.count("kvcellar/history: No space left on device") == 1


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_conversation_is_continued_by_name_in_a_later_chat(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = kvcellar(*WORDS, typed="def main():\rimport os\r/save talk\r/clear\rimport re\r/save other\r/bye\r")
    assert first.code == 0
    longest = max(int(found[-1]) for found in re.findall(COST, first.out))
    second = kvcellar(*WORDS, typed="/list\r/load talk\rimport sys\r/delete other\r/list\r/bye\r")
    assert second.code == 0
    for told, ran in (("saved as talk: 2 turns", first), ("loaded talk: 2 turns", second), ("deleted other", second)):
        assert f"  {told}" in ran.out
    assert [
        line.split(",")[0].strip()
        for line in second.out.splitlines()
        if re.fullmatch(r"  \w+: \d+ turns?, \d+ tokens?", line.strip("\r"))
    ] == [
        "other: 1 turn",
        "talk: 2 turns",
        "talk: 2 turns",
    ]
    (cost,) = re.findall(COST, second.out)
    assert int(cost[-1]) > longest, "the prompt has all that was said"
    raw = kvcellar(*WORDS, "--raw", typed="/load talk\r/bye\r")
    assert "talk is a chat, and this is not" in raw.err
    without = kvcellar(*WORDS, "--no-store", typed="/load talk\r/bye\r")
    assert "there is no conversation talk" in without.err


def test_a_single_prompt_writes_no_store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert kvcellar(*WORDS, "embedded", "import os").code == 0
    assert not list(tmp_path.rglob("store"))


@pytest.mark.parametrize(("name", "attends"), [("llama", "cpu|sdpa"), ("bloom", "the model itself")])
def test_show_prints_the_attention_backend(tmp_path, monkeypatch, name, attends):
    ARCHS[name].build().save_pretrained(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ran = kvcellar("run", str(tmp_path), "--ids", "--cache-bytes", "1M", "--threads", "1", typed="/show\r/bye\r")
    assert re.search(rf" 0 of \d+ cells in use, attention by ({attends})\n", ran.out)


@pytest.mark.parametrize("last", ["/bye\r", "/exit\r", "\x04"])
def test_commands_that_end_the_chat(tmp_path, monkeypatch, last):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ran = kvcellar(*WORDS, "--raw", "--quiet", typed="   \x15\r" + last)
    assert (ran.code, ran.err) == (0, "")
    assert "a completion model" in ran.out


def test_the_chat_ends_with_its_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)
    monkeypatch.setattr(Scheduler, "schedule", lambda self: 1 // 0 if self.waiting else ([], []))
    ran = kvcellar(*WORDS, typed="import os\r/show\r")
    assert ran.code == 1
    assert "ZeroDivisionError" in ran.err
    assert "the engine has ended" in ran.err.splitlines()[-1]
