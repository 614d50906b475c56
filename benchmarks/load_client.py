"""load_client: the clients of `serve_load`, in a process of their own: streams of completions, connections that ask
/health again and again, and idle ones. Prints when each token arrived, as one line of JSON.

It imports no torch and parses no JSON, so that little of the machine's time is the clients'. Times are those of
`time.monotonic_ns`, which is the same clock in all processes.
"""

import argparse
import asyncio
import json
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence

TEXT = b'"text":"'
LIMIT = 2**20  # bytes of one line
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

Connection = tuple[StreamReader, StreamWriter]


def prompt(stream: int, tokens: int) -> list[int]:
    """The tokens of one stream's prompt; the first one is its number."""
    return [stream, *range(tokens - 1)]


async def stream(connection: Connection, body: bytes) -> list[int]:
    """Send a request, and return when each piece of text arrived."""
    reader, writer = connection
    fields = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields))
    writer.write(head.encode() + b"\r\n\r\n" + body)
    arrivals = list[int]()
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line or b'"error"' in line:
            raise RuntimeError(f"a stream has ended early: {line.decode(errors='replace')!r}")
        at = line.find(TEXT)
        if at >= 0 and line[at + len(TEXT) :][:1] != b'"':
            arrivals.append(time.monotonic_ns())
    await reader.readuntil(b"\r\n0\r\n\r\n")  # the end of the response: then the connection is idle
    return arrivals


async def ask(connection: Connection) -> int:
    """Nanoseconds until /health was answered."""
    reader, writer = connection
    began = time.monotonic_ns()
    writer.write(HEALTH)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"/health was answered with {head.decode(errors='replace')!r}")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return time.monotonic_ns() - began


async def ask_until(ended: asyncio.Event, connections: Sequence[Connection], pause: float) -> list[int]:
    """Ask on one connection after the other, every `pause` seconds, once at least."""
    took = list[int]()
    while not took or not ended.is_set():
        took.append(await ask(connections[len(took) % len(connections)]))
        await asyncio.sleep(pause)
    return took


async def load(given: argparse.Namespace) -> dict[str, object]:
    async with asyncio.timeout(given.seconds):
        opened = [await asyncio.open_connection("127.0.0.1", given.port, limit=LIMIT) for _ in range(given.connections)]
        streaming, others = opened[: given.streams], opened[given.streams :]
        for connection in others:  # each is kept alive after a request
            await ask(connection)
        bodies = [
            json.dumps(
                {
                    "model": given.model,
                    "prompt": prompt(number, given.prompt),
                    "max_tokens": given.tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            for number in range(given.streams)
        ]
        ended = asyncio.Event()
        asked = asyncio.create_task(ask_until(ended, others[: given.asking], given.pause))
        arrivals = await asyncio.gather(*map(stream, streaming, bodies))
        ended.set()
        health = await asked
        for connection in others:  # none was closed meanwhile
            await ask(connection)
        for _, writer in opened:
            writer.close()
    return {"arrivals": arrivals, "health": health}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_client", description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("port", "connections", "streams", "asking", "prompt", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("pause", "seconds"):
        parser.add_argument(f"--{name}", type=float, required=True)
    print(json.dumps(asyncio.run(load(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
