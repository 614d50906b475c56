"""images: what the tower of an image takes, and how long a stream waits beside it and beside the decoding of its file.

*Towers*, CPU time of one image on networks with random weights in bfloat16: of `get_image_features` of transformers
with its default attention, of the forward up to the decoder as an engine runs it, whole and in as many slices as there
can be, and of four images in one forward, for each.

*Streams*, in an engine whose tower takes as long as some steps: the longest wait between two tokens, in CPU time of the
process, beside a text of as many tokens as an image has, beside an image in slices, and beside one that is encoded at
once; also beside files that come over HTTP: a PNG of 49 megapixels, and one that declares 3600 of them. Each also of a
stream alone, for as long, in wall and CPU time.
"""

import base64
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from io import BytesIO
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from threading import Event
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.row import Given, Lines, settled
from kvcellar.engine.models.vision import Vision, vision_of
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.events import Delta
from kvcellar.frontend.engine import Engine
from kvcellar.serve import Server, ServeSettings

PLACEHOLDER, END = 0, 1
BATCH = 4  # images in one forward
ROUNDS, REPEATS = 3, 5
FIRST = 120.0  # seconds that the first token may take, and the import of what reads files
TEXT = {"model_type": "llama", "hidden_size": 896, "num_hidden_layers": 12, "num_attention_heads": 14}
TEXT |= {"num_key_value_heads": 2, "intermediate_size": 2304, "vocab_size": 64_000, "max_position_embeddings": 16_384}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


Pair = tuple[float, float]  # milliseconds, of the wall and of the CPU


class Sizes(NamedTuple):
    """Of a tower; `grid`: of how many patches a side the image is, where the network reads any number of them."""

    type: str
    tower: Mapping[str, Any]
    grid: int = 0


def _clip(side: int, patch: int, **sizes: int) -> dict[str, Any]:
    return {"model_type": "clip_vision_model", "image_size": side, "patch_size": patch, **sizes}


_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_QWEN = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16}
_QWEN |= {"out_hidden_size": 896, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304}
TOWERS: Mapping[str, Sizes] = MappingProxyType(
    {
        "CLIP B/32, 224 x 224": Sizes("llava", _clip(224, 32, **_BASE)),
        "Qwen3-VL-2B, 448 x 448": Sizes("qwen3_vl", _QWEN, grid=28),
    }
)
SMALLEST: Mapping[str, Sizes] = MappingProxyType(
    {
        "CLIP": Sizes("llava", _clip(56, 14, **SMALL)),
        "Qwen3-VL": Sizes(
            "qwen3_vl", _QWEN | {"hidden_size": 64, "depth": 18, "intermediate_size": 96, "num_heads": 4}, grid=4
        ),
    }
)


def network(sizes: Sizes, text: Mapping[str, Any]) -> PreTrainedModel:
    """With random weights, in bfloat16."""
    layers = {"vision_feature_layer": -1} if sizes.type == "llava" else {}
    text = dict(text) | ({"model_type": "qwen3_vl_text"} if sizes.type == "qwen3_vl" else {})
    config = AutoConfig.for_model(
        sizes.type, text_config=text, vision_config=dict(sizes.tower), image_token_id=PLACEHOLDER, **layers
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


def image_of(sizes: Sizes) -> tuple[int, dict[str, Tensor]]:
    """How many rows it has, and what a processor makes of it."""
    draw, tower = torch.Generator().manual_seed(1), sizes.tower
    if sizes.grid:
        patches = torch.randn(sizes.grid**2, 3 * 2 * tower["patch_size"] ** 2, generator=draw)
        return sizes.grid**2 // 4, {
            "pixel_values": patches.bfloat16(),
            "image_grid_thw": torch.tensor([[1, sizes.grid, sizes.grid]]),
        }
    side = tower["image_size"]
    pixels = torch.randn(1, 3, side, side, generator=draw)
    return (side // tower["patch_size"]) ** 2, {"pixel_values": pixels.bfloat16()}


# -- towers -----------------------------------------------------------------------------------------------------------


class Took(NamedTuple):
    """CPU milliseconds of an image: of transformers, of ours at once, in slices, and of one of `BATCH` in a forward."""

    theirs: float
    whole: float
    sliced: float
    batched: float
    slices: int


def towers(sizes: Sizes, rounds: int) -> Took:
    small = TEXT | {"num_hidden_layers": 2, "vocab_size": 512}
    theirs: Any = network(sizes, small)
    ours = deepcopy(theirs)
    pack_model(ours)
    vision, (rows, inputs) = vision_of(ours), image_of(sizes)
    assert vision is not None
    ids, several = rows * [PLACEHOLDER], {name: torch.cat(BATCH * [one]) for name, one in inputs.items()}
    apart = BATCH * [*ids, END]  # networks with positions of several axes take images without text between for one
    ways: tuple[Callable[[], object], ...] = (
        lambda: theirs.get_image_features(**inputs),
        lambda: vision.encoding(ids, inputs).run(inf),
        lambda: vision.encode(ids, inputs),
        lambda: vision.encoding(apart, several).run(inf),
    )
    took: list[list[float]] = [[] for _ in ways]
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for way, times in zip(ways, took, strict=True):
                began = time.process_time()
                way()
                times.append(1e3 * (time.process_time() - began))
    a, b, c, d = (median(times[1:]) for times in took)
    return Took(a, b, c, d / BATCH, _slices(vision, ids, inputs))


def _slices(vision: Vision, ids: Sequence[int], inputs: Mapping[str, Tensor]) -> int:
    encoding, count = vision.encoding(ids, inputs), 1
    while encoding.run(0.0) is None:
        count += 1
    return count


# -- streams ----------------------------------------------------------------------------------------------------------


def write_model(folder: Path, sizes: Sizes, text: Mapping[str, Any]) -> None:
    """A Llava with a tokenizer of bytes, and the settings of its processor."""
    network(sizes, text).save_pretrained(folder)
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(["<image>", "</s>", *chars])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<image>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    side, patch = sizes.tower["image_size"], sizes.tower["patch_size"]
    parts = "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "extra_special_tokens": {"image_token": "<image>"},
            "chat_template": "{% for one in messages %}{% for part in one['content'] %}"
            + parts
            + "{% endfor %}{% endfor %}",
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": patch,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


class Stream:
    """A stream of an engine, and when its tokens came."""

    def __init__(self, engine: Engine) -> None:
        self.times: list[tuple[float, float]] = []  # wall and CPU seconds
        begun = Event()

        def deliver(event: object) -> None:
            if isinstance(event, Delta):
                self.times.append((time.perf_counter(), time.process_time()))
                begun.set()

        params = engine.params(max_tokens=1 << 20, temperature=0.0, ignore_eos=True, shift=True)
        self._ticket = engine.submit([5, 6, 7], params, deliver=deliver)
        if not begun.wait(FIRST):
            raise TimeoutError("the stream did not begin")

    def beside(self, act: Callable[[], object]) -> Pair:
        """The longest wait between two tokens while something is done, in wall and CPU milliseconds."""
        first = len(self.times) - 1
        act()
        count = len(self.times)
        while len(self.times) == count:
            time.sleep(0.001)
        waits = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.times[first:])]
        return 1e3 * max(wall for wall, _ in waits), 1e3 * max(cpu for _, cpu in waits)

    def step(self) -> float:
        """CPU milliseconds between two of its last tokens, on the median."""
        return 1e3 * median(b[1] - a[1] for a, b in pairwise(self.times[-100:]))

    def end(self) -> None:
        self._ticket.cancel()


def _median(pairs: Sequence[Pair]) -> Pair:
    return median(wall for wall, _ in pairs), median(cpu for _, cpu in pairs)


def _picture(seed: int, side: int) -> Image.Image:
    return Image.frombytes("RGB", (side, side), bytes((at * (seed + 7)) % 251 for at in range(3 * side * side)))


def _asked(image: object) -> Any:
    return [{"role": "user", "content": [image, "what is it?"]}]


def streams(engine: Engine, side: int, rows: int, repeats: int) -> Iterator[tuple[str, float, float]]:
    """What ran beside a stream, the longest wait, and that wait in steps; in CPU milliseconds."""
    scheduler = engine._built.loop.scheduler
    sliced, seeds = scheduler.between, iter(range(1000))

    def ask() -> None:
        engine.chat(_asked(_picture(next(seeds), side)), max_tokens=1)

    def read() -> None:
        engine.chat(_asked(f"{next(seeds)}: ".ljust(rows, "-")), max_tokens=1)

    ask()  # imports
    stream = Stream(engine)
    try:
        acts = {"alone": lambda: time.sleep(0.5), "a text as long": read, "in slices": ask, "at once": ask}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
        for _ in range(repeats):
            time.sleep(0.5)
            step = stream.step()
            for name, waits in found.items():
                scheduler.between = (lambda: inf) if name == "at once" else sliced
                _, cpu = stream.beside(acts[name])
                waits.append((cpu, cpu / step))
        scheduler.between = sliced
        for name, waits in found.items():
            yield name, median(one for one, _ in waits), median(one for _, one in waits)
    finally:
        stream.end()


def _png(width: int, height: int) -> bytes:
    """A PNG that declares so many pixels, and has the data of few."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1 << 20))),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def files(engine: Engine, side: int, repeats: int) -> Iterator[tuple[str, Pair, Pair, int]]:
    """What came over HTTP beside a stream, the longest wait and that of the stream alone for as long, and the status of
    the answer."""
    large = BytesIO()
    Image.new("RGB", (side, side), (200, 30, 30)).save(large, "PNG")
    stream = Stream(engine)
    try:
        with Server(engine, ServeSettings(port=0)) as server, httpx.Client(base_url=server.url, timeout=FIRST) as http:
            for name, file in (f"{side} x {side}", large.getvalue()), ("60000 x 60000", _png(60_000, 60_000)):
                url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
                status, waits, alone = 0, list[Pair](), list[Pair]()

                def post(body: Any = body) -> None:
                    nonlocal status
                    status = http.post("/v1/chat/completions", json=body).status_code

                for _ in range(repeats):
                    began = time.perf_counter()
                    waits.append(stream.beside(post))
                    seconds = time.perf_counter() - began
                    alone.append(stream.beside(lambda seconds=seconds: time.sleep(seconds)))
                yield name, _median(waits), _median(alone), status
    finally:
        stream.end()


def row(given: Given) -> Lines:
    found: dict[str, Any] = {"towers": {}, "streams": {}, "files": {}}
    rounds, repeats = (1, 1) if given.quick else (ROUNDS, REPEATS)
    for name, sizes in (SMALLEST if given.quick else TOWERS).items():
        took = towers(sizes, rounds)
        yield (
            f"{name:24} {took.theirs:8.1f} ms transformers, {took.whole:8.1f} ours ({took.theirs / took.whole:.2f}x), "
            f"{took.sliced:8.1f} in {took.slices} slices, "
            f"{took.batched:8.1f} of {BATCH} ({took.whole / took.batched:.2f}x)"
        )
        found["towers"][name] = took._asdict()
    sizes = SMALLEST["CLIP"] if given.quick else TOWERS["CLIP B/32, 224 x 224"]
    side, rows = sizes.tower["image_size"], image_of(sizes)[0]
    write_model(given.directory, sizes, TEXT | SMALL | {"num_key_value_heads": 2} if given.quick else TEXT)
    with Engine(given.directory, threads=given.threads, cache_bytes=1 << 30) as engine, settled():
        for name, wait, steps in streams(engine, side, rows, repeats):
            yield f"{name:24} {wait:8.1f} ms of CPU at most, {steps:5.1f} steps"
            found["streams"][name] = {"cpu_ms": wait, "steps": steps}
        for name, wait, alone, status in files(engine, 700 if given.quick else 7000, min(3, repeats)):
            beside = f"{wait[0]:8.1f} ms at most, {wait[1]:8.1f} of CPU"
            yield f"{name:24} {beside}; alone {alone[0]:8.1f} and {alone[1]:8.1f}; {status}"
            found["files"][name] = {"ms": wait, "alone_ms": alone, "status": status}
    return found
