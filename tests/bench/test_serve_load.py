"""What is counted of a server under load: which steps and tokens belong to the time that counts, and what waits."""

import pytest

from benchmarks.load_client import prompt
from benchmarks.serve_load import SMALLEST, Delivery, Mark, Watch, found, percentile
from kvcellar.errors import KvcellarError
from kvcellar.events import Delta, Finished

MS = 1_000_000


def word(text: str = "w") -> Delta:
    return Delta(0, text, (1,))


def test_the_time_that_counts_is_that_in_which_all_streams_run():
    marked: list[int] = []
    watch = Watch(2, lambda: marked.append(len(watch.steps)))
    for step, streams in enumerate([(0,), (0,), (0, 1), (0, 1), (0, 1)]):
        for stream in streams:
            watch.delivered(stream, word(), step)
    watch.delivered(1, word(), 5)
    watch.delivered(1, Finished(0, "length"), 5)
    watch.delivered(0, word(), 5)
    watch.delivered(0, Finished(0, "length"), 5)
    assert marked == [4, 6]  # from the step after the first one with both, to the one that ends a stream
    assert [mark.step for mark in watch.marks] == marked
    assert watch.steps == sorted(watch.steps)
    assert [[one.step for one in watch.deliveries[stream]] for stream in (0, 1)] == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5]]


def test_a_delivery_without_text_is_none_that_a_client_reads():
    watch = Watch(1, lambda: None)
    watch.delivered(0, word(""), 0)
    watch.delivered(0, word(), 1)
    assert [one.step for one in watch.deliveries[0]] == [1]


def loaded() -> Watch:
    """Two streams with a token in each of four steps, 10 ms apart; the second one's comes a millisecond later."""
    watch = Watch(2, lambda: None)
    watch.steps = [10 * MS * step for step in range(4)]
    for stream in (0, 1):
        watch.deliveries[stream] = [Delivery(begun + stream * MS, step) for step, begun in enumerate(watch.steps)]
    watch.marks = [Mark(10 * MS, 1 * MS, 1), Mark(30 * MS, 17 * MS, 3)]
    return watch


def test_a_token_waits_as_many_steps_as_deliver_before_it_is_read():
    watch = loaded()
    read = [[one.time + MS for one in watch.deliveries[0]], [one.time + 2 * MS for one in watch.deliveries[1]]]
    one = found(SMALLEST, watch, [5 * MS, 7 * MS], read, [MS, 2 * MS, 3 * MS])
    assert (one.steps, one.step_cpu_ms, one.loop_cpu_ms, one.loop_share) == (2, 8.0, 1.0, 0.125)
    assert (one.delay_steps, one.late, one.delay_p50_ms, one.delay_p99_ms) == (0, 0.0, 1.0, 2.0)
    assert one.tokens_per_second == pytest.approx(200)  # four tokens in 20 ms
    assert (one.asked, one.health_p50_ms, one.health_p99_ms) == (3, 2.0, 3.0)
    read[1][0] = 20 * MS  # when the third step delivers
    one = found(SMALLEST, watch, [5 * MS, 7 * MS], read, [MS])
    assert (one.delay_steps, one.late) == (2, 1 / 8)


def test_tokens_that_clients_did_not_read_are_an_error():
    watch = loaded()
    read = [[one.time for one in watch.deliveries[0]], [one.time for one in watch.deliveries[1]][:3]]
    with pytest.raises(KvcellarError, match="stream 1 has 4 tokens, and its client has read 3"):
        found(SMALLEST, watch, [0, 1], read, [1])


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.001, 1), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(share: float, value: int):
    assert percentile(list(range(100, 0, -1)), share) == value


def test_prompts_begin_with_the_number_of_their_stream():
    assert [prompt(number, 4) for number in (0, 7)] == [[0, 0, 1, 2], [7, 0, 1, 2]]
