"""compiler: constraints compiled for the vocabulary of one tokenizer, within limits on time and memory. No torch.

A constraint that cannot be honoured is refused: the library says which keyword it does not know, and none is ignored.
The library follows each rule and reference inside the one that names it, however deep that leads, on the stack of its
thread: so what a client wrote is followed in `trial` first, where it can end the process.
"""

import json
import threading
from dataclasses import replace

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax
from msgspec import Struct

from kvcellar.constraint import Constraint
from kvcellar.engine.sample.compiling import on_a_stack
from kvcellar.engine.sample.mask_threads import MOST, MaskThreads
from kvcellar.engine.sample.matcher import WORD_BITS, Grammar, Matcher, one_line
from kvcellar.errors import BadRequest, panics_of

MAX_STATES = 50_000  # of a lexer: 1 to 2 kB each, for each completion
MAX_ROW = 10_000  # items of a parser in one place: an object of 2,000 properties has four for each
MAX_GBNF_BYTES, MAX_GBNF_RULES = 2**16, 400  # converting one takes up to rules times its length
LITTLE = 2**18  # bytes of stack: any thread has as much
WHITESPACE = r" |\n[ \t]{0,32}"  # else a weak model may write whitespace for ever
ANY_OBJECT = '{"type":"object"}'
ANSWER = "answer"  # its name in the grammar around it
# Tokens that are text of a JSON string, by their length in characters at most: where a string may have 7 more, all
# tokens of up to 7 are allowed without a look at each. The library's own lengths are 10 and 30: near the end of each
# bounded string it looks at every token, for milliseconds.
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{IN_STRING}{{1,{most}}}" for most in (*range(1, 11), 16, 30)), f"{IN_STRING}+"]


class Vocabulary(Struct, frozen=True, array_like=True):
    """What is compiled for."""

    tokenizer: str  # `tokenizer.json`
    size: int
    end_ids: tuple[int, ...]  # tokens that end a completion, ascending; at least one


class Compiler:
    """Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Holds the interpreter lock, for half a second and more where the vocabulary is large. Raises `ValueError` for
        a tokenizer that the library cannot read."""
        ends = list(vocabulary.end_ids)
        self._tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=ends, slices=SLICES)
        self._words = -(-vocabulary.size // WORD_BITS)
        self._ends = frozenset(self._tokenizer.eos_tokens)
        self._loose = frozenset(end for end in self._ends if not self._tokenizer.is_special_token(end))
        self._threads = MaskThreads()
        self._executor: LLExecutor | None = None  # made for the first constraint: it has threads
        self._lock = threading.Lock()

    def source_of(self, constraint: Constraint) -> str:
        """The constraint as the library reads it, if it can be honoured. Raises `BadRequest` with the reason. Ends the
        process where the library takes more stack than the thread has, or more than `LITTLE` to free the grammar."""
        if constraint.around:  # it has to be one alone: `answer` is no name in it, and reasoning is no beginning of it
            self.source_of(replace(constraint, around=""))
        source = as_read(constraint)
        made = [self.matcher(constraint, source)]
        on_a_stack(LITTLE, made.clear)
        return source

    def matcher(self, constraint: Constraint, source: str) -> Matcher:
        """Of what `source_of` has returned for this constraint. Raises `BadRequest`."""
        limits = LLParserLimits(max_lexer_states=MAX_STATES, max_items_in_row=MAX_ROW, verbose_errors=False)
        with panics_of("the compiler of grammars"):
            found = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
            if found.is_error():
                raise _refused(constraint, one_line(found.get_error()))
            with self._lock:
                self._executor = executor = self._executor or LLExecutor(MOST)
            shared = (self._tokenizer, self._ends, self._loose, self._words, self._threads, executor)
            made = Matcher(Grammar(found, *shared))
            made.first()
        if made.error is not None:  # a circle of references is met only here
            raise _refused(constraint, f"no answer can begin: {made.error}")
        return made

    def check(self) -> None:
        """Assert what is always true."""
        self._threads.check()


def _refused(constraint: Constraint, reason: str) -> BadRequest:
    beside = " beside reasoning and calls of tools" if constraint.around else ""  # alone, it was compiled before
    what = f"{constraint.param}: this {constraint.kind} cannot be honoured{beside}"
    return BadRequest(f"{what}: {reason}", constraint.param)


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
