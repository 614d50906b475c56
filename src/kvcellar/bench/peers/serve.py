"""serve: the process of a peer: loads one adapter by its file, and does what lines of JSON on its standard input say.

Run as `PYTHON serve.py ADAPTER OPTIONS`, with the standard library alone. ADAPTER is a file with two functions, or a
function and a class: `library` imports the engine and returns its version, `Peer` makes an `Adapter`. Both take
OPTIONS, which is JSON: `model` (a directory), `precision`, `threads`, `record` (of ours), `cache_bytes`, and the most
that will be wanted: `sequences` at once, the `longest` prompt, and `new` tokens after it; `reuses`: whether prompts go
on from earlier ones. There is one line of JSON when the model is loaded, and one as the reply to each line. CPU seconds
are those of the whole process, all threads together.

    {"do": "open", "prompts": [[ids], ...], "sampled": {...}}   compute the prompts, to the first token of each; tokens
                                              are drawn with this temperature, top_k and top_p; null: greedily
    {"do": "steps", "count": 4}               so many steps, in each of which every sequence gets a token
    {"do": "close"}                           end these sequences; what is cached of their prompts may stay
    {"do": "stream", "texts": [...], "new": 9, "streams": 2, "greedy": true}   so many texts at a time, each to `new`
                                              tokens: counts them, with seconds to first ones and between others (ours)
    {"do": "lead", "tokens": [ids], "over": id}   by how much the most probable next token leads this one (ours only)

What libraries print goes to standard error.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO


class Adapter(Protocol):
    """What `Peer` of an adapter makes from OPTIONS. One that has `lead(tokens, over)` can be the reference."""

    flags: str  # how it was built and computes, as far as it says

    def open(self, prompts: Sequence[Sequence[int]], sampled: Mapping[str, float] | None) -> list[list[int]]:
        """Compute these prompts; returns the tokens of each so far, at least one."""
        ...

    def step(self) -> list[list[int]]:
        """Decode; returns what each sequence got: one token, unless it was ahead of others."""
        ...

    def close(self) -> None: ...


def main(adapter: str, options: str) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library that prints does not write into the replies
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    try:
        module, asked = _module(Path(adapter)), json.loads(options)
        version = module.library(asked)
        imported = {"imported_bytes": _memory()["bytes"], "imported_cpu": time.process_time()}
        peer: Adapter = module.Peer(asked)
        _reply(out, {"version": version, "flags": peer.flags, **imported, **_memory(), "cpu": time.process_time()})
        for line in sys.stdin:
            _reply(out, _done(peer, json.loads(line)))
    except Exception as error:
        _reply(out, {"error": f"{type(error).__name__}: {error}"})
        raise


def _module(file: Path) -> Any:
    """The module in that file, under a name that no library has."""
    spec = importlib.util.spec_from_file_location("adapter_of_a_peer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _reply(out: TextIO, content: dict[str, Any]) -> None:
    out.write(json.dumps(content) + "\n")


def _done(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "open":
        before = _clocks()
        ids = peer.open(request["prompts"], request["sampled"])
        return {"ids": ids, **_since(before)}
    if request["do"] == "steps":
        ids, took = list[list[list[int]]](), list[dict[str, float]]()
        for _ in range(request["count"]):
            before = _clocks()
            ids.append(peer.step())
            took.append(_since(before))
        return {"ids": ids, "cpu": [one["cpu"] for one in took], "wall": [one["wall"] for one in took]}
    if request["do"] == "stream":
        before = _clocks()
        return {**peer.stream(request), **_since(before)}
    if request["do"] == "lead":
        return {"lead": peer.lead(request["tokens"], request["over"])}
    peer.close()
    return _memory()


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(before: tuple[float, float]) -> dict[str, float]:
    cpu, wall = _clocks()
    return {"cpu": cpu - before[0], "wall": wall - before[1]}


def _memory() -> dict[str, int]:
    """Bytes of this process in memory, files that it has mapped included; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {"bytes": 0}
    return {"bytes": 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)}


if __name__ == "__main__":
    main(*sys.argv[1:])
