"""Chat templates that read tools, in the ways of the models whose calls are known, and an own tokenizer for them."""

from __future__ import annotations

import tokenizer_kit
from tokenizers import AddedToken

from bminf_lite.text.json_tokenizer import JsonTokenizer

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not (loop.first and tools)) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content is defined and loop.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- message.content }}{% endgeneration %}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and message.content) or (not loop.first) %}
                {{- '\\n' }}
            {%- endif %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- call.name }}
            {{- '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

NOT_THINKING = QWEN.replace("think>", "thought>")
"""For a model whose reasoning has no known form."""

LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- (date | length) ~ system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": function name, "parameters": {}}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {{- ", " if not loop.last else "}}" }}
                {%- endfor %}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_ARGS = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

QWEN3_CODER = """{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n<function>\\n<name>" ~ tool.function.name ~ "</name>\\n" }}
        {{- tool.function.parameters | tojson ~ "\\n</function>" }}
    {%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n<function=example_function_name>\\n</function>\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set text = value | tojson if value is mapping or value is not string else value %}
            {{- '<parameter=' + name + '>\\n' + text + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

DEEPSEEK_V31 = """{{- bos_token }}
{%- if tools %}{{- "## Tools\\n" + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<｜Assistant｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson) }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' + eos_token }}
    {%- else %}
        {{- '<' + message.role + '>' + message.content }}
    {%- endif %}
{%- endfor %}
"""

DEEPSEEK_V3 = DEEPSEEK_V31.replace("'<｜tool▁call▁begin｜>' +", "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' +")
DEEPSEEK_V3 = DEEPSEEK_V3.replace("+ '<｜tool▁sep｜>' + (", "+ '\\n```json\\n' + (").replace(
    "{{- '<｜tool▁call▁end｜>' }}", "{{- '\\n```<｜tool▁call▁end｜>' }}"
)

LLAMA4_PYTHONIC = """{{- bos_token }}
{%- if tools %}
    {{- "Calls are in the format of [func_name1(params_name1=params_value1...), func_name2(params)]\\n" }}
    {{- tools | tojson }}
{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- '[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments | items %}
                {{- name + '=' + (value | tojson) + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ')' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}
"""

NO_TOOLS = """{{- bos_token }}{% for message in messages %}
{% if message.role not in ('user', 'assistant', 'system') %}{{ raise_exception('unknown role') }}{% endif %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

NO_SYSTEM = """{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
<{{ message.role }}>{{ message.content | trim }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def _plain(before: str, call: str, behind: str = "") -> str:
    """A template that differs from others in its calls alone: what is before, of, and behind them."""
    calls = f"{before}{{% for call in message.tool_calls %}}{call}{{% endfor %}}{behind}"
    return (
        "{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        f"{{% if message.tool_calls %}}{calls}{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


ITEMS = "{% for key, value in call.function.arguments.items() %}"
TEXT = "{{ value if value is string else value | tojson }}"
GLM45 = _plain(
    "", "\n<tool_call>{{ call.function.name }}"
    f"{ITEMS}\n<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{TEXT}</arg_value>{{% endfor %}}\n</tool_call>",
)  # fmt: skip
SEED_OSS = _plain(
    "", "<seed:tool_call>\n<function={{ call.function.name }}>\n"
    f"{ITEMS}<parameter={{{{ key }}}}>{TEXT}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>",
)  # fmt: skip
MINIMAX_M2 = _plain(
    "\n<minimax:tool_call>\n", '<invoke name="{{ call.function.name }}">\n'
    f'{ITEMS}<parameter name="{{{{ key }}}}">{TEXT}</parameter>\n{{% endfor %}}</invoke>\n', "</minimax:tool_call>",
)  # fmt: skip
KIMI_K2 = _plain(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
LFM2 = _plain(
    "<|tool_call_start|>[",
    "{{ call.function.name }}("
    f"{ITEMS}{{{{ key }}}}={{{{ value | tojson }}}}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}})"
    "{{ '' if loop.last else ', ' }}",
    "]<|tool_call_end|>",
)
GEMMA4 = _plain(
    "", "<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for key, value in call.function.arguments | dictsort %}{{ key }}:"
    """{{ '<|"|>' + value + '<|"|>' if value is string else value | tojson }}{{ '' if loop.last else ',' }}"""
    "{% endfor %}}<tool_call|>",
)  # fmt: skip

ALL = {
    "hermes": QWEN,
    "glm45": GLM45,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "gemma4": GEMMA4,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3,
    "llama4_pythonic": LLAMA4_PYTHONIC,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "generic": NO_TOOLS,
}
"""By the name of the form in which their models write calls."""

SPECIAL = [
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_start|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
]
TEXTUAL = [
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]


def tokenizer(template: str | None = None) -> JsonTokenizer:
    """A byte-level tokenizer with the marks of all forms: Qwen's are ordinary added tokens, the others special."""
    backend = tokenizer_kit.byte_level()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(token, normalized=False) for token in TEXTUAL])
    return JsonTokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": template} if template else {})
