"""Small tokenizers of the kinds that models come with, trained on the spot; and a process that runs templates."""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvcellar.text.rendering import Renderer
from kvcellar.text.tokens import TextTokenizer

RENDERER = Renderer()
TEXT = [
    "The cellar is cool and dark; nothing in it is forgotten, and nothing is kept for ever.",
    "Don't ask why the naïve café owner said “no”: 你好，世界! Здравствуй, мир. 👩‍🔬 and 😀 don't mind.",
    "def f(x):\n    return [x ** 2 for x in range(10)]\n\n\tuser assistant system model tool",
] * 3
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]")
CONTROL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def _control() -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in CONTROL]


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(_control())
    made.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("été chaud")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def _fallback_bpe() -> Tokenizer:
    """The model of sentencepiece's BPE: words begin with U+2581, what is not in the vocabulary is bytes."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    learnt.train_from_iterator(TEXT[0], trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(learnt.to_str())["model"]
    written = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    made = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(dict.fromkeys(written))},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.add_special_tokens([AddedToken("<unk>", special=True, normalized=False), *_control()])
    return made


def llama_like() -> Tokenizer:
    """As of Llama 2 and Mistral: the text's first space is put there, and stripped again."""
    made = _fallback_bpe()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def gemma_like() -> Tokenizer:
    """As of Gemma: spaces are kept as they are."""
    made = _fallback_bpe()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def metaspace() -> Tokenizer:
    """As of T5 and newer conversions of Llama 2."""
    made = _fallback_bpe()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return made


def wordpiece() -> Tokenizer:
    """As of BERT."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", *CONTROL]
    made.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=220, special_tokens=special, show_progress=False)
    )
    return made


def suffixed() -> Tokenizer:
    """As of GPT-1 and CLIP: words end with a mark."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder("</w>")
    special = ["<unk>", *CONTROL]
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=special, end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def undecoded() -> Tokenizer:
    """A vocabulary of words, with no decoder at all."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<unk>", "a", "bc", "d"])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def strange() -> Tokenizer:
    """A decoder of which nothing is known until the end."""
    made = gemma_like()
    made.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "b")])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (byte_level, llama_like, gemma_like, metaspace, wordpiece, suffixed, undecoded, strange)
}


@cache
def words(kind: str) -> TextTokenizer:
    made = KINDS[kind]()
    return TextTokenizer(made, end_ids=[made.token_to_id("</s>") or 0])
