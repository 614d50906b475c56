"""Text to ids: a byte-level BPE, and the flat token streams that windows are drawn from.

Always true:
  * every byte is a token, so any text survives encode and decode;
  * no token holds a newline and anything else, so text that ends in a newline keeps its tokens whatever follows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>")
# a newline alone: a piece that swallowed the indent behind it could never continue a prompt that ends in a newline
PATTERN = r"\n| ?_*[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+| +|\s"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[BOS]} $A",
        pair=f"{SPECIALS[BOS]} $A {SPECIALS[BOS]} $B",
        special_tokens=[(SPECIALS[BOS], BOS)],
    )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def encode_files(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Each file as BOS, its tokens, EOS; all files in one row. -> [N] int32"""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids += [BOS, *encoding.ids, EOS]
    return torch.tensor(ids, dtype=torch.int32)


def column_zero(tokenizer: Tokenizer, stream: Tensor) -> Tensor:
    """Where a line begins at column 0: a newline or BOS before, neither space nor newline there. -> [M] int64"""
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
    ends = torch.tensor([text == "\n" for text in texts])
    ends[BOS] = True
    begins = torch.tensor([not text.startswith((" ", "\n")) for text in texts])
    begins[[PAD, BOS, EOS]] = False
    here = stream.long()
    return 1 + (ends[here[:-1]] & begins[here[1:]]).nonzero().flatten()


@dataclass(frozen=True, slots=True)
class Pool:
    """A stream of tokens, and the places in it where a window may begin behind a BOS."""

    stream: Tensor  # [N] int32
    starts: Tensor  # [M] int64

    def draw(self, length: int, generator: torch.Generator) -> Tensor:
        """A window; half of them begin with BOS and a line at column 0, half anywhere. -> [length] int64"""
        at_line = bool(torch.rand((), generator=generator) < 0.5)
        last = len(self.stream) - length
        if at_line:
            usable = self.starts[: int(torch.searchsorted(self.starts, last + 1))]
            at = int(usable[torch.randint(len(usable), (), generator=generator)])
            return torch.cat([torch.tensor([BOS]), self.stream[at : at + length - 1].long()])
        at = int(torch.randint(last + 1, (), generator=generator))
        return self.stream[at : at + length].long()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Pools with the share of windows that each gives."""

    pools: tuple[Pool, ...]
    shares: tuple[float, ...]

    def batch(self, rows: int, length: int, seed: int) -> Tensor:
        """The windows of one step; the seed alone decides them, so a resumed run sees the same. -> [rows, length]"""
        generator = torch.Generator().manual_seed(seed)
        picks = torch.multinomial(torch.tensor(self.shares), rows, replacement=True, generator=generator)
        return torch.stack([self.pools[int(pick)].draw(length, generator) for pick in picks])
