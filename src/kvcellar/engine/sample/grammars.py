"""grammars: the grammars of the constraints of requests for one tokenizer: compiled, kept and copied. No torch.

A constraint is compiled while the thread that submits the request waits, before anything runs, and refused there if it
cannot be honoured. It is tried in another process first (`trial`): what ends that, or takes too long, or too much
memory, is refused as well. Only what went well there, up to the first mask, is compiled in this process, once more: the
library has no way to send a grammar.

The library reads the tokenizer with the interpreter lock held, for half a second and more where the vocabulary is
large, so this is done when the model is loaded (`prepare`), not beside its streams. The other process reads it when the
first constraint arrives: most engines see none.

Always true:
  * `_compiled` has at most `KEPT` grammars, the last used last; they are copied, and never consume a token;
  * a grammar is used again in the namespace that it was compiled for, and nowhere else: the time that it takes would
    tell what others use.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from tokenizers import Tokenizer

from kvcellar.constraint import PARAM, Constraint
from kvcellar.engine.sample.compiler import Compiler, Vocabulary
from kvcellar.engine.sample.compiling import STACK, Turns, on_a_stack
from kvcellar.engine.sample.matcher import Matcher, one_line
from kvcellar.errors import BadRequest
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker

KEPT = 32
SECONDS = 10.0  # until a trial is ended; in this process it then takes about as long


class Grammars:
    """Of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, why_not: str, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        """`why_not` is the reason where there is no tokenizer. `end_ids` end a completion."""
        self._source, self._why_not, self._vocab_size = tokenizer, why_not, vocab_size
        self._end_ids = sorted(end_ids)
        self._read: tuple[Vocabulary, Compiler] | None = None
        self._compiled: OrderedDict[tuple[str, Constraint], Matcher] = OrderedDict()
        self._lock = threading.Lock()  # of what is compiled
        self._reading = threading.Lock()
        self._turns = Turns()
        self._trial = Worker("kvcellar.engine.sample.trial", lambda: self._compiler(PARAM)[0])

    def matcher(self, constraint: Constraint, *, owner: str = "", namespace: str = "") -> Matcher:
        """The state of a completion that has no token yet, for a request of this namespace. Raises `BadRequest` for
        what cannot be honoured, and `Overloaded`; what an `owner` has compiled takes no other's turn. Takes seconds at
        worst."""
        made = self._found(constraint, namespace)
        if made is None:
            with self._turns.turn(owner):
                made = self._found(constraint, namespace) or self._compile(constraint)  # meanwhile, by another thread
                with self._lock:
                    self._compiled[namespace, constraint] = made
                    while len(self._compiled) > KEPT:
                        self._compiled.popitem(last=False)
        return made.copy(owner)

    def prepare(self) -> None:
        """Read the tokenizer. Where there is none that can be used, the first constraint is refused with the reason."""
        with suppress(BadRequest):
            self._compiler(PARAM)

    def close(self) -> None:
        """End the other process. Later constraints that are not kept raise `EngineClosed`."""
        self._trial.close()

    def _found(self, constraint: Constraint, namespace: str) -> Matcher | None:
        with self._lock:
            if (found := self._compiled.get((namespace, constraint))) is not None:
                self._compiled.move_to_end((namespace, constraint))
            return found

    def _compile(self, constraint: Constraint) -> Matcher:
        _, compiler = self._compiler(param := constraint.param)
        try:
            source: str = decode(self._trial.run(constraint, SECONDS), str)
        except JobEnded as ended:
            if ended.late:
                why = f"{param}: it takes more than {SECONDS:.0f} s to compile this; make it simpler"
            else:
                why = f"{param}: this {constraint.kind} ends its compiler, by its depth or its size; make it simpler"
            raise BadRequest(why, param) from None
        return on_a_stack(STACK, lambda: compiler.matcher(constraint, source))

    def _compiler(self, param: str) -> tuple[Vocabulary, Compiler]:
        with self._reading:
            if self._read is None:
                self._read = self._opened(param)
            return self._read

    def _opened(self, param: str) -> tuple[Vocabulary, Compiler]:
        if self._source is None:
            reason = f"this model has no tokenizer, and so no text. The reason: {self._why_not}"
            why = f"{param} needs a tokenizer, and this model has none"
            raise BadRequest(why, param, hint=reason)
        last = max(self._source.get_vocab().values(), default=-1)
        ends = tuple(token for token in self._end_ids if token <= last)
        if not ends:
            why = f"{param} needs an end-of-text token, and this model has none"
            raise BadRequest(why, param)
        vocabulary = Vocabulary(self._source.to_str(), self._vocab_size, ends)
        try:
            return vocabulary, Compiler(vocabulary)
        except ValueError as error:
            why = f"{param} cannot be read in the tokens of this model: {one_line(str(error))}"
            raise BadRequest(why, param) from error

    def check(self) -> None:
        """Assert what is always true."""
        with self._lock:
            assert len(self._compiled) <= KEPT
            assert all(matcher.at_start for matcher in self._compiled.values())
        self._turns.check()
        if self._read is not None:
            self._read[1].check()
