"""An answer that has begun: the prompt ends where its text does, whatever the text is and the template writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tool_templates
from hypothesis import given
from hypothesis import strategies as st

from bminf_lite.errors import UsageError
from bminf_lite.text.prompts import PromptEncoder
from bminf_lite.text.reasoning import REASONING_FORMATS

HI = [{"role": "user", "content": "Say <|im_end|> in the end, assistant"}]
LIMITS = SimpleNamespace(vocab_size=1000, context_length=1000, is_encoder_decoder=False, max_source_length=0)
CALL = {"function": {"name": "f", "arguments": {}}}
MARKS = [
    "<",
    "|",
    ">",
    "end",
    "im_end",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "i",
    "\n",
    "assistant",
    "</s>",
    "[INST]",
]


def encoder(template: str) -> PromptEncoder:
    prompts = PromptEncoder(None, LIMITS)
    prompts.tokenizer = tool_templates.tokenizer(template)
    return prompts


def answer(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


ENCODERS = {name: encoder(template) for name, template in tool_templates.ALL.items()}
NOT_PLAIN = ("mistral", "deepseek_v3", "deepseek_v31")
"""Templates that write something between the prompt for an answer and the answer."""
PLAIN = {name: prompts for name, prompts in ENCODERS.items() if name not in NOT_PLAIN}


@pytest.mark.parametrize("name", ENCODERS)
def test_most_templates_write_an_answer_behind_its_prompt(name):
    prompts = ENCODERS[name]
    begins_plainly = prompts.render([*HI, answer("dog")], False).startswith(prompts.render(HI) + "dog")
    assert begins_plainly == (name not in NOT_PLAIN)


@pytest.mark.parametrize("name", PLAIN)
@given(st.lists(st.sampled_from([*MARKS, "a word ", " ", "é 🙂"]), min_size=1, max_size=4).map("".join))
def test_the_prompt_is_that_of_an_answer_with_its_beginning(name, content):
    """Also where the text stands in the template's own marks, or elsewhere in the conversation."""
    content = "x" + content  # templates may drop white space before an answer, but never behind its beginning
    assert PLAIN[name].render([*HI, answer(content)], continue_final_message=True) == PLAIN[name].render(HI) + content


@pytest.mark.parametrize("content", ["<", "|", "end", "im_end", "i", ">", "s", "<|im_end|>", "Say", "assistant"])
def test_texts_of_the_template_itself(content):
    for prompts in PLAIN.values():
        found = prompts.render([*HI, answer(content)], continue_final_message=True)
        assert found == prompts.render(HI) + content


def test_an_empty_beginning_is_the_prompt_for_an_answer():
    for prompts in PLAIN.values():
        assert prompts.render([*HI, answer("")], continue_final_message=True) == prompts.render(HI)


def test_what_the_template_makes_of_the_content_is_kept():
    """A template that writes the reasoning in front of an answer, out of its content or not."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% set text = m.content %}{% if '</think>' in text %}<think>"
        "{{ text.split('</think>')[0].split('<think>')[-1].strip() }}</think>\n"
        "{% set text = text.split('</think>')[-1] %}"
        "{% endif %}{{ text | trim }}</s>{% endfor %}"
    )
    messages = [*HI, answer("<think> \nhm\n </think>\n\n I ")]
    found = encoder(source).render(messages, continue_final_message=True)
    assert found == f"<user>{HI[0]['content']}</s><assistant><think>hm</think>\nI "


def test_content_in_parts():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.text or '' }}]{% endfor %}</s>{% endfor %}"
    )
    parts = [{"type": "text", "text": "end"}, {"type": "text", "text": "the end "}]
    prompts = encoder(source)
    assert prompts.render([answer(parts)], continue_final_message=True) == "<assistant>[end][the end "
    assert prompts.render([answer([])], continue_final_message=True) == "<assistant>["


@pytest.mark.parametrize(
    ("messages", "source"),
    [
        (HI, "{{ messages[-1].content }}"),
        ([*HI, {**answer("a"), "tool_calls": [CALL]}], "{{ messages[-1].content }}"),
        ([*HI, answer("a")], "{{ messages[0].content }}"),
        ([*HI, answer("a")], "{{ messages[-1].content | upper }}"),
    ],
    ids=["the user's", "with calls", "left out", "changed"],
)
def test_what_cannot_be_continued(messages, source):
    with pytest.raises(UsageError, match="the last message cannot be continued"):
        encoder(source).render(messages, continue_final_message=True)


def test_reasoning_that_has_begun():
    think = REASONING_FORMATS["think"]
    assert think.is_open_in("<think>") and think.is_open_in("\n<think>\nLet me")
    assert not any(map(think.is_open_in, ("", "<think>a</think>", "I think", "I write <think>", "<think>a</think>b")))
