"""families: the forms of well-known models, chosen by the text of the chat template: tunes change a template, and keep
the type of their model."""

from collections.abc import Sequence
from dataclasses import replace

from kvcellar.text.replies.form import Body, Channels, Ids, ReplyForm, Section, Tags, Thought

TABLE = "the chat template is that of a known family"

HERMES = Section(
    begin=("<tool_call>\n", "<tool_call>"), body=Body.OBJECT, finish=("\n</tool_call>", "</tool_call>"), apart="\n"
)
QWEN_CODER = Section(
    begin=("<tool_call>\n",),
    body=Body.TAGS,
    lead=("<function=",),
    after_name=(">\n",),
    tags=Tags("<parameter=", (">",), "</parameter>", between="\n"),
    tail=("</function>",),
    finish=("\n</tool_call>",),
)
GLM = Section(
    begin=("<tool_call>",),
    body=Body.TAGS,
    after_name=("\n",),
    ends_name=("<arg_key>", "</tool_call>"),
    tags=Tags("<arg_key>", ("</arg_key>\n<arg_value>", "</arg_key><arg_value>"), "</arg_value>", False, False, "\n"),
    finish=("</tool_call>",),
)
MINIMAX = Section(
    begin=("<minimax:tool_call>\n",),
    body=Body.TAGS,
    lead=('<invoke name="',),
    after_name=('">\n',),
    tags=Tags('<parameter name="', ('">',), "</parameter>", lines=False, between="\n"),
    tail=("</invoke>\n",),
    between="",
    finish=("</minimax:tool_call>",),
)
DSML = Section(
    begin=("<｜DSML｜function_calls>\n",),
    body=Body.TAGS,
    lead=('<｜DSML｜invoke name="',),
    after_name=('">\n',),
    tags=Tags(
        '<｜DSML｜parameter name="',
        ('" string="true">', '" string="false">'),
        "</｜DSML｜parameter>",
        kinds=True,
        lines=False,
        between="\n",
    ),
    tail=("</｜DSML｜invoke>\n",),
    between="",
    finish=("</｜DSML｜function_calls>",),
)
DEEPSEEK_V3 = Section(
    begin=("<｜tool▁calls▁begin｜>",),
    body=Body.ARGUMENTS,
    lead=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    after_name=("\n```json\n",),
    tail=("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    between="\n",
    finish=("<｜tool▁calls▁end｜>",),
)
DEEPSEEK_V31 = Section(
    begin=("<｜tool▁calls▁begin｜>",),
    body=Body.ARGUMENTS,
    lead=("<｜tool▁call▁begin｜>",),
    after_name=("<｜tool▁sep｜>",),
    tail=("<｜tool▁call▁end｜>",),
    between="",
    finish=("<｜tool▁calls▁end｜>",),
)
KIMI = Section(
    begin=("<|tool_calls_section_begin|>",),
    body=Body.ARGUMENTS,
    lead=("<|tool_call_begin|>",),
    after_name=("<|tool_call_argument_begin|>",),
    tail=("<|tool_call_end|>",),
    between="",
    finish=("<|tool_calls_section_end|>",),
)
GEMMA4 = Section(
    begin=("<|tool_call>",),
    body=Body.LOOSE,
    lead=("call:",),
    after_name=("",),
    ends_name=("{",),
    tail=("<tool_call|>",),
    quote='<|"|>',
    apart="",
)
MISTRAL_LIST = Section(
    begin=("[TOOL_CALLS][", "[TOOL_CALLS] ["), body=Body.OBJECT, between=", ", finish=("]",), separator=","
)
MISTRAL_NAMED = Section(begin=("[TOOL_CALLS]",), body=Body.ARGUMENTS, after_name=("[ARGS]",), apart="")
LLAMA_JSON = Section(
    begin=("{",), body=Body.OBJECT, between="; ", separator=";", arguments="parameters", bare=True, apart="; "
)
LLAMA_TAGGED = Section(begin=("<|python_tag|>",), body=Body.OBJECT, between="; ", separator=";", arguments="parameters")
PYTHONIC = Section(begin=("[",), body=Body.PYTHON, bare=True)
PYTHON_TAGGED = Section(begin=("<|python_start|>",), body=Body.PYTHON, finish=("<|python_end|>",))
LFM2 = Section(begin=("<|tool_call_start|>",), body=Body.PYTHON, finish=("<|tool_call_end|>",), apart="")
HARMONY = Channels(
    begin=("<|channel|>", "<|start|>"),
    end="<|message|>",
    call="to=functions.",
    written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    thought=Thought("analysis", "<|end|>"),
    section=Section(begin=("",), body=Body.ARGUMENTS, tail=("<|call|>",)),
)

# Name, texts that the chat template has, and the form. The first that fits is taken.
CALLS: Sequence[tuple[str, Sequence[str], ReplyForm]] = (
    ("harmony", ("<|channel|>", "to=functions."), ReplyForm("harmony", TABLE, channels=HARMONY)),
    ("deepseek_v32", ("｜DSML｜",), ReplyForm("deepseek_v32", TABLE, (DSML,))),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json"), ReplyForm("deepseek_v3", TABLE, (DEEPSEEK_V3,))),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ReplyForm("deepseek_v31", TABLE, (DEEPSEEK_V31,))),
    ("kimi_k2", ("<|tool_calls_section_begin|>",), ReplyForm("kimi_k2", TABLE, (KIMI,), ids=Ids.WRITTEN)),
    ("gemma4", ("<|tool_call>", "call:"), ReplyForm("gemma4", TABLE, (GEMMA4,))),
    ("minimax_m2", ("minimax:tool_call", "<invoke"), ReplyForm("minimax_m2", TABLE, (MINIMAX,))),
    ("glm4_moe", ("<tool_call>", "<arg_key>"), ReplyForm("glm4_moe", TABLE, (GLM,))),
    ("qwen3_coder", ("<tool_call>", "<function="), ReplyForm("qwen3_coder", TABLE, (QWEN_CODER,))),
    ("hermes", ("<tool_call>", "arguments"), ReplyForm("hermes", TABLE, (HERMES,))),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), ReplyForm("mistral", TABLE, (MISTRAL_NAMED,), ids=Ids.SHORT)),
    ("mistral_list", ("[TOOL_CALLS]",), ReplyForm("mistral_list", TABLE, (MISTRAL_LIST,), ids=Ids.SHORT)),
    ("lfm2", ("<|tool_call_start|>",), ReplyForm("lfm2", TABLE, (LFM2,))),
    ("pythonic", ("<|python_start|>", "func_name1("), ReplyForm("pythonic", TABLE, (PYTHONIC, PYTHON_TAGGED))),
    ("pythonic", ("func_name1(",), ReplyForm("pythonic", TABLE, (PYTHONIC,))),
    ("llama3_json", ('"parameters": ', "ipython"), ReplyForm("llama3_json", TABLE, (LLAMA_JSON, LLAMA_TAGGED))),
)

THOUGHTS: Sequence[tuple[str, Thought]] = (
    ("<think>", Thought("<think>", "</think>")),
    ("[THINK]", Thought("[THINK]", "[/THINK]", apart="")),
    ("<|channel>", Thought("<|channel>thought\n", "<channel|>", apart="")),
    ("<seed:think>", Thought("<seed:think>", "</seed:think>")),
    ("<|START_THINKING|>", Thought("<|START_THINKING|>", "<|END_THINKING|>", apart="")),
)


def known(template: str) -> ReplyForm | None:
    """The form of a family whose chat template this is, if it is known."""
    thoughts = tuple(thought for mark, thought in THOUGHTS if mark in template)
    for _, marks, form in CALLS:
        if all(mark in template for mark in marks):
            return replace(form, thoughts=thoughts)
    return ReplyForm("reasoning", TABLE, (), thoughts) if thoughts else None
