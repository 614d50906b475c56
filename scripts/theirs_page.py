"""docs/transformers.md from what `scripts.theirs` found: each fault once, with the script that shows it.

The scripts stand in scripts/reports. Each opens with what is to be said about the fault, title first, and needs nothing
but torch and transformers. `REPORTS` says what each of them explains; what none explains is listed as it was found.
"""

import ast
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Literal

import torch
import transformers

from kvcellar.models.quiet import quiet

FOLDER = Path(__file__).parent / "reports"
SERVED = Path(__file__).parents[1] / "docs" / "models.md"
WAYS = ("flat", "solo", "refused")

HEAD = """\
# What transformers leaves unequal or unsupported

*Made by `make docs`, with transformers {version} and torch {torch}. Tests run each script where these are
installed, and try a sample of the types again.*

A tiny random network of every causal type, in float32, with transformers alone: its forward, its caches and its
`generate`, which is told what to go on with so that every logit can be compared. kvcellar is not in the way. Counted
as unequal is what differs by more than {bound} of the largest logit in each of {texts} texts; the largest difference is
told. Each fault comes with a script (in `scripts/reports`) that needs torch and transformers alone, with what it
prints, and with how kvcellar serves the same types (from [the page of models](models.md), where *flat* and *solo* mean
that `kvcellar verify` holds).

**{equal} of {all} types are equal in all {checks} checks.**

| | types |
| --- | --- |
{counts}

What was compared:

{names}
"""
KINDS = {
    "wrong": "Wrong, and nobody is told",
    "breaks": "Ends in an error that does not say why",
    "refused": "Not supported, and says so",
    "meant": "Unequal on purpose",
}
Kind = Literal["wrong", "breaks", "refused", "meant"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found: the largest difference, or what was raised, and in which function of transformers."""

    check: str
    gap: float | None
    said: str = ""
    where: str = ""

    def __str__(self) -> str:
        if self.gap is None:
            return f"{self.check}: {self.said}" + (f" ({self.where})" if self.where else "")
        return f"{self.check}: " + (f"off by {self.gap:.0%}" if self.gap < 1e3 else "not the same")


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of a type, in the order of the checks."""

    model_type: str
    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Of which findings a report speaks: those of these checks, of these types, that say this. None means any of them.

    An empty `said` means findings that are unequal and raised nothing.
    """

    checks: str | None = None
    said: str | None = None
    types: str | None = None

    def speaks_of(self, model_type: str, found: Found) -> bool:
        if self.types is not None and model_type not in self.types.split():
            return False
        if self.checks is not None and found.check not in self.checks.split(", "):
            return False
        return self.said is None or (re.search(self.said, found.said) is not None if self.said else not found.said)


@dataclass(frozen=True, slots=True)
class Report:
    """One fault. `ours` is what kvcellar does instead, where there is more to say than how it serves the types."""

    kind: Kind
    claims: tuple[Claim, ...]
    ours: str = ""


PADS_NOT = "It pads no text: sequences stand in one row with their own positions, or are run one by one."
DEEP = "its forward returns no cache|no attribute 'past_key_values'|model_kwargs. are not used"
# In the order of the page. The first that speaks of a finding has it.
REPORTS: Mapping[str, Report] = {
    "roberta_generate": Report(
        "wrong", (Claim("generate without a cache, generate_batch", "", "camembert data2vec-text roberta "
                        "roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"),),
        "It counts positions from behind the row for padding, as their forward does.",
    ),
    "cache_params_turn": Report(
        "wrong", (Claim("a second turn", "", "falcon_mamba mamba mamba2 rwkv"),),
        "Its sessions read what is new alone.",
    ),
    "mamba_two_pieces": Report(
        "wrong", (Claim("two pieces, prefill_chunk_size, a second turn", "", "falcon_mamba jamba mamba zamba"),),
        "It hands the mixers a scan that goes on from the state.",
    ),
    "bamba_positions": Report("wrong", (Claim("two pieces, token by token", "", "bamba"),), "It gives all positions."),
    "minimax_length": Report(
        "wrong",
        (
            Claim("two pieces, token by token, a second turn, left padding", "", "minimax"),
            Claim("two pieces, a second turn", "size of tensor", "minimax"),
        ),
    ),
    "minimax_beams": Report("wrong", (Claim("beams", "", "minimax"),)),
    "moshi_window": Report(
        "wrong", (Claim(None, "", "moshi"),),
        "It follows the mask that the model asks for, and so its forward without a cache.",
    ),
    "gpt_neo_static": Report("wrong", (Claim("static cache", "", "gpt_neo"),), "It gives the model no empty places."),
    "bart_padding": Report(
        "wrong", (Claim("left padding", "", "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus "
                        "plbart trocr whisper"),), PADS_NOT,
    ),
    "git_padding": Report("wrong", (Claim("left padding", "", "git"),), PADS_NOT),
    "llama4_temperature": Report("wrong", (Claim("left padding", "", "llama4_text"),), PADS_NOT),
    "block_padding": Report("wrong", (Claim("left padding", "", "deepseek_v4 minimax_m3_vl_text"),)),
    "no_mask": Report("wrong", (Claim("left padding", "", "rwkv xlstm"),)),
    "recurrent_gemma_state": Report("wrong", (Claim(None, "", "recurrent_gemma"),)),
    "batch_own_attention": Report(
        "wrong", (Claim("generate_batch", "", "big_bird bloom codegen falcon got_ocr2 gpt_neo gpt_neox_japanese gptj "
                        "megatron-bert mpt mvp openai-gpt reformer rembert roformer trocr xglm xlm xlnet"),),
        "Those that it serves it runs one by one, on keys and values gathered in their order.",
    ),
    "batch_positions": Report(
        "wrong", (Claim("generate_batch", "", "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus "
                        "plbart whisper"),),
        "It runs them one by one, so that what they count is right.",
    ),
    "batch_softcap": Report(
        "wrong", (Claim("generate_batch", "", "gemma2 vaultgemma"),),
        "An attention of ours honours every keyword that it is called with, or the model is not run with it.",
    ),
    "batch_twice": Report(
        "wrong", (Claim("generate_batch", "", "diffllama hrm_text"),),
        "It sees that a module attends twice, and runs the model with the attention that it has.",
    ),
    "no_prefix": Report(
        "wrong",
        (
            Claim(None, "", "cpmant prophetnet"),
            Claim(None, None, "cpmant"),
        ),
    ),
    "blt_cache": Report("breaks", (Claim(None, "num_hidden_layers", "blt"),)),
    "bare_cache": Report(
        "breaks", (Claim("DynamicCache()", "IndexError|store_compression_weights|update_index'"),),
        "It reads the layers of a cache off what the model stores.",
    ),
    "batch_shapes": Report(
        "breaks", (
            Claim("generate_batch", "index_copy_"),
            Claim("generate_batch", "answers 0 of|head_dim", "gemma4 gemma4_text gemma4_unified gemma4_unified_text"),
            Claim("generate_batch", "answers 0 of|heads", "rwkv xlstm"),
        ),
        "It reads the shapes of each layer off what the model stores.",
    ),
    "batch_own_mask": Report(
        "breaks", (Claim("generate_batch", "size of tensor", "doge git"),),
        "It runs both with the masks that they make.",
    ),
    "batch_dropped": Report(
        "breaks", (Claim("generate_batch", "without a paged attention cache", "nemotron stablelm"),),
        "Its attention needs no keyword for that.",
    ),
    "deepseek_v4_crop": Report("breaks", (Claim("crop", "size of tensor", "deepseek_v4"),)),
    "no_cache": Report(
        "breaks", (Claim(None, DEEP), Claim("DynamicCache()", "", "openai-gpt reformer xlm")),
    ),
    "own_cache_in_generate": Report("breaks", (Claim("a second turn", "is_compileable"),)),
    "static_cache": Report("breaks", (Claim("static cache", "."),), "It makes no static caches."),
    "xlnet_batch": Report("breaks", (Claim("left padding, beams", "broadcast shape", "xlnet"),)),
    "batch_layers": Report(
        "refused", (Claim("generate_batch", "Invalid layer type"),),
        "Those that it serves flat share a batch, prompts and single tokens mixed.",
    ),
    "stateful_drafts": Report(
        "refused", (Claim("prompt lookup", "stateful models|requires a cache"),),
        "Its memory keeps a step in part on all layers at once, states among them.",
    ),
    "no_crop": Report(
        "refused", (Claim("crop", "not croppable|no crop"),),
        "It goes back to where a state was kept, and reads on from there.",
    ),
    "prefill_chunks": Report(
        "refused", (Claim("prefill_chunk_size", "Cannot use prefill chunking"),), "It reads prompts in pieces."
    ),
    "foreign_cache": Report(
        "refused", (Claim("DynamicCache()", "update_indexer|cache of its own|not subscriptable|rnn_state"),),
    ),
    "beams_refused": Report("refused", (Claim("beams", "cannot use beam search"),)),
    "prophetnet_pieces": Report("refused", (Claim(None, "of length 1", "prophetnet"),)),
    "asks_for_a_blank": Report("meant", (Claim("generate without a cache", "", "xlm xlnet"),)),
}  # fmt: skip


def torch_minor() -> str:
    """Its version as far as the texts of its errors depend on it."""
    return ".".join(torch.__version__.split(".")[:2])


def script(name: str) -> str:
    """The code of a report, without what it says."""
    source = (FOLDER / f"{name}.py").read_text()
    return "\n".join(source.splitlines()[ast.parse(source).body[0].end_lineno :]).strip() + "\n"


def words(name: str) -> tuple[str, str]:
    """Its title, and the rest of what it says."""
    title, _, rest = (ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or "").partition("\n\n")
    return " ".join(title.split()), rest


def prints(name: str) -> str:
    """What its script prints here and now."""
    with quiet(), unheard() as out:
        exec(compile(script(name), name, "exec"), {"__name__": "__report__"})
    return out.getvalue()


@contextmanager
def unheard() -> Iterator[StringIO]:
    """What is printed within the block; some of transformers warns that way. Nor is anything logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()) as out:
            yield out
    finally:
        logging.disable(before)


def sorted_out(rows: Iterable[Row]) -> tuple[dict[str, dict[str, list[Found]]], dict[str, list[Found]]]:
    """By report and type what it speaks of, and by type what none speaks of."""
    reported: dict[str, dict[str, list[Found]]] = {name: {} for name in REPORTS}
    rest: dict[str, list[Found]] = {}
    for row in rows:
        for found in row.found:
            name = next(
                (n for n, r in REPORTS.items() if any(c.speaks_of(row.model_type, found) for c in r.claims)), ""
            )
            (reported[name] if name else rest).setdefault(row.model_type, []).append(found)
    return reported, rest


def render(rows: Sequence[Row], checks: Mapping[str, str], bound: float, texts: int) -> str:
    """The whole page."""
    reported, rest = sorted_out(rows)
    counts = {title: _types(reported, kind) for kind, title in KINDS.items()} | {"Not looked into": set(rest)}
    parts = [
        HEAD.format(
            version=transformers.__version__,
            torch=torch_minor(),
            bound=bound,
            texts=texts,
            equal=sum(not row.found for row in rows),
            all=len(rows),
            checks=len(checks),
            names="\n".join(f"- *{name}* {says}" for name, says in checks.items()),
            counts="\n".join(f"| {title.lower()} | {len(types)} |" for title, types in counts.items()),
        )
    ]
    served = dict(re.findall(r"^\| (\S+) \| (flat|solo|refused) \|", SERVED.read_text(), re.M))
    for kind, title in KINDS.items():
        names = [name for name, types in reported.items() if types and REPORTS[name].kind == kind]
        parts += [f"## {title}\n"] if names else []
        for name in names:
            parts.append(_section(name, reported[name], served))
    if rest:
        parts += ["## Not looked into\n", *(f"- {t}: {'; '.join(map(str, found))}" for t, found in rest.items()), ""]
    return "\n".join(parts).rstrip() + "\n"


def _types(reported: Mapping[str, Mapping[str, object]], kind: Kind) -> set[str]:
    return {model_type for name, types in reported.items() if REPORTS[name].kind == kind for model_type in types}


def _section(name: str, types: Mapping[str, Sequence[Found]], served: Mapping[str, str]) -> str:
    title, rest = words(name)
    seen = {t: ", ".join(_short(found) for found in all_found) for t, all_found in types.items()}
    alike: dict[str, list[str]] = {}
    for model_type, said in seen.items():
        alike.setdefault(said, []).append(model_type)
    lines = [f"- {', '.join(who)}: {said}" for said, who in alike.items()]
    by_way = {way: [t for t in types if served.get(t) == way] for way in WAYS}
    ours = "; ".join(f"{way} {', '.join(who)}" for way, who in by_way.items() if who)
    said = REPORTS[name].ours
    return "\n".join(
        [
            f"### {title.rstrip('.')}\n",
            *([rest, ""] if rest else []),
            *lines,
            "",
            f"```python\n{script(name)}```\n",
            f"prints\n\n```text\n{prints(name)}```\n",
            f"*kvcellar:* {ours}." + (f" {said}" if said else ""),
            "",
        ]
    )


def _short(found: Found) -> str:
    """Without sizes and places: the script shows those."""
    if found.gap is not None:
        return str(found)
    return f"{found.check} ({found.said.partition(':')[0]})"
