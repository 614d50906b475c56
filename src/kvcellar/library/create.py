"""create: makes a model of the library from a Modelfile.

Always true: nothing of the model is visible under its name before all of it is on the disk; a creation that fails or is
killed leaves the name as it was, and its files are removed, at the latest by the next change of the library.

What FROM names in the library is inherited, draft and adapters included: a command of the Modelfile replaces all of its
kind, and PARAMETER those of its name.

TEMPLATE has to be a chat template in Jinja, as models of Hugging Face have.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from kvcellar.errors import BadRequest, KvcellarError, ModelRefused
from kvcellar.library import sources
from kvcellar.library.disk import Staging
from kvcellar.library.library import Library, LibraryModel, check_version, required
from kvcellar.library.manifest import Manifest, Message, Part
from kvcellar.library.modelfile import Command, Modelfile
from kvcellar.library.names import ModelName
from kvcellar.library.parameters import merged, parameters
from kvcellar.library.sources import Source, adapter_files, model_files, module_files, resolved
from kvcellar.library.tools import CASTS, Tools
from kvcellar.progress import report
from kvcellar.text.rendering import ChatEnvironment

# Actions that templates of Go have and those of Jinja cannot have.
_GO = re.compile(
    r"\{\{-?\s*(?:(?:if|range|with|template|block|define|eq|ne|and|or|not|len|index|slice|json|currentDate|toTypeScriptType)"
    r"\s+[.$(\"`]|[.$][A-Za-z_]?|(?:end|else|break|continue)\s*-?\}\}|else\s+if\s|/\*)"
)


def check_template(text: str) -> None:
    """Raise `ModelRefused` with the reason if it cannot be used."""
    if found := _GO.search(text):
        action = text[found.start() : found.start() + 40].split("}}")[0].strip() + " }}"
        raise ModelRefused(
            f"TEMPLATE is a template of Go, as Ollama's are ({action}); chat templates of kvcellar are in Jinja. "
            f"Remove TEMPLATE to use that of the model, or write it in Jinja: "
            f"{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
        )
    try:
        ChatEnvironment().compiled(text)
    except TemplateSyntaxError as error:
        raise ModelRefused(
            f"TEMPLATE is no chat template in Jinja: line {error.lineno} of it: {error.message}"
        ) from error
    except (TemplateError, RecursionError, MemoryError, ValueError) as error:
        raise ModelRefused(f"TEMPLATE is no chat template in Jinja: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Created:
    """The model, and notes on what of the Modelfile is not used."""

    model: LibraryModel
    notes: tuple[str, ...]


def create(
    library: Library,
    name: str,
    modelfile: Modelfile,
    *,
    tools: Tools,
    folders: Sequence[Path] = (),
    given: Mapping[str, Path] | None = None,
    quantize: str | None = None,
    draft_quantize: str | None = None,
) -> Created:
    """Make `name` the model that a Modelfile describes, in place of the one that it was.

    Relative paths are looked up in each of `folders`; without folders, no path is read. `given`: where the files are of
    commands, by name ("model", "adapter"), whose values are no places. Raises `BadRequest`,
    `ModelRefused` and `OSError`, and then the library is as it was.
    """
    target = ModelName.parse(name)
    texts, notes = _texts(modelfile)
    kinds = [_kind(tools, quantize, "quantize"), _kind(tools, draft_quantize, "draft_quantize")]

    def source(command: Command) -> Source:
        path = (given or {}).get(command.name)
        return sources.found(command, library, tools, folders) if path is None else Source(path)

    one = _Creation(source, tools, modelfile, texts)
    one.check_kinds(*kinds)
    try:
        with library.disk.staging() as staging:
            manifest = one.manifest(staging, *kinds)
            report("writing manifest")
            made = library.commit(target, manifest, staging)
    except BaseException:
        with suppress(OSError, KvcellarError):  # the first error is the one to report
            library.collect()
        raise
    return Created(made, tuple(notes))


def _kind(tools: Tools, text: str | None, param: str) -> str | None:
    try:
        return None if text is None else tools.kind(text)
    except BadRequest as error:
        raise BadRequest(error.message, param, hint=error.hint) from error


def _texts(modelfile: Modelfile) -> tuple[Manifest, list[str]]:
    """What of a Modelfile needs no file, as a manifest without any; and notes on what is not used."""
    for name in ("renderer", "parser"):
        if (command := modelfile.last(name)) is not None:
            raise command.error(
                f"{command.keyword} names code that is a part of Ollama. Remove the line: the chat template renders "
                f"conversations"
            )
    found, notes = parameters(modelfile.parameters)
    template, system, requires = (modelfile.last(name) for name in ("template", "system", "requires"))
    if template is not None:
        with _blamed(template):
            check_template(template.args)
    version = None
    if requires is not None:
        with _blamed(requires):
            check_version(version := required(requires.args))
    texts = Manifest(
        model=Part(()),
        parameters=found,
        template=_args(template),
        system=_args(system),
        messages=tuple(Message(*command.args.split(": ", 1)) for command in modelfile.all("message")),
        licenses=tuple(command.args for command in modelfile.all("license")),
        requires=version,
    )
    return texts, notes


def _args(command: Command | None) -> str | None:
    return None if command is None else command.args


@contextmanager
def _blamed(command: Command, before: str = "") -> Generator[None]:
    """Errors in the block get the line of a command."""
    try:
        yield
    except (BadRequest, ModelRefused) as error:
        raise command.error(f"{before}{error}") from error


def _fitting(command: Command) -> AbstractContextManager[None]:
    """Around a check of what a command names."""
    return _blamed(command, f"{command.keyword} {command.args}: ")


class _Creation:
    """One run of `create`. All sources are found before anything is written."""

    def __init__(self, found: Callable[[Command], Source], tools: Tools, modelfile: Modelfile, texts: Manifest) -> None:
        self._tools, self._texts = tools, texts
        for name in ("model", "draft"):
            if len(lines := modelfile.all(name)) > 1:
                raise lines[1].error(f"there is a second {lines[0].keyword}; the first is in line {lines[0].line}")
        self._from = modelfile.all("model")[0]
        self._source = found(self._from)
        self._draft_command = modelfile.last("draft")
        self._draft = self._draft_command and found(self._draft_command)
        self._adapters = [(one, found(one)) for one in modelfile.all("adapter")]
        if self._draft is not None and self._draft.same(self._source):
            draft = modelfile.all("draft")[0]
            raise draft.error(f"DRAFT must not reference the same local path as FROM: {draft.args}")
        self._base = None if self._source.model is None else self._source.model.manifest
        inherited: Mapping[str, Any] = {} if self._base is None else self._base.parameters
        self._parameters = merged(inherited, texts.parameters, modelfile.parameters)

    def check_kinds(self, quantize: str | None, draft_quantize: str | None) -> None:
        """Raise `BadRequest` for a type of weights that cannot be had."""
        if draft_quantize is not None and self._draft is None and (self._base is None or self._base.draft is None):
            raise BadRequest("--draft-quantize requires a DRAFT model", "draft_quantize")
        for kind, source, param in (
            (quantize, self._source, "quantize"),
            (draft_quantize, self._draft or self._source, "draft_quantize"),
        ):
            stored = None if source.model is None else source.model.manifest
            inherited = param == "draft_quantize" and self._draft is None
            has = None if stored is None else stored.draft_quantized if inherited else stored.quantized
            if kind is not None and has is not None and has not in CASTS:
                raise BadRequest(f"its weights are {has} already; quantise the model that it was made from", param)

    def manifest(self, staging: Staging, quantize: str | None, draft_quantize: str | None) -> Manifest:
        """Put all files into the library."""
        old, texts = self._base or Manifest(model=Part(())), self._texts
        for file in old.files.values():
            staging.reuse(file)  # before the checks, which take time: the model may be removed meanwhile
        target = self._directory(self._from, self._source, staging, "model", quantize)
        draft = None
        if self._draft is not None and self._draft_command is not None:
            draft = self._directory(self._draft_command, self._draft, staging, "draft", draft_quantize)
        self._check(target, draft, staging.root)
        made = {"model": self._part(target, staging, quantize)}
        if draft is None and old.draft is not None:
            draft = _Directory(staging.linked("draft", old.draft), part=old.draft)
        if draft is not None:
            made["draft"] = self._part(draft, staging, draft_quantize, draft=True)
        adapters = tuple(_put(staging, source.path, adapter_files(source.path)) for _, source in self._adapters)
        inherited = dict(old.report or {}) if self._draft is None else {**(old.report or {}), "draft": None}
        reports = {**inherited, **{name: one.report for name, one in made.items() if one.report is not None}}
        return Manifest(
            model=made["model"].part,
            draft=made["draft"].part if "draft" in made else None,
            adapters=adapters or old.adapters,
            parameters=self._parameters,
            template=old.template if texts.template is None else texts.template or None,
            system=old.system if texts.system is None else texts.system,
            messages=texts.messages or old.messages,
            licenses=texts.licenses or old.licenses,
            requires=old.requires if texts.requires is None else texts.requires,
            source=self._from.args,
            quantized=quantize or old.quantized,
            draft_quantized=draft_quantize or (old.draft_quantized if self._draft is None else self._drafts_own()),
            report={name: one for name, one in reports.items() if one is not None} or None,
        )

    def _drafts_own(self) -> str | None:
        """What the weights of a draft of the library have been quantized to."""
        return None if self._draft is None or self._draft.model is None else self._draft.model.manifest.quantized

    def _check(self, target: "_Directory", draft: "_Directory | None", library: Path) -> None:
        """Raise `ModelRefused` for what cannot be loaded or does not fit, before anything is copied."""
        report("checking files")
        if target.part is None:
            with _fitting(self._from):
                _check_links(target.path, model_files(target.path), library)
                self._tools.check_model(target.path)
        if draft is not None and self._draft_command is not None:
            with _fitting(self._draft_command):
                if draft.part is None:
                    _check_links(draft.path, model_files(draft.path), library)
                self._tools.check_draft(target.path, draft.path)
        for command, source in self._adapters:
            with _fitting(command):
                _check_links(source.path, adapter_files(source.path), library)
                self._tools.check_adapter(target.path, source.path)

    def _directory(
        self, command: Command, source: Source, staging: Staging, name: str, kind: str | None
    ) -> "_Directory":
        if source.model is not None:
            part = source.model.manifest.model
            return _Directory(staging.linked(name, part), part=part)
        if not source.is_gguf:
            return _Directory(source.path)
        into = staging.folder(f"{name}-gguf")
        report(f"converting {source.path.name}")
        with _fitting(command):
            self._tools.gguf(source.path, into, codes=kind is None)
        return _Directory(into, made=True)

    def _part(self, source: "_Directory", staging: Staging, kind: str | None, *, draft: bool = False) -> "_Made":
        if kind is not None:
            into = staging.folder("draft-quantized" if draft else "model-quantized")
            found = self._tools.quantize(source.path, into, kind, draft=draft)
            part = _put(staging, into, model_files(into), made=True)
            beside = _put(staging, source.path, module_files(source.path))  # they have no weights
            return _Made(Part(tuple(sorted((*part.files, *beside.files), key=lambda file: file.path))), found)
        if source.part is not None:
            return _Made(source.part, None)
        return _Made(_put(staging, source.path, model_files(source.path), made=source.made), None)


@dataclass(frozen=True, slots=True)
class _Directory:
    """A model directory: `part` if its files are blobs, `made` if they are files of the staging itself."""

    path: Path
    part: Part | None = None
    made: bool = False


@dataclass(frozen=True, slots=True)
class _Made:
    """A part, and the report of its quantization."""

    part: Part
    report: Mapping[str, Any] | None


def _put(staging: Staging, directory: Path, names: Iterable[str], *, made: bool = False) -> Part:
    if made:
        return Part(tuple(staging.move(directory / name, name) for name in names))
    return Part(tuple(staging.put(resolved(directory, name, staging.root), name) for name in names))


def _check_links(directory: Path, names: Iterable[str], library: Path) -> None:
    """Before a file is read. Raises as `resolved`, which follows them again when they are copied."""
    for name in names:
        resolved(directory, name, library)
