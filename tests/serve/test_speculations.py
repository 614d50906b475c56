"""What drafts have done for a request is in its response, in the last chunk of its stream and in its record; without
drafts none of them says anything of drafts."""

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from kvcellar.events import Speculation
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.generation.records import SpeculationFields
from tests.cli.command import kvcellar
from tests.serve.fake_engine import FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, MODEL, chat, chunks_of, completion

ADMIN = "an-admin-key-of-the-server"
FOUND = Speculation(
    rounds=7,
    drafted=20,
    accepted=9,
    tried_at=(6, 5, 3),
    accepted_at=(5, 3, 1),
    depths=((2.5, 4), (3.5, 6)),
    seconds_saved=0.125,
)
RECORD = {
    "rounds": 7,
    "drafted": 20,
    "accepted": 9,
    "tried_at": [6, 5, 3],
    "accepted_at": [5, 3, 1],
    "acceptance_at": [5 / 6, 3 / 5, 1 / 3],
    "depths": [[2.5, 4], [3.5, 6]],
    "seconds_saved": 0.125,
}
DETAILS = {"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 11}


@pytest.fixture(scope="module")
def operated() -> Iterator[tuple[FakeEngine, Server]]:
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    with FakeEngine() as engine, Server(engine, settings) as server:
        yield engine, server


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, completion), (CHAT, chat)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_counts_of_openai_and_of_llama_cpp_and_the_record(http, engine, route, body, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with engine.scripted(speculation=FOUND):
        response = http.post(route, json=body("hello", **options))
    last = chunks_of(response.text)[-1] if stream else response.json()
    assert last["usage"]["completion_tokens_details"] == DETAILS
    timings = last["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"], timings["speculation"]) == (20, 9, [RECORD])
    assert list(RECORD) == list(SpeculationFields.__struct_fields__)


def test_without_drafts_there_is_nothing_of_them(http):
    response = http.post(COMPLETIONS, json=completion("hello")).json()
    assert "completion_tokens_details" not in response["usage"]
    assert not [name for name in response["timings"] if "draft" in name or name == "speculation"]


def test_several_prompts_are_counted_together_and_listed_in_order(http, engine):
    with engine.scripted(speculation=FOUND):
        response = http.post(COMPLETIONS, json=completion(["hello", "you"])).json()
    assert response["timings"]["draft_n"] == 40
    assert response["timings"]["speculation"] == [RECORD, RECORD]
    assert response["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 18


def test_the_client_of_openai_reads_the_counts(server, engine):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client, engine.scripted(speculation=FOUND):
        usage = client.completions.create(model=MODEL, prompt="hello").usage
    details = usage.completion_tokens_details if usage is not None else None
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (9, 11)


def test_the_record_of_a_request_is_printed_by_why(operated, tmp_path):
    engine, server = operated
    file = tmp_path / "admin.txt"
    file.write_text(f"{ADMIN}\n")
    address = ("--url", server.url, "--admin-key-file", str(file))
    none = Speculation(3, 0, 0, (), (), ((0.0, 0),), 0.0)
    printed = {}
    for name, speculation in (("drafts", FOUND), ("plain", none), ("off", None)):
        with engine.scripted(speculation=speculation):
            httpx.post(f"{server.url}{COMPLETIONS}", json=completion("hello"), headers={"x-request-id": name})
        printed[name] = kvcellar("why", name, *address).out
    assert "9 of 20 drafts became tokens, in 7 steps; about 0.125 s saved" in printed["drafts"]
    assert "accepted by position: 83% 60% 33%" in printed["drafts"]
    assert "drafts of a step over time: 2.5 3.5" in printed["drafts"]
    assert "no drafts in 3 steps" in printed["plain"]
    assert "draft" not in printed["off"]
