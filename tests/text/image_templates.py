"""Templates as models with vision have them, and what their processors make of the text of an image."""

from tests.text.templates import GEMMA3

QWEN_VL = """\
{%- set image_count = namespace(value=0) %}
{%- macro render_content(content) -%}
{%- if content is string %}{{ content }}{%- else %}{%- for item in content %}
{%- if item.type == 'image' or 'image' in item or 'image_url' in item %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in item %}{{ item.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' }}{{ render_content(message.content) }}\
{{ '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}{{ render_content(message.content) }}\
{%- if message.tool_calls %}{%- for call in message.tool_calls %}{{ '<tool_call>' }}\
{{ call.function.name }}{{ call.function.arguments | tojson }}{{ '</tool_call>' }}{%- endfor %}{%- endif %}\
{{ '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAVA = """\
{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

IDEFICS_3 = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

MISTRAL_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- if message['content'] is string %}{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
        {%- else %}{{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' }}{%- endif %}
    {%- elif message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' }}{%- for block in message['content'] %}
            {%- if block['type'] == 'text' %}{{- block['text'] }}
            {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
            {%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}
            {%- endif %}{%- endfor %}{{- '[/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}{{- message['content'] + eos_token }}
        {%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

TEXT_ONLY = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# by model: the template, what it writes for an image, the placeholder, and the text of an image of so many rows
MODELS = {
    "qwen-vl": (QWEN_VL, "<|image_pad|>", "<|image_pad|>", "{rows}"),
    "gemma-3": (GEMMA3, "<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>{rows}<end_of_image>\n\n"),
    "llava": (LLAVA, "<image>", "<image>", "{rows}"),
    "idefics-3": (
        IDEFICS_3,
        "<image>",
        "<image>",
        "<fake_token_around_image><global-img>{rows}<fake_token_around_image>",
    ),
    "mistral-3": (MISTRAL_3, "[IMG]", "[IMG]", "{rows}[IMG_END]"),
    "text only": (TEXT_ONLY, "<image>", "<image>", "{rows}"),
}
CONTROL = (
    *(
        "<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>",
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    ),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "[IMG]", "[IMG_END]"),
)
