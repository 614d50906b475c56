"""draft_fit: whether a draft model fits a target, check by check, each with the reason if not.

A draft model reads and proposes token ids of the target, so an id has to be the same token in both. What it proposes
can never change a text, only its speed: what does not make its proposals worse is allowed, and noted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcellar.engine.models.input_limits import context_of, vocabulary_of
from kvcellar.engine.models.load import Loaded
from kvcellar.errors import DraftRefused, ModelRefused, shown

Check = Callable[[], str]  # returns what it found, or raises `ModelRefused` with the reason and what to do

LEAD = "a\n"  # before each probe: some tokenizers put a space before a text, which is none of its tokens' meaning
PROBES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "def f(x_1, y):\n    return [x_1 ** 2 for _ in range(10)]\n\n\tpass  # 3.14159e-10",
    "  two  spaces,   three    four\u00a0and\u2003others\r\n\r\n",
    "ÀÉÎ naïve café, A\u0301 e\u0308, \ufb01 \u2460 \uff21\uff22\uff23 \u212b",  # forms that normalizers change
    "你好，世界。日本語のテキスト。 한국어 문장",
    "Здравствуй, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "👩‍🔬 👍🏽 🇪🇺 ∀x∈ℝ: x² ≥ 0 → “quotes” — dashes…",
    "1234567890 2026-01-31 0xDEADBEEF 1,000,000.00",
    "UPPER lower CamelCase snake_case kebab-case http://example.org/?a=1&b=2",
)


@dataclass(frozen=True, slots=True)
class DraftFit:
    """What was found about a draft for a target, by check, and the checks that it fails."""

    target: str
    draft: str
    found: Mapping[str, str]
    refused: Mapping[str, str]

    def require(self) -> None:
        """Raise `DraftRefused` unless the draft fits."""
        if self.refused:
            raise DraftRefused(self.draft, self.target, self.found, self.refused)


def draft_fit(target: Loaded, draft: Loaded, more: Mapping[str, Check] = {}) -> DraftFit:
    """Whether a separate draft model fits; `more` are other checks of the target."""
    return placed(outline_fit(target, draft, more), target, draft)


def outline_fit(target: Loaded, draft: Loaded, more: Mapping[str, Check] = {}) -> DraftFit:
    """The checks that need no weights of the draft: all but that of its device."""
    checks: dict[str, Check] = {
        **more,
        "tokenizer": lambda: _tokenizers(target, draft),
        "vocabulary": lambda: _vocabularies(target, draft),
        "end tokens": lambda: _end_tokens(target, draft),
        "size": lambda: _sizes(target, draft),
        "context": lambda: _contexts(target, draft),
    }
    return fit_of(target.name, draft.name, checks)


def placed(fit: DraftFit, target: Loaded, draft: Loaded) -> DraftFit:
    """The same, and the device of a draft whose weights were read."""
    last = fit_of(target.name, draft.name, {"device": lambda: _devices(target, draft)})
    return replace(fit, found={**fit.found, **last.found}, refused={**fit.refused, **last.refused})


def fit_of(target: str, draft: str, checks: Mapping[str, Check]) -> DraftFit:
    """What all checks found, by name."""
    found: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except ModelRefused as error:
            refused[name] = str(error)
    return DraftFit(target, draft, found, refused)


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokenizers(target: Loaded, draft: Loaded) -> str:
    """Every token of the target is the same token of the draft, and both divide texts into the same tokens."""
    if target.text is None or draft.text is None:
        without = target if target.text is None else draft
        return f"not compared: {without.name} has none ({without.without_text}); equal ids must be equal tokens"
    ours, theirs = target.text.tokenizer, draft.text.tokenizer
    missing = _compared(_tokens(ours), _tokens(theirs), set(ours.get_added_tokens_decoder()))
    _compare_texts(ours, theirs)
    note = f"; the draft lacks added tokens of the target ({missing}), and never proposes these" if missing else ""
    return f"the same tokens{note}"


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}


def _compared(ours: Mapping[int, str], theirs: Mapping[int, str], added: set[int]) -> int:
    """How many added tokens of the target the draft does not have. Raises `ModelRefused` for any other difference."""
    other = sorted(token for token, text in ours.items() if theirs.get(token, text) != text)
    if other:
        first = other[0]
        raise ModelRefused(
            f"{len(other)} of the {len(ours)} tokens of the target are others in the draft; token {first} is "
            f"{shown(ours[first])} in the target and {shown(theirs[first])} in the draft. Use a draft of the same "
            f"family, with the same tokenizer"
        )
    missing = sorted(set(ours) - set(theirs))
    if unknown := [token for token in missing if token not in added]:
        raise ModelRefused(
            f"tokens of the target that the draft lacks: {len(unknown)}, the first {shown(ours[unknown[0]])} "
            f"(id {unknown[0]}). Use a draft of the same family, with the same tokenizer"
        )
    return len(missing)


def _compare_texts(ours: Any, theirs: Any) -> None:
    """Merges, normalizers and the like, which have no common form, by what they do with texts."""
    for probe in PROBES:
        if (one := _divided(ours, probe)) != (other := _divided(theirs, probe)):
            raise ModelRefused(
                f"both have the same tokens, but divide texts into others: {shown(probe)} has {len(one)} in the target "
                f"and {len(other)} in the draft. Use a draft that was trained with the tokenizer of the target"
            )


def _divided(tokenizer: Any, probe: str) -> list[int]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(LEAD + probe, add_special_tokens=False).ids[1:]


def _vocabularies(target: Loaded, draft: Loaded) -> str:
    """The draft can read every token that texts of the target have."""
    ours, theirs = vocabulary_of(target.model), vocabulary_of(draft.model)
    if ours == theirs:
        return f"{ours} ids in both"
    if target.text is None or draft.text is None:
        raise ModelRefused(
            f"the target has {ours} token ids and the draft {theirs}, and without both tokenizers it is not known "
            f"which are the same. Use models with the same vocabulary, or directories with a tokenizer"
        )
    named = 1 + max(_tokens(target.text.tokenizer), default=-1)
    if min(named, ours) > theirs:
        raise ModelRefused(
            f"the tokenizer of the target has ids up to {named - 1}, and the draft reads ids up to {theirs - 1}. Use a "
            f"draft of the same family, with all tokens of the target"
        )
    return f"{ours} ids in the target and {theirs} in the draft; all {named} tokens are in both, the others are padding"


def _end_tokens(target: Loaded, draft: Loaded) -> str:
    """Where a draft ends texts with other tokens, it was made for texts of another form."""
    ours, theirs = target.end_ids, draft.end_ids
    if ours and theirs and not ours & theirs:
        raise ModelRefused(
            f"the target ends texts with {_named(target)}, and the draft with {_named(draft)}. Use a draft that was "
            f"trained for texts of the same form (chat or plain), or set eos_token_id in its generation_config.json"
        )
    if ours == theirs:
        return _named(target)
    return f"{_named(target)} in the target, {_named(draft)} in the draft: it proposes an end where it knows the token"


def _named(side: Loaded) -> str:
    """End tokens as ids and, where there is a tokenizer, texts."""
    if not side.end_ids:
        return "none"
    texts = {} if side.text is None else {i: side.text.tokenizer.id_to_token(i) for i in side.end_ids}
    return ", ".join(f"{i} {shown(texts[i])}" if texts.get(i) else str(i) for i in sorted(side.end_ids))


# -- size and place ----------------------------------------------------------------------------------------------------


def _sizes(target: Loaded, draft: Loaded) -> str:
    if draft.parameters >= target.parameters:
        raise ModelRefused(
            f"the draft has {draft.parameters:,} parameters and the target {target.parameters:,}: each draft would "
            f"take as long as a token. Use a smaller model, a tenth of the target or less"
        )
    share = draft.parameters / target.parameters
    return f"{draft.parameters:,} parameters, {share:.1%} of the target's {target.parameters:,}"


def _contexts(target: Loaded, draft: Loaded) -> str:
    ours, theirs = context_of(target.model), context_of(draft.model)
    if theirs >= ours:
        return f"{theirs} tokens"
    return f"{theirs} tokens, fewer than the {ours} of the target: longer texts have no drafts"


def _devices(target: Loaded, draft: Loaded) -> str:
    ours, theirs = target.model.device, draft.model.device
    if ours != theirs:
        raise ModelRefused(f"the target is on {ours} and the draft on {theirs}. Move one of them")
    own, other = (str(side.model.dtype).removeprefix("torch.") for side in (draft, target))
    return f"{own} on {theirs}" if own == other else f"{own} on {theirs}; the target is in {other}"
