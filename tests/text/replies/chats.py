"""Chat templates in the forms of the families: how each writes reasoning, content and calls of an assistant."""

_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"


def chat(calls: str, thought: str = "") -> str:
    return (
        f"{_TOOLS}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{thought}{{{{ m.content or '' }}}}{calls}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_KEYS = "{% for k, v in f.arguments | items %}"
_TEXT = "{{ v if v is string else v | tojson }}"

TEMPLATES = {
    "hermes": chat(
        _EACH + '\n<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}",
        _THINK,
    ),
    "qwen3_coder": chat(
        _EACH + "\n<tool_call>\n<function={{ f.name }}>\n" + _KEYS + "<parameter={{ k }}>\n" + _TEXT + "\n</parameter>"
        "\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        _THINK,
    ),
    "glm4_moe": chat(
        _EACH
        + "\n<tool_call>{{ f.name }}\n"
        + _KEYS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + _TEXT
        + "</arg_value>"
        "\n{% endfor %}</tool_call>{% endfor %}",
        _THINK,
    ),
    "minimax_m2": chat(
        "{% if m.tool_calls %}\n<minimax:tool_call>\n"
        + _EACH
        + '<invoke name="{{ f.name }}">\n'
        + _KEYS
        + '<parameter name="{{ k }}">'
        + _TEXT
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
        _THINK,
    ),
    "deepseek_v32": chat(
        "{% if m.tool_calls %}\n\n<｜DSML｜function_calls>\n"
        + _EACH
        + '<｜DSML｜invoke name="{{ f.name }}">\n'
        + _KEYS
        + "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        + _TEXT
        + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}",
        _THINK,
    ),
    "deepseek_v3": chat(
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + _EACH
        + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    ),
    "deepseek_v31": chat(
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + _EACH
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
        _THINK,
    ),
    "kimi_k2": chat(
        "{% if m.tool_calls %}<|tool_calls_section_begin|>"
        + _EACH
        + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    ),
    "mistral": chat(_EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "mistral_list": chat(
        "{% if m.tool_calls %}[TOOL_CALLS][" + _EACH + '{"name": "{{ f.name }}", "arguments": '
        '{{ f.arguments | tojson }}, "id": "abcdefgh{{ loop.index0 }}"}'
        '{{ ", " if not loop.last }}{% endfor %}]{% endif %}'
    ),
    "llama3_json": chat(
        _EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{{ "; " if not loop.last }}'
        "{% endfor %}{# ipython #}"
    ),
    "harmony": _TOOLS
    + (
        "{% for m in messages %}{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|>{% endif %}{% if m.content %}<|start|>{{ m.role }}<|channel|>final<|message|>"
        "{{ m.content }}<|end|>{% endif %}"
        + _EACH
        + "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}"
)
TEMPLATES["pythonic"] = chat("{# [func_name1(a=b)] #}{% if m.tool_calls %}[" + _EACH + _PYTHON + "]{% endif %}")
TEMPLATES["lfm2"] = chat(
    "{% if m.tool_calls %}<|tool_call_start|>[" + _EACH + _PYTHON + "]<|tool_call_end|>{% endif %}"
)
TEMPLATES["gemma4"] = (
    "{% macro val(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v | items %}"
    "{{ k }}:{{ val(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is boolean or v is none or v is number %}"
    "{{ v | tojson }}{% else %}[{% for w in v %}{{ val(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% endif %}{% endmacro %}"
    + chat(
        _EACH + "<|tool_call>call:{{ f.name }}{{ val(f.arguments) }}<tool_call|>{% endfor %}",
        "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}",
    )
)
