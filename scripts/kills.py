"""Kill the engines of a server under load, and see whether a client notices.

    python -m scripts.kills [--kills 20] [--fronts 3] [--models embedded,llama,gemma3,lfm2] [--streams 6] [--log FILE]

For each model, `kvcellar serve` answers a mix of requests: greedy and sampled, several outputs, schemas, tools,
conversations, drafts. Their answers are recorded once, without those that are sampled without a seed, of which the
number of tokens is; then the same requests are streamed at random while its engine's
process is ended by SIGKILL and SIGSEGV at random moments, and each answer is compared with the recorded one. Then the
front end is killed: its engine has to end, and what was kept has to be there after the next start. Prints a line of
JSON for each. Random models answer at random; only their bits matter here.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from kvcellar.engine.models import embedded
from tests.text.templates import THINKER

START_SECONDS = 300.0  # until a server must be ready
END_SECONDS = 60.0  # until the engine of a front end that was killed must be gone
PAUSES = (0.0, 6.0)  # seconds after a start until the next kill
NAMES = ("embedded", "llama", "gemma3", "lfm2")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
SCHEMA |= {"required": ["name", "age"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "register", "parameters": SCHEMA, "strict": True}}
THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}
TURNS = "turns"  # in place of messages: what is said in a new conversation, one after the other
PROMPTS = ("def main():", "import os\nimport sys\n", "class Cellar:\n", "for index in range(10):\n    ")


@dataclass
class Storm:
    """What the clients of one server have seen."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    longest: float = 0.0  # seconds between two chunks of a stream
    lock: threading.Lock = field(default_factory=threading.Lock)


def made(name: str, into: Path) -> Path:
    """The directory of the embedded model, or of a small random one, with a chat template that has tools."""
    path = into / name
    shutil.copytree(embedded.path(), path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(THINKER)
    if name == "embedded":
        return path
    import torch
    from transformers import (
        AutoTokenizer,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        Lfm2Config,
        Lfm2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )

    vocabulary = len(AutoTokenizer.from_pretrained(path))
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 256}
    sizes |= {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    match name:
        case "llama":
            network = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=32))
        case "gemma3":
            network = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=32, sliding_window=64))
        case "lfm2":
            kinds = ["conv", "conv", "full_attention"] * 2
            network = Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=kinds))
        case _:
            raise SystemExit(f"no model {name!r}: there are {', '.join(NAMES)}")
    network.save_pretrained(path)
    return path


@contextmanager
def served(model: Path, port: int, log: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "kvcellar", "serve", str(model), "--port", str(port), "--quiet", *options]
    command += ["--config", os.devnull]
    with log.open("ab") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            wait_until_ready(port)
            yield process
        finally:
            process.terminate()


def wait_until_ready(port: int) -> None:
    until = time.monotonic() + START_SECONDS
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
    while True:
        with suppress(openai.APIError):
            client.get("/ready", cast_to=object)
            return
        assert time.monotonic() < until, "the server is not ready"
        time.sleep(0.1)


def engine_of(process: "subprocess.Popen[bytes]") -> int | None:
    """The process of its engine, which another one has forked."""
    server = child_of(process.pid)
    return child_of(server) if server is not None else None


def child_of(process: int) -> int | None:
    found = subprocess.run(["pgrep", "-P", str(process), "-f", "fork_process"], capture_output=True, check=False)
    return int(found.stdout.split()[0]) if found.stdout.strip() else None


def mix(rng: random.Random) -> list[dict[str, Any]]:
    """Requests whose answers depend on nothing else than the request."""
    found: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        more = {"prompt": prompt, "max_tokens": rng.randrange(20, 200)}
        found.append(more | {"temperature": 0.0, "extra_body": {"ignore_eos": True}})
        found.append(more | {"seed": rng.randrange(2**30), "extra_body": {"ignore_eos": True}})
        found.append(more | {"seed": rng.randrange(2**30), "n": 3, "presence_penalty": 0.5})
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        messages = [{"role": "user", "content": prompt}]
        found.append({"messages": messages, "max_tokens": 120, "seed": 5, "extra_body": {"response_format": form}})
        found.append({"messages": messages, "max_tokens": 60, "temperature": 0.0})
        asked = {"tools": [TOOL], "tool_choice": "required", "extra_body": THOUGHTLESS}
        found.append({"messages": messages, "max_tokens": 120, "seed": 6} | asked)
        found.append({TURNS: [prompt, "and then?"], "max_tokens": 40, "seed": 7})
        found.append(more | {"temperature": 1.0, "extra_body": {"ignore_eos": True}})
    return found


def name_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def answered(client: openai.OpenAI, request: Mapping[str, Any], storm: Storm) -> Any:
    """The texts of its streams, and their usage."""
    if TURNS not in request:
        return read(client, request, storm)
    name = f"turns-{uuid.uuid4().hex}"
    client.post(conversations(client), body={"name": name}, cast_to=object)
    options = {key: value for key, value in request.items() if key != TURNS}
    said = ({"messages": [{"role": "user", "content": turn}]} for turn in request[TURNS])
    return [read(client, options | turn | {"extra_body": {"conversation": name}}, storm) for turn in said]


def read(client: openai.OpenAI, request: Mapping[str, Any], storm: Storm) -> Any:
    """The texts of a stream, and its usage; of one that is sampled without a seed, its usage."""
    texts, usage, last = dict[int, str](), None, time.monotonic()
    chat = "messages" in request
    create: Any = client.chat.completions.create if chat else client.completions.create
    for chunk in create(model=name_of(client), stream=True, stream_options={"include_usage": True}, **request):
        now = time.monotonic()
        with storm.lock:
            storm.longest = max(storm.longest, now - last)
        last = now
        for choice in chunk.choices:
            called = "".join(call.function.arguments or "" for call in choice.delta.tool_calls or ()) if chat else ""
            text = (choice.delta.content if chat else choice.text) or ""
            texts[choice.index] = texts.get(choice.index, "") + text + called
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    reproducible = "seed" in request or request.get("temperature") == 0.0
    return (texts, usage) if reproducible else usage


def stream(port: int, known: Sequence[tuple[Mapping[str, Any], Any]], storm: Storm, end: threading.Event) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    rng = random.Random(threading.get_ident())
    while not end.is_set():
        request, wanted = rng.choice(known)
        try:
            found = answered(client, request, storm)
        except (openai.APIError, OSError) as error:
            with storm.lock:
                storm.failed.append(f"{type(error).__name__}: {error}"[:300])
            continue
        with storm.lock:
            storm.answers += 1
            if found != wanted:
                storm.wrong.append(f"{request}: {found} in place of {wanted}"[:1000])


def engines(model: Path, port: int, log: Path, kills: int, streams: int) -> dict[str, Any]:
    """Kill engines, and return what clients saw."""
    rng, storm, end, sent = random.Random(kills), Storm(), threading.Event(), Counter[str]()
    with served(model, port, log, "--no-store", "--draft", "ngram") as process:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        known = [(request, answered(client, request, Storm())) for request in mix(rng)]
        threads = [threading.Thread(target=stream, args=(port, known, storm, end)) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for number in range(kills):
            time.sleep(rng.uniform(*PAUSES))
            how = signal.SIGSEGV if number % 5 == 4 else signal.SIGKILL
            if (engine := engine_of(process)) is not None:
                os.kill(engine, how)
                sent[how.name] += 1
            wait_until_ready(port)
        end.set()
        for thread in threads:
            thread.join()
    report = {"kills": dict(sent), "answers": storm.answers, "wrong": len(storm.wrong), "failed": len(storm.failed)}
    return report | {"longest_pause_s": round(storm.longest, 1), "first": (storm.wrong + storm.failed)[:2]}


def fronts(model: Path, port: int, log: Path, kills: int, into: Path) -> dict[str, Any]:
    """Kill front ends, and return what they left behind."""
    store, orphans, lost, rng = ("--store", str(into / "store")), 0, 0, random.Random(kills)
    for number in range(kills):
        with served(model, port, log, *store) as process:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            if number:
                lost += not kept(client, f"chat-{number - 1}")
            message: Any = [{"role": "user", "content": f"This is {number}"}]
            more: Any = {"conversation": f"chat-{number}"}
            client.post(conversations(client), body={"name": f"chat-{number}"}, cast_to=object)
            client.chat.completions.create(model=name_of(client), messages=message, max_tokens=8, extra_body=more)
            engine = engine_of(process)
            time.sleep(rng.uniform(0.0, 1.0))
            process.kill()
            process.wait()
            orphans += engine is not None and not gone(engine)
    return {"front_kills": kills, "orphans": orphans, "conversations_lost": lost}


def conversations(client: openai.OpenAI) -> str:
    return f"http://{client.base_url.host}:{client.base_url.port}/kvcellar/conversations"


def kept(client: openai.OpenAI, name: str) -> bool:
    with suppress(openai.APIError):
        found: Any = client.get(
            f"http://{client.base_url.host}:{client.base_url.port}/kvcellar/conversations", cast_to=object
        )
        return name in json.dumps(found)
    return False


def gone(process: int) -> bool:
    until = time.monotonic() + END_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(process, 0)
            time.sleep(0.1)
        return False
    return True


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20, help="engines of each model")
    parser.add_argument("--fronts", type=int, default=3, help="front ends of each model")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the servers")
    given = parser.parse_args()
    for name in given.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, port = made(name, Path(folder)), free_port()
            report = engines(path, port, given.log, given.kills, given.streams) | fronts(
                path, port, given.log, given.fronts, Path(folder)
            )
        print(json.dumps({"model": name} | report), flush=True)


if __name__ == "__main__":
    main()
