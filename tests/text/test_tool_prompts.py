"""Conversations with tools become prompts: as in transformers where the template knows tools, in words where not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tool_templates

from bminf_lite.errors import UsageError
from bminf_lite.text.chat_template import ChatTemplate, content_text, template_messages
from bminf_lite.text.prompts import PromptEncoder
from bminf_lite.text.tool_calls import (
    GENERIC,
    HERMES,
    TOOL_FORMATS,
    ArgumentsDelta,
    ToolCallParser,
    find_tool_format,
    generic_instructions,
    generic_messages,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city — now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "The time", "parameters": {}}}
TOOLS = [WEATHER, TIME]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Orléans"}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "How is the weather"}, {"type": "text", "text": "there?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "It said so."},
    {"role": "user", "content": "Thanks"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CASES = {"with tools": (CONVERSATION, TOOLS), "without": ([*CONVERSATION[:2], *CONVERSATION[4:]], None)}


def encoder(template, **options):
    limits = SimpleNamespace(vocab_size=1000, context_length=1000, is_encoder_decoder=False, max_source_length=0)
    prompts = PromptEncoder(None, limits, **options)
    prompts.tokenizer = tool_templates.tokenizer(template)
    return prompts


@pytest.mark.parity
@pytest.mark.parametrize("name", tool_templates.ALL)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"add_generation_prompt": False}])
def test_templates_with_tools_render_as_in_transformers(name, case, variables):
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    reference = fast(
        tokenizer_object=tool_templates.tokenizer()._backend,
        chat_template=tool_templates.ALL[name],
        bos_token="<s>",
        eos_token="</s>",
    )
    messages, tools = CASES[case]
    if name == "generic":
        messages, tools = messages[-1:], None
    messages = [{**m, "content": content_text(m)} for m in template_messages(messages)]
    options = {"add_generation_prompt": True, **variables}
    expected = reference.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    assert ChatTemplate(tool_templates.ALL[name], SPECIAL).render(messages, tools=tools, **options) == expected


@pytest.mark.parametrize("name", tool_templates.ALL)
def test_the_form_of_calls_is_found(name):
    """From the template; and the template writes the form that the parser reads."""
    prompts = encoder(tool_templates.ALL[name])
    form = prompts.tool_format
    assert form is TOOL_FORMATS[name]
    text = prompts.render(template_messages(CONVERSATION[:3]), False, tools=TOOLS)
    answer = text[text.rindex("there?") :]
    start = answer.find(form.begin) if form.begin in answer else re.search(r'{"name"|\[weather', answer).start()
    parser = ToolCallParser(form, ["weather"], {"weather": WEATHER["function"]["parameters"]})
    events = [*parser.push(re.split(r"<\|eot(?:_id)?\|>", answer[start:])[0]), *parser.flush()]
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert events[0].name == "weather" and json.loads(arguments) == {"city": "Orléans"}


def test_forms_of_other_checkpoints():
    def none(text):
        return None

    assert find_tool_format(None, none) is GENERIC
    assert find_tool_format(tool_templates.LLAMA3, lambda text: False) is GENERIC
    assert find_tool_format("{{ messages }} <tool_call>", lambda text: True) is GENERIC


def test_messages_of_the_api_become_those_of_templates():
    found = template_messages(CONVERSATION)
    assert found[1]["content"] == CONVERSATION[1]["content"]
    assert content_text(found[1]) == "How is the weather\nthere?"
    assert found[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Orléans"}
    assert CONVERSATION[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Orléans"}', "not changed"
    odd = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]} for text in ("[", "[]")
    ]
    assert template_messages(odd) == odd
    with pytest.raises(UsageError, match=r"messages\[1\].*image_url.*only text"):
        template_messages([CONVERSATION[0], {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


# -- templates that know no tools -------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_in_words():
    text = encoder(tool_templates.NO_TOOLS).render(template_messages(CONVERSATION), tools=TOOLS)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Orléans"}}\n</tool_call>'
    assert text == (
        f"<s><system>Be brief.\n\n{generic_instructions(TOOLS)}</s>\n<user>How is the weather\nthere?</s>\n"
        f"<assistant>{call}</s>\n<user><tool_response>\nsunny\n</tool_response></s>\n"
        "<assistant>Sunny.</s>\n<user>Thanks</s>\n<assistant>"
    )
    assert json.dumps(WEATHER["function"], ensure_ascii=False) in text


def test_a_template_without_a_system_role_gets_them_in_the_first_message():
    prompts = encoder(tool_templates.NO_SYSTEM)
    text = prompts.render(CONVERSATION[5:], tools=TOOLS)
    assert text == f"<user>{generic_instructions(TOOLS)}\n\nThanks\n<assistant>"
    with pytest.raises(UsageError, match="roles must alternate"):
        prompts.render(CONVERSATION[:1] + CONVERSATION[5:], tools=TOOLS)


def test_results_beside_each_other_are_one_message():
    results = [{"role": "tool", "content": text} for text in "ab"]
    (message,) = generic_messages(results, [])
    assert message["content"] == "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"


def test_the_form_can_be_chosen():
    """A template that knows tools gets them in words if the form is generic; one that reads none gets none."""
    text = encoder(tool_templates.QWEN, tool_format_name="generic").render(CONVERSATION[5:], tools=TOOLS)
    assert generic_instructions(TOOLS) in text and "<tools>" not in text
    prompts = encoder(tool_templates.NO_TOOLS, tool_format_name="hermes")
    assert prompts.tool_format is HERMES and "weather" not in prompts.render(CONVERSATION[5:], tools=TOOLS)
    with pytest.raises(UsageError, match=r"'xml'.* there are hermes, qwen3_coder"):
        encoder(tool_templates.QWEN, tool_format_name="xml").render(CONVERSATION[5:], tools=TOOLS)


def test_a_checkpoint_may_have_a_template_for_tools():
    prompts = encoder("default {{ messages[0].content }}")
    prompts.tokenizer.tool_chat_template = "tools {{ tools[0].function.name }} <tool_call>"
    assert prompts.tool_format is HERMES
    assert prompts.render(CONVERSATION[5:]) == "default Thanks"
    assert prompts.render(CONVERSATION[5:], tools=TOOLS) == "tools weather <tool_call>"


def test_a_form_says_which_marks_must_be_visible():
    assert replace(HERMES, end="").visible_tokens == ("<tool_call>",)
    assert TOOL_FORMATS["mistral_args"].visible_tokens == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert "<｜tool▁call▁end｜>" in TOOL_FORMATS["deepseek_v31"].visible_tokens
