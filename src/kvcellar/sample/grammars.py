"""grammars: compiles the constraints of requests for one tokenizer, within limits on time and memory. No torch.

A constraint is compiled while the thread that submits the request waits, before anything runs, and refused there if it
cannot be honoured: the library says which keyword it does not know, and none is ignored.

The library reads the tokenizer with the interpreter lock held, for half a second and more where the vocabulary is
large, so this is done when the model is loaded (`prepare`), not beside its streams.

Always true:
  * `_compiled` has at most `KEPT` grammars, the last used last; they are copied, and never consume a token;
  * a grammar is used again in the namespace that it was compiled for, and nowhere else: the time that it takes would
    tell what others use;
  * what is compiled is at most `MAX_LEVELS` deep.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from kvcellar.errors import BadRequest
from kvcellar.sample.compiling import Compiling
from kvcellar.sample.constraint import PARAM, Constraint
from kvcellar.sample.depth import of_lark, of_schema
from kvcellar.sample.mask_threads import MOST, MaskThreads
from kvcellar.sample.matcher import WORD_BITS, Grammar, Matcher, one_line

KEPT = 32
# Of rules, groups and references on one path (`depth`). The library takes up to 4.3 KiB of stack for each: 9 MiB of the
# 64 that a thread which compiles has (`tests/sample/test_depth.py` measures a quarter of that).
MAX_LEVELS = 2048
MAX_STATES = 50_000  # of a lexer: 1 to 2 kB each, for each completion
MAX_ROW = 10_000  # items of a parser in one place: an object of 2,000 properties has four for each
MAX_GBNF_BYTES, MAX_GBNF_RULES = 2**16, 400  # converting one takes up to rules times its length
WHITESPACE = r" |\n[ \t]{0,32}"  # else a weak model may write whitespace for ever
ANY_OBJECT = '{"type":"object"}'
ANSWER = "answer"  # its name in the grammar around it
# Tokens that are text of a JSON string, by their length in characters at most: where a string may have 7 more, all
# tokens of up to 7 are allowed without a look at each. The library's own lengths are 10 and 30: near the end of each
# bounded string it looks at every token, for milliseconds.
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{IN_STRING}{{1,{most}}}" for most in (*range(1, 11), 16, 30)), f"{IN_STRING}+"]


class ReadTokenizer(Protocol):
    """What is read of a `tokenizers.Tokenizer`."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]: ...
    def to_str(self) -> str: ...


class Grammars:
    """Of one model. Safe to use from several threads."""

    def __init__(
        self, tokenizer: ReadTokenizer | None, why_not: str, *, vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        """`why_not` is the reason where there is no tokenizer. `end_ids` end a completion."""
        self._source, self._why_not, self._vocab_size = tokenizer, why_not, vocab_size
        self._end_ids = sorted(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._ends = self._loose = frozenset[int]()  # tokens that end a completion; those that may be text, too
        self._compiled: OrderedDict[tuple[str, Constraint], Matcher] = OrderedDict()
        self._lock = threading.Lock()  # of what is compiled
        self._reading = threading.Lock()
        self._compiling, self._threads = Compiling(), MaskThreads()
        self._executor: LLExecutor | None = None  # made for the first constraint: it has threads

    def matcher(self, constraint: Constraint, *, owner: str = "", namespace: str = "") -> Matcher:
        """The state of a completion that has no token yet, for a request of this namespace. Raises `BadRequest` for
        what cannot be honoured, and `Overloaded`; what an `owner` has compiled takes no other's turn. Takes seconds at
        worst."""
        made = self._found(constraint, namespace)
        if made is None:

            def compiled() -> Matcher:
                return self._found(constraint, namespace) or self._compile(constraint)  # meanwhile, by another thread

            made = self._compiling.run(owner, constraint.param, compiled)
            with self._lock:
                self._compiled[namespace, constraint] = made
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
        return made.copy(owner)

    def prepare(self) -> None:
        """Read the tokenizer. Where there is none that can be used, the first constraint is refused with the reason."""
        with suppress(BadRequest):
            self._read(PARAM)

    def _found(self, constraint: Constraint, namespace: str) -> Matcher | None:
        with self._lock:
            if (found := self._compiled.get((namespace, constraint))) is not None:
                self._compiled.move_to_end((namespace, constraint))
            return found

    def _compile(self, constraint: Constraint) -> Matcher:
        if constraint.around:  # it has to be one alone: `answer` is no name in it, and reasoning is no beginning of it
            self._compile(replace(constraint, around=""))
        source = as_read(constraint)
        _check_depth(constraint, source)
        tokenizer = self._read(constraint.param)
        limits = LLParserLimits(max_lexer_states=MAX_STATES, max_items_in_row=MAX_ROW, verbose_errors=False)
        found = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if found.is_error():
            raise _refused(constraint, one_line(found.get_error()))
        words = -(-self._vocab_size // WORD_BITS)
        with self._reading:
            self._executor = executor = self._executor or LLExecutor(MOST)
        made = Matcher(Grammar(found, tokenizer, self._ends, self._loose, words, self._threads, executor))
        made.first()
        if made.error is not None:  # a circle of references is met only here
            raise _refused(constraint, f"no answer can begin: {made.error}")
        return made

    def _read(self, param: str) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = self._opened(param)
                self._ends = frozenset(self._tokenizer.eos_tokens)
                self._loose = frozenset(end for end in self._ends if not self._tokenizer.is_special_token(end))
            return self._tokenizer

    def _opened(self, param: str) -> LLTokenizer:
        if self._source is None:
            reason = f"this model has no tokenizer, and so no text. The reason: {self._why_not}"
            why = f"{param} needs a tokenizer, and this model has none"
            raise BadRequest(why, param, hint=reason)
        last = max(self._source.get_vocab().values(), default=-1)
        ends = [token for token in self._end_ids if token <= last]
        if not ends:
            why = f"{param} needs an end-of-text token, and this model has none"
            raise BadRequest(why, param)
        try:
            return LLTokenizer(self._source.to_str(), n_vocab=self._vocab_size, eos_token=ends, slices=SLICES)
        except ValueError as error:
            why = f"{param} cannot be read in the tokens of this model: {one_line(str(error))}"
            raise BadRequest(why, param) from error

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert len(self._compiled) <= KEPT
            assert all(matcher.at_start for matcher in self._compiled.values())
        self._compiling.check()
        self._threads.check()


def _refused(constraint: Constraint, reason: str) -> BadRequest:
    beside = " beside reasoning and calls of tools" if constraint.around else ""  # alone, it was compiled before
    what = f"{constraint.param}: this {constraint.kind} cannot be honoured{beside}"
    return BadRequest(f"{what}: {reason}", constraint.param)


def _check_depth(constraint: Constraint, source: str) -> None:
    """Raise `BadRequest` for a source, as the library reads it, which it would follow too deep."""
    try:
        parts = json.loads(source)["grammars"] if source.lstrip().startswith("{") else [{"lark_grammar": source}]
        levels = sum(of_lark(lark) for one in parts if (lark := one.get("lark_grammar")))
        levels += sum(of_schema(schema) for one in parts if (schema := one.get("json_schema")))
    except ValueError as error:
        raise _refused(constraint, one_line(str(error))) from None
    if levels > MAX_LEVELS:
        raise _refused(
            constraint,
            f"its rules or references lead up to {levels} levels into each other, and {MAX_LEVELS} are allowed; make "
            f"it flatter",
        )


def as_read(constraint: Constraint) -> str:
    """The constraint as the library reads it, with what is around it."""
    found = _inner(constraint)
    if not constraint.around:
        return found
    (inner,) = [{"lark_grammar": found}] if constraint.kind == "grammar" else json.loads(found)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": constraint.around}, {**inner, "name": ANSWER}]})


def _inner(constraint: Constraint) -> str:
    match constraint.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_literal, json.loads(constraint.source))))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(constraint))
        case _:
            schema = constraint.source or ANY_OBJECT
            if constraint.compact:
                return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


def _literal(text: str) -> str:
    """A regular expression that matches just this."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _lark(constraint: Constraint) -> str:
    source = constraint.source
    if is_lark_syntax(source):
        return source
    size, rules = len(source.encode()), source.count("::=")
    if size > MAX_GBNF_BYTES or rules > MAX_GBNF_RULES:
        raise _refused(
            constraint,
            f"in GBNF it may have {MAX_GBNF_RULES} rules and {MAX_GBNF_BYTES} bytes, and it has {rules} and {size}. In "
            f"Lark's notation it may be larger",
        )
    try:
        return any_to_lark(source)
    except RecursionError:
        raise _refused(constraint, "it is nested too deep") from None
    except Exception as error:
        raise _refused(constraint, f"it is neither Lark (no rule `start:`) nor GBNF: {one_line(str(error))}") from error
