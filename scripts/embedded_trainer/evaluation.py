"""Evaluates the trained model: loss on held-out text, and properties of sampled text."""

import ast
import itertools
import lzma
import math
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from .corpus import Corpus
from .network import Network, Shape, Weights
from .prepare import Prepared
from .tokens import BOS, EOS
from .training import held_out_nats

PROMPTS = (
    "def read_config(path):\n",
    "class Stack:\n",
    "import os\nimport sys\n\n",
    "for i in range(10):\n",
    "class HTTPClient(object):\n    def connect(self, host, port):\n",
)
SAMPLE_TOKENS = 72
SIGNATURE_TOKENS = 96  # of context before a held-out function's body
SIGNATURES = 48
BODY_TOKENS = 128
SETTINGS = ((0.0, 1.0), (0.0, 1.1), (0.6, 1.0), (0.8, 1.0), (0.8, 1.1))  # temperature, repetition penalty
SPREAD_TOKENS = 80 * 1024  # of held-out text, in windows of several lengths


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Loss on one pool of held-out files, all of it."""

    nats: float  # per token
    bits_per_byte: float
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    temperature: float  # 0: greedy
    text: str


@dataclass(frozen=True, slots=True)
class Bodies:
    """Results of completing the signatures of held-out functions."""

    temperature: float
    penalty: float
    count: int
    parses: int  # the body ended and the function is Python
    loops: int  # the text ends in a repeated phrase


def held_out(network: Network, weights: Weights, prepared: Prepared, name: str) -> HeldOut:
    """Over windows of the network's length that tile the pool; the tail shorter than a window is counted as average."""
    stream, size = prepared.streams[name], prepared.held_bytes(name)
    nats = held_out_nats(network, weights, stream)
    return HeldOut(round(nats, 4), round(nats * len(stream) / math.log(2) / size, 4), len(stream), size)


def shared_lines(corpus: Corpus) -> float:
    """The share of held-out library lines of 40 characters or more that also stand in a training file."""
    seen = {line.strip() for source in (*corpus.library, *corpus.tests) for line in source.text.splitlines()}
    lines = [line.strip() for source in corpus.held_library for line in source.text.splitlines()]
    long = [line for line in lines if len(line) >= 40]
    return sum(line in seen for line in long) / max(1, len(long))


def xz_bits_per_byte(corpus: Corpus) -> float:
    """What xz, primed with the training text, needs for the held-out library files."""
    train = "\n".join(source.text for source in (*corpus.tests, *corpus.library)).encode()
    held = "\n".join(source.text for source in corpus.held_library).encode()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    alone, both = (len(lzma.compress(text, filters=filters)) for text in (train, train + held))
    return 8 * (both - alone) / max(1, len(held))


def measure(shape: Shape, masters: Weights, prepared: Prepared, corpus: Corpus) -> dict[str, Any]:
    """Losses in bfloat16, as the weights are shipped, over windows of 1024."""
    weights = {name: weight.bfloat16() for name, weight in masters.items()}
    network = Network(shape, 1024, torch.bfloat16)
    found: dict[str, Any] = {
        "library": asdict(held_out(network, weights, prepared, "held_library")),
        "trained_library_nats": round(held_out_nats(network, weights, prepared.streams["library"], most=100), 4),
        "shared_lines": round(shared_lines(corpus), 4),
        "xz_bits_per_byte": round(xz_bits_per_byte(corpus), 4),
        "by_window": {},
    }
    if len(prepared.streams["held_tests"]) > 1024:
        found["tests"] = asdict(held_out(network, weights, prepared, "held_tests"))
    for length in (256, 1024, 2048, 4096):
        longer, most = Network(shape, length, torch.bfloat16), SPREAD_TOKENS // length
        nats = held_out_nats(longer, weights, prepared.streams["held_library"], most=most)
        found["by_window"][str(length)] = round(nats, 4)
    return found


def loops(ids: list[int]) -> bool:
    """Whether the last 48 tokens are one phrase of at most 16, repeated."""
    tail = ids[-48:]
    return len(tail) == 48 and any(tail[p:] == tail[:-p] for p in range(1, 17))


def parses(prefix: str, continued: str) -> bool:
    """Whether the function whose `def` line ends `prefix` is finished by `continued`, and is Python."""
    head = prefix.rstrip("\n").splitlines()[-1]
    indent = len(head) - len(head.lstrip())
    body: list[str] = []
    for line in continued.split("\n"):
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        body.append(line)
    else:
        return False
    try:
        ast.parse(textwrap.dedent("\n".join([head, *body])))
    except (SyntaxError, ValueError):
        return False
    return True


def signatures(prepared: Prepared) -> Tensor:
    """Contexts that end behind the line of a held-out function's signature. -> [SIGNATURES, SIGNATURE_TOKENS]"""
    stream = prepared.streams["held_library"].long()
    texts = prepared.tokenizer
    newline = texts.token_to_id("Ċ")
    ends = (stream == newline).nonzero().flatten().tolist()
    found = []
    for before, end in itertools.pairwise(ends):
        line = texts.decode(stream[before + 1 : end + 1].tolist()).strip()
        start = end + 1 - SIGNATURE_TOKENS
        inside = start >= 0 and BOS not in stream[start : end + 1]
        if inside and line.startswith("def ") and line.endswith(":") and line.count("(") == line.count(")"):
            found.append(stream[start : end + 1])
    return torch.stack(found[:: max(1, len(found) // SIGNATURES)][:SIGNATURES])


class Speaker:
    """The exported folder in transformers."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model: PreTrainedModel = model.eval()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @torch.no_grad()
    def continued(self, ids: Tensor, tokens: int, temperature: float, penalty: float, *, top_p: float = 0.95) -> Tensor:
        """ids [B,T] -> what follows, [B,<=tokens]; the seed is fixed."""
        set_seed(0)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        out = self.model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            repetition_penalty=penalty,
            **sampling,
        )
        return out[:, ids.shape[1] :]

    def sample(self, prompt: str, temperature: float, penalty: float) -> Sample:
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = self.continued(ids, SAMPLE_TOKENS, temperature, penalty)
        text = cast(str, self.tokenizer.decode(out[0], skip_special_tokens=True))  # one row, so one text
        return Sample(prompt, temperature, text)

    def bodies(self, contexts: Tensor, temperature: float, penalty: float) -> Bodies:
        rows = self.continued(contexts, BODY_TOKENS, temperature, penalty).tolist()
        out = [row[: row.index(EOS)] if EOS in row else row for row in rows]
        prefixes = self.tokenizer.batch_decode(contexts)
        texts = self.tokenizer.batch_decode(out)
        good = sum(parses(prefix, text) for prefix, text in zip(prefixes, texts, strict=True))
        return Bodies(temperature, penalty, len(texts), good, sum(loops(ids) for ids in out))


def listen(folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Samples, unpicked, and how often continuations loop or parse."""
    speaker = Speaker(folder)
    contexts = signatures(prepared)
    return {
        "bodies": [asdict(speaker.bodies(contexts, temperature, p)) for temperature, p in SETTINGS],
        "samples": [
            asdict(speaker.sample(prompt, temperature, 1.0)) for prompt in PROMPTS for temperature in (0.0, 0.8)
        ],
    }
