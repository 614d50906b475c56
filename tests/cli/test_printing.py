"""What of a prompt came from memory, as a line of characters."""

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cli.printing import COMPUTED, FOUND, RESTORED, picture, recall_lines
from kvcellar.events import Recall


@given(st.data())
def test_a_picture_has_its_width_and_shares_that_are_true_to_a_character(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 10**6))
    matched = data.draw(st.integers(0, prompt))
    restored = data.draw(st.integers(0, matched))
    line = picture(prompt, restored, matched, 40)
    assert len(line) == 40
    assert line == "".join(sorted(line, key=(RESTORED, FOUND, COMPUTED).index))
    for mark, tokens in ((RESTORED, restored), (FOUND, matched - restored), (COMPUTED, prompt - matched)):
        assert (mark in line) == (tokens > 0)
        assert abs(line.count(mark) - 40 * tokens / prompt) <= 3


def test_the_reason_is_the_last_line() -> None:
    recall = Recall(99, 80, 64, (("device", 40), ("disk", 24)), 0.002, "no checkpoint", "the last one is at 64")
    assert list(recall_lines(100, asdict(recall)))[1:] == [
        "█ 64 of 100 tokens came from memory: 40 from device, 24 from disk",
        "▒ 16 more were found, and not used",
        "· 20 were computed",
        "it waited 2.0 ms for tokens to be read back",
        "no checkpoint: the last one is at 64",
    ]
    *_, last = recall_lines(100, asdict(replace(recall, image="message 1, image 2: another image")))
    assert last == "no checkpoint: the last one is at 64; message 1, image 2: another image"
