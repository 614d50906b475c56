"""An engine that says what a test wants: the real one, but its network's opinion is written by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.zeros import put_zeros
from kvcellar import Engine
from kvcellar.frontend.result import Result
from tests.text import made
from tests.zoo import ARCHS

END = "</s>"
SURE = 50.0  # logit of the token that the script wants; all others have 0


class Spoken:
    """`engine` answers every prompt of one token with `script`, then with end-of-text over and over."""

    def __init__(self, folder: Path, kind: str = "byte_level", **settings: Any) -> None:
        tokenizer = made.KINDS[kind]()
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab_size()
        self.end = tokenizer.token_to_id(END)
        model = ARCHS["llama"].build(vocab_size=self.vocab, eos_token_id=self.end, num_hidden_layers=1)
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        self.engine = Engine(folder, **{"threads": 1, "cache_bytes": 16_000_000, **settings})
        self.engine._built.guest.forward = self._forward  # type: ignore[method-assign]
        self.script: list[int] = []

    def _forward(self, memory: Any, plan: Any, ids: list[int], want: list[int]) -> torch.Tensor:
        put_zeros(memory, plan)
        logits = torch.zeros(len(want), self.vocab)
        for row, at in enumerate(want):
            pos = plan.positions[at]
            logits[row, self.script[pos] if pos < len(self.script) else self.end] = SURE
        return logits

    def say(self, script: Sequence[int], **sampling: Any) -> Result:
        self.script = list(script)
        return self.engine.generate([self.first], **{"temperature": 0.0, **sampling})

    @property
    def first(self) -> int:
        """A prompt of one token, which is no text."""
        return self.tokenizer.token_to_id("<s>")

    def bytewise(self, text: str) -> list[int]:
        """One token for every byte: no word and no character is a token of its own."""
        return [self.tokenizer.token_to_id(char) for char in map(ALPHABET.__getitem__, text.encode())]

    def wordwise(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


ALPHABET = _alphabet()  # how byte-level vocabularies write each byte
