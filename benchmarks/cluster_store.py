"""cluster_store: the seconds from the end of an answer until another engine, which shares a store with the first one,
has restored what that computed, and given the first token behind it.

Both engines have a process of their own. The other one is asked as soon as the first one has nothing left to write. The
store is a real server, Valkey or Redis, over TCP, or a directory. Networks are the first layers of everyday models,
with random weights and a smaller vocabulary.
"""

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.row import Given, Lines
from kvcellar.bench.hf_baseline import network
from kvcellar.bench.kinds import KINDS, SMALLER
from kvcellar.cli.cluster import free_ports
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.frontend.engine import Engine

MODELS: Mapping[str, str] = MappingProxyType(
    {"full": "qwen3-0.6b", "window": "gemma3-1b", "hybrid": "lfm2-350m", "recurrent": "mamba2"}
)
LAYERS, VOCABULARY = 8, 8192
TOKENS, NEW, TIMES = 1024, 16, 10  # of a prompt, of an answer, and how many
SETTINGS: Mapping[str, Any] = {"threads": 1, "record": "off", "cache_bytes": 1 << 30, "context": 2048, "process": True}
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class Seen(NamedTuple):
    """Of one prompt: seconds until it was written, and until the other engine had restored it and gone on; how many
    tokens were restored, and of how many."""

    written: float
    restored: float
    tokens: int
    of: int


def write_model(name: str, directory: Path, *, quick: bool) -> None:
    smaller = SMALLER if quick else {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    config = {**KINDS[name], **smaller}
    if "layer_types" in config:
        config["layer_types"] = [*config["layer_types"]][: config["num_hidden_layers"]]
    with silence_transformers():
        network(config, torch.bfloat16).save_pretrained(directory)


def seen(model: Path, url: str, times: int, tokens: int) -> list[Seen]:
    draw, found = random.Random(url), list[Seen]()
    with (
        Engine(model, store_remote=url, **SETTINGS) as one,
        Engine(model, store_remote=url, **SETTINGS) as other,
    ):
        for _ in range(times):
            prompt = [draw.randrange(5, 500) for _ in range(tokens)]
            answer = one.generate(prompt, max_tokens=NEW, **GREEDY).token_ids
            ended = time.monotonic()
            while (store := one.stats().store) is not None and store.unwritten:
                time.sleep(0.002)
            written = time.monotonic()
            result = other.generate([*prompt, *answer], max_tokens=1, **GREEDY)
            sources = () if result.recall is None else result.recall.sources
            restored = dict(sources).get("remote", 0)
            found.append(Seen(written - ended, time.monotonic() - ended, restored, tokens + NEW - 1))
    return found


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """The URL of one that has started."""
    assert BINARY is not None
    (port,) = free_ports(1)
    command = [BINARY, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL) as process:
        try:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.01)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


def row(given: Given) -> Lines:
    times, tokens = (2, 256) if given.quick else (TIMES, TOKENS)
    every: dict[str, list[Seen]] = {}
    for kind, name in MODELS.items():
        model = given.directory / kind
        write_model(name, model, quick=given.quick)
        every[f"{kind}, directory"] = seen(model, f"file://{given.directory}/store-{kind}", times, tokens)
        yield line(f"{kind}, directory", every)
        if BINARY is not None:
            with server(given.directory) as url:
                every[f"{kind}, {Path(BINARY).name}"] = seen(model, url, times, tokens)
            yield line(f"{kind}, {Path(BINARY).name}", every)
        shutil.rmtree(model)
    return {where: [one._asdict() for one in found] for where, found in every.items()}


def line(where: str, every: Mapping[str, list[Seen]]) -> str:
    found = every[where]
    seconds = [one.restored for one in found]
    return (
        f"{where:24} restored after {median(seconds):.2f} s, {max(seconds):.2f} at most (written after "
        f"{median(one.written for one in found):.2f}): {min(one.tokens for one in found)} of {found[0].of} tokens"
    )
