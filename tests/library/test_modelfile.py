"""Modelfiles are read as Ollama reads them, and what is written reads the same."""

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest
from kvcellar.library.modelfile import MOST_BYTES, Command, Modelfile, ModelfileError, parse
from kvcellar.library.parameters import commands, from_json, parameters

COMMANDS = (
    'command must be one of "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", '
    '"parameter", "message", or "requires"'
)


def read(text: str | bytes) -> list[tuple[str, str]]:
    return [(command.name, command.args) for command in parse(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM foo", [("model", "foo")]),
        ("\n\n  \t\nfrom foo\n\t", [("model", "foo")]),
        ("FROM\tfoo", [("model", "foo")]),
        ("FROM     a b    ", [("model", "a b")]),
        ('FROM "a  b  "', [("model", "a  b  ")]),
        ("# c\n  # d\nFROM foo # bar", [("model", "foo # bar")]),
        ("FROM foo:7b-q4_K_M\nDRAFT ./d", [("model", "foo:7b-q4_K_M"), ("draft", "./d")]),
        ("PARAMETER a  b c\nFROM x", [("a", "b c"), ("model", "x")]),
        ('FROM x\nPARAMETER stop "### U: "', [("model", "x"), ("stop", "### U: ")]),
        ('FROM x\nPARAMETER stop """a\n"""', [("model", "x"), ("stop", "a\n")]),
        ('FROM x\nPARAMETER stop "\n\n"\nSYSTEM y', [("model", "x"), ("stop", "\n\n"), ("system", "y")]),
        ('FROM x\nPARAMETER stop "\\n\\n"', [("model", "x"), ("stop", "\\n\\n")]),
        ("FROM x\nMESSAGE user a: b", [("model", "x"), ("message", "user: a: b")]),
        ('FROM x\nMESSAGE system """\na\n"""\n\t', [("model", "x"), ("message", "system: \na\n")]),
        ('FROM x\nSYSTEM """a "b" c"""', [("model", "x"), ("system", 'a "b" c')]),
        ('FROM x\nSYSTEM """a\nb"""   \nLICENSE y', [("model", "x"), ("system", "a\nb"), ("license", "y")]),
        ('FROM x\nSYSTEM ""\nLICENSE """"""', [("model", "x"), ("system", ""), ("license", "")]),
        ("FROM x\nSYSTEM \nLICENSE y", [("model", "x"), ("system", ""), ("license", "y")]),
        ('FROM x\nSYSTEM "a" b\nc"', [("model", "x"), ("system", 'a" b\nc')]),
        ('FROM x\nSYSTEM """a""""', [("model", "x"), ("system", 'a"')]),
        ("FROM x\nSYSTEM it's 'so'", [("model", "x"), ("system", "it's 'so'")]),
        ("FROM x\r\nSYSTEM y\r\n\r\nPARAMETER a b\r\n", [("model", "x"), ("system", "y"), ("a", "b")]),
        ("FROM x\rSYSTEM y\r", [("model", "x"), ("system", "y")]),
        ("RENDERER r\nPARSER p\nREQUIRES 0.14.0\nADAPTER a\nFROM x",
         [("renderer", "r"), ("parser", "p"), ("requires", "0.14.0"), ("adapter", "a"), ("model", "x")]),
    ],
)  # fmt: skip
def test_what_ollama_reads_is_read(text, expected):
    assert read(text) == expected
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert read(text.encode(encoding)) == expected
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        assert read(mark + text.encode(encoding)) == expected
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("PARAMETER a b", "no FROM line"),
        ("FROM x\nBAD a", f"(line 2): {COMMANDS}"),
        ("FROM x\r\n\r\nBAD a", f"(line 3): {COMMANDS}"),
        ("FROM\n", f"(line 1): {COMMANDS}"),
        ("FROM:x", f"(line 1): {COMMANDS}"),
        ('FROM x\nSYSTEM """a\n\nb"""\nFROMM y', f"(line 5): {COMMANDS}"),
        ("FROM", "(line 1): unexpected EOF: FROM has no value"),
        ("FROM x\nPARAMETER a\n", "(line 2): unexpected EOF: PARAMETER needs a name and a value"),
        ("FROM x\nPARAMETER a-b c", "(line 2): unexpected EOF: PARAMETER needs a name and a value"),
        ("FROM x\nPARAMETER model c", "(line 2): there is no parameter 'model': that is a command"),
        ("FROM x\nMESSAGE user", "(line 2): unexpected EOF: MESSAGE needs a role and a text"),
        ("FROM x\nMESSAGE tool x", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ("FROM x\nMESSAGE User x", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ('FROM x\nSYSTEM """a""\nb', '(line 2): unexpected EOF: the value that begins with """ here does not end'),
        ('FROM x\nSYSTEM "\n\t', '(line 2): unexpected EOF: the value that begins with " here does not end'),
    ],
)
def test_errors_have_their_line(text, message):
    with pytest.raises(ModelfileError) as found:
        parse(text)
    assert str(found.value).startswith(message)
    assert isinstance(found.value, BadRequest)


def test_bytes_that_are_no_text_and_files_that_are_too_long_are_refused():
    with pytest.raises(ModelfileError, match=r"not UTF-8: byte 5"):
        parse(b"FROM \xff")
    with pytest.raises(ModelfileError, match=r"not UTF-16-LE: byte 4"):
        parse(b"\xff\xfeF\x00\x00")
    with pytest.raises(ModelfileError, match=f"{MOST_BYTES} are allowed"):
        parse("FROM x\n" + " " * MOST_BYTES)
    with pytest.raises(ModelfileError, match=f"{MOST_BYTES} are allowed"):
        parse(b" " * (2 * MOST_BYTES + 1))


@pytest.mark.parametrize("text", ['"' * 200_001, "FROM x\nSYSTEM " + '"""' + '" \n' * 100_000, "\n" * 10**6 + "FROM x"])
def test_reading_takes_time_in_proportion_to_the_length(text):
    """A second scan of the rest for each line would take minutes."""
    try:
        parse(text)
    except ModelfileError:
        return


QUOTED = st.text(alphabet='a" \t\n\r#:é\u00a0', max_size=12)
LINES = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(("FROM", "from", "System", "PARAMETER", "PARAMETER x", "MESSAGE user", "message", "#", "", "X")),
    st.sampled_from((" ", "\t", "", "   ")),
    QUOTED | st.builds('"""{}"""'.format, QUOTED) | st.builds('"{}"'.format, QUOTED),
    st.sampled_from(("\n", "\r\n", "\r", "")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, max_size=6).map("".join))
@example('FROM "\n"\nSYSTEM """ " """')
def test_what_is_written_reads_the_same(text):
    try:
        first = parse(text)
    except ModelfileError:
        return
    assert parse(str(first)) == first


@settings(max_examples=100, deadline=None)
@given(QUOTED | st.text(max_size=20))
def test_any_value_is_written_so_that_it_reads_the_same_or_is_refused(value):
    whole = Modelfile((Command("model", "x"), Command("system", value)))
    try:
        text = str(whole)
    except BadRequest:
        text = None
    assert parse(text) == whole if text is not None else '"""' in value


# -- parameters -----------------------------------------------------------------------------------------------------


def values(text: str) -> dict:
    return parameters(parse("FROM x\n" + text).parameters)[0]


def test_names_of_ollama_are_stored_as_ours():
    text = "num_ctx 10,num_predict 5,repeat_penalty 1.1,draft_num_predict 3,top_k 4,seed -1,shift True,stop a,stop b"
    lines = "\n".join(f"PARAMETER {line}" for line in text.split(","))
    stored = {
        "context": 10, "max_tokens": 5, "repetition_penalty": 1.1, "draft_depth": 3, "top_k": 4, "seed": -1,
        "shift": True, "stop": ["a", "b"],
    }  # fmt: skip
    assert values(lines) == stored
    written = Modelfile((Command("model", "x"), *commands(stored)))
    assert parameters(parse(str(written)).parameters)[0] == stored
    assert {"num_ctx", "repeat_penalty"} <= {one.name for one in written.parameters}
    given = {"num_ctx": 10, "stop": ["a", "b"], "temperature": 0.5, "shift": True}
    assert parameters(from_json(given))[0] == {"context": 10, "stop": ["a", "b"], "temperature": 0.5, "shift": True}


def test_the_last_value_counts():
    text = "PARAMETER num_predict 5\nPARAMETER num_predict -1\nPARAMETER top_k 1\nPARAMETER top_k 2"
    assert values(text) == {"max_tokens": None, "top_k": 2}


@pytest.mark.parametrize("value", ["0", "-1", "-9"])
def test_no_drafts_are_a_depth_of_zero(value):
    assert values(f"PARAMETER draft_num_predict {value}") == {"draft_depth": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature hot", "temperature is 'hot'; a number is needed"),
        ("temperature 1_0", "temperature is '1_0'; a number is needed"),
        ("temperature nan", "temperature: temperature must be a finite number from 0 to 100"),
        ("num_ctx 0", "num_ctx: context must be a whole number from 1 to "),
        ("num_ctx 4096.5", "num_ctx is '4096.5'; a whole number is needed"),
        ("num_ctx " + "9" * 30, "a whole number is needed"),
        ("draft_num_predict 65", "draft_num_predict: draft_depth must be a whole number from 0 to 64, not 65"),
        ("repeat_penalty 0", "repeat_penalty: repetition_penalty must be a finite number from 0.01 to 100"),
        ("top_k -2", "top_k: top_k must be a whole number"),
        ("num_predict -3", "num_predict: max_tokens must be a whole number"),
        ("shift maybe", "shift is 'maybe'; true or false is needed"),
        ('stop ""', "stop: stop must be a string of 1 to "),
        ("heat 1", "there is no parameter 'heat'; there are context"),
        ("mirostat 2", "mirostat is not supported, except for 0; remove it"),
        ("tfs_z 0.5", "tfs_z is not supported, except for 1"),
        ("rope_frequency_base 1e6", "rope_frequency_base is not supported; remove it"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(text, message):
    with pytest.raises(ModelfileError, match=r"\(line 3\): ") as found:
        values(f"\nPARAMETER {text}")
    assert message in str(found.value)


def test_what_only_concerns_hardware_is_noted_and_not_stored():
    text = "\n".join(f"PARAMETER {one}" for one in ("num_gpu 99", "use_mmap true", "num_thread 4", "mirostat 0"))
    stored, notes = parameters(parse(f"FROM x\n{text}").parameters)
    assert stored == {}
    assert [note.split()[1] for note in notes] == ["num_gpu", "use_mmap", "num_thread", "mirostat"]


def test_values_of_json_that_are_no_parameters_are_refused():
    for value in (None, {}, [[1]], [None]):
        with pytest.raises(ModelfileError, match="parameter 'stop' is"):
            from_json({"stop": value})


@pytest.mark.parametrize("name", ["model", "message", "system", "adapter", "draft", "license"])
def test_commands_are_no_parameters_of_json(name):
    with pytest.raises(ModelfileError, match=f"there is no parameter '{name}'; there are context, "):
        from_json({name: "x"})


def test_names_of_parameters_are_letters():
    assert set("".join(one.name for one in commands({"context": 1, "max_tokens": 2}))) <= set(
        string.ascii_letters + "_"
    )


def test_a_backslash_in_a_stop_string_is_kept_as_in_ollama_and_noted() -> None:
    found, notes = parameters([Command("stop", r"\n\n"), Command("stop", "\n"), Command("stop", "a\\b")])
    assert found == {"stop": [r"\n\n", "\n", "a\\b"]}
    assert len(notes) == 1
    assert r"PARAMETER stop \n\n has a backslash, which is kept as it is: a Modelfile has no escapes" in notes[0]
