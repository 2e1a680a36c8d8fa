"""Contents in parts: a template gets the list if it reads parts, and a text if it does not."""

from __future__ import annotations

import pytest

from bminf_lite.errors import UsageError
from bminf_lite.text.chat_template import ChatTemplate

LOOP = "{% for m in messages %}<{{ m.role }}>BODY</{{ m.role }}>{% endfor %}"
EITHER = {
    "loop": "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m['content'] %}{{ c.text }},{% endfor %}"
    "{% endif %}",
    "alias": "{% set content = m['content'] %}{% if content is not string %}{% set parts = content %}"
    "{% for c in parts %}{% if c['type'] == 'text' %}{{ c['text'] }},{% endif %}{% endfor %}{% else %}{{ content }}"
    "{% endif %}",
    "filter": "{% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(',') }}{% endif %}",
    "first": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
    "get": "{% if m.get('content') is string %}{{ m.content }}{% else %}{% for c in m.get('content') %}{{ c.text }},"
    "{% endfor %}{% endif %}",
}
ONLY = {
    "plain": "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }},{% endif %}{% endfor %}",
    "chosen": "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }},{% endfor %}",
    "sliced": "{% for c in m.content[:9] %}{{ c.text }},{% endfor %}",
    "conditional": "{% for c in (m.content if m.content else []) %}{{ c.text }},{% endfor %}",
    "default": "{% for c in m.content or [] %}{{ c.text }},{% endfor %}",
}
TEXT = {
    "plain": "{{ m.content }}",
    "words": "{% for word in m.content.split(' ') %}{{ word }} {% endfor %}",
    "lines": "{% for line in m.content | trim | list if false %}{% endfor %}{{ m.content | trim }}",
    "begin": "{% if m.content[0] == ' ' %}{% endif %}{{ m.content }}",
    "calls": "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}{{ m['content'] }}",
}
MACRO = (
    "{% macro show(content, end='') %}{% if content is string %}{{ content }}{% else %}{% for c in content %}"
    "{{ c.text }},{% endfor %}{% endif %}{{ end }}{% endmacro %}"
)
LISTS = {name: LOOP.replace("BODY", body) for name, body in EITHER.items()}
LISTS["macro"] = MACRO + LOOP.replace("BODY", "{{ show(m.content) }}")
LISTS["macro by name"] = MACRO.replace("content", "text") + LOOP.replace("BODY", "{{ show(text=m.content) }}")

PARTS = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "fox <b>"}]
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": [PARTS[0]]},
    {"role": "user", "content": "and now?"},
]


def joined(messages):
    return [
        m if isinstance(m["content"], str) else {**m, "content": "\n".join(part["text"] for part in m["content"])}
        for m in messages
    ]


def listed(messages):
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in messages
    ]


def render(source, messages=MESSAGES):
    return ChatTemplate(source).render(messages)


def reference(source, messages):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    return utils.render_jinja_template([messages], chat_template=source, add_generation_prompt=True)[0][0]


@pytest.mark.parity
@pytest.mark.parametrize("name", LISTS)
def test_a_template_for_texts_and_lists_gets_what_transformers_gives_it(name):
    found = render(LISTS[name])
    assert found == reference(LISTS[name], MESSAGES)
    assert "the quick" in found and "be brief" in found and "and now?" in found and "type" not in found


@pytest.mark.parity
@pytest.mark.parametrize("name", ONLY)
def test_a_template_for_lists_gets_a_list_for_a_text_too(name):
    """transformers gives it the text, whose characters have no type, and the message disappears."""
    source = LOOP.replace("BODY", ONLY[name])
    found = render(source)
    assert found == reference(source, listed(MESSAGES))
    assert "be brief," in found and "fox <b>," in found


@pytest.mark.parity
@pytest.mark.parametrize("name", TEXT)
def test_a_template_for_texts_gets_the_parts_as_lines(name):
    """transformers would write the list as Python does."""
    source = LOOP.replace("BODY", TEXT[name])
    assert render(source) == reference(source, joined(MESSAGES))


@pytest.mark.parametrize("source", ["{{ messages | length }}", "{{ messages[0].content[0].text }}", ""])
def test_a_template_without_a_loop(source):
    assert render(source, [{"role": "user", "content": PARTS}]) in ("1", "the quick", "")


def test_contents_that_are_absent_or_empty_stay_so():
    source = LOOP.replace("BODY", "{% for c in m.content %}{{ c.text }}{% endfor %}{{ m.content is defined }}")
    assert render(source, [{"role": "a", "content": None}, {"role": "b", "content": ""}]) == "<a>False</a><b>True</b>"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, {"text": 3}, "text", None])
@pytest.mark.parametrize("source", [*list(LISTS.values())[:1], LOOP.replace("BODY", "{{ m.content }}")])
def test_only_parts_of_text_are_taken(source, part):
    with pytest.raises(UsageError, match=r"messages\[1\].content has a part of type .* only text is supported"):
        render(source, [MESSAGES[0], {"role": "user", "content": [PARTS[0], part]}])
