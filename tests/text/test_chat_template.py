"""Chat templates render as in transformers, and a hostile one soon ends in an error, without harm."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.text.chat_template import ChatLimits, ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <é> 🙂"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]

CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
INSTRUCT = """{% set ns = namespace(system='') %}
{% if messages[0]['role'] == 'system' %}
    {% set ns.system = messages[0]['content'] + '\\n\\n' %}
    {% set messages = messages[1:] %}
{% endif %}
{{ bos_token }}{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if m['role'] == 'user' %}[INST] {{ ns.system if loop.first }}{{ m['content'] }} [/INST]{% else %}
{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
FEATURES = """{%- macro show(x, n=1) -%}<{{ x }}{{ '!' * n }}>{%- endmacro -%}
{%- for m in messages if m.role != 'system' -%}
  {%- if loop.index > 2 -%}{% break %}{%- endif -%}
  {%- if m.missing is defined -%}{% continue %}{%- endif -%}
  {{ show(m.content, n=loop.index) }}{{ m | tojson }}{{ m | tojson(indent=2) }}
{%- endfor -%}
{{ tools is none }}{{ documents }}{{ dict(a=1).items() | list }}{{ strftime_now('%Y') | length }}{{ flag }}"""
TEMPLATES = {"chatml": CHATML, "instruct": INSTRUCT, "features": FEATURES}


def render(source, messages=MESSAGES, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_a_conversation_becomes_a_prompt():
    assert render(CHATML, MESSAGES[1:2]) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi <é> 🙂<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(INSTRUCT, MESSAGES[:3]) == "<s>[INST] Be brief.\n\nHi <é> 🙂 [/INST]Hello.</s>"


@pytest.mark.parity
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(name, prompt):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        flag=[1, {"a": None}],
    )
    assert render(TEMPLATES[name], add_generation_prompt=prompt, flag=[1, {"a": None}]) == expected[0]


def test_several_threads_share_a_template():
    template = ChatTemplate("[{{ bos_token }}]{{ messages[0].content }}")
    long = "x" * 1_000_000

    def work(name):
        return [template.render([{"role": "user", "content": f"{name} {i}{long}"}]) for i in range(3)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[f"[]{n} {i}{long}" for i in range(3)] for n in range(4)]


def test_several_processes_render_at_a_time():
    """A slow conversation does not keep a quick one waiting."""
    template = ChatTemplate(
        "{% for i in range(messages[0].content) %}" + LOOP + "{% endfor %}done",
        limits=ChatLimits(seconds=300),
        processes=2,
    )
    before = children()
    assert template.render([{"role": "user", "content": 0}]) == "done"
    (process,) = children() - before
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(template.render, [{"role": "user", "content": 99999}])
        while template._free.qsize() == 2:  # until it has that process
            time.sleep(0.001)
        assert template.render([{"role": "user", "content": 0}]) == "done" and not slow.done()
        process.kill()
        with pytest.raises(CheckpointError, match="ends the process"):
            slow.result()


# -- errors of a template and of messages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", [[], "text", {"role": "user"}, None, ["text"], [{"content": ""}], [{"role": 3}], [MESSAGES[0], 1]]
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(UsageError, match="message"):
        render(CHATML, messages)


def test_messages_that_the_template_or_json_refuses():
    with pytest.raises(UsageError, match="roles must alternate"):
        render(INSTRUCT, MESSAGES[2:])
    with pytest.raises(UsageError, match="JSON"):
        render(CHATML, [{"role": "user", "content": {1, 2}}])


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].no.thing }}", "UndefinedError"),
        ("{% include '/etc/hostname' %}", "loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__.sys }}", "SecurityError"),
        ("{{ namespace(__class__=1) }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "SecurityError"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_faulty_or_forbidden_template_is_refused(source, word):
    with pytest.raises(CheckpointError, match=word):
        render(source)


# -- hostile templates ------------------------------------------------------------------------------------------------

GROWING = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LOOP = "{% for i in range(99999) %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("}{", "}" + LOOP + "{"),
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        GROWING + "{{ ns.x }}",
        GROWING + "{{ ns.x | tojson }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{{ " + "-" * 100_000 + "1 }}",
    ],
    ids=lambda s: s[-30:],
)
def test_a_hostile_template_ends_in_an_error(source):
    """Without limits these run for hours, or take all memory."""
    template = ChatTemplate(source, limits=ChatLimits(seconds=0.2, memory=1 << 28))
    with pytest.raises(CheckpointError, match=r"template (takes longer|needs more|nests|fails|ends)"):
        template.render(MESSAGES)


def test_a_template_that_was_too_slow_may_render_again():
    source = "{% for i in range(messages[0].content) %}" + LOOP + "{% endfor %}done"
    template = ChatTemplate(source, limits=ChatLimits(seconds=1))
    with pytest.raises(CheckpointError, match="longer than 1 s"):
        template.render([{"role": "user", "content": 99999}])
    assert template.render([{"role": "user", "content": 0}]) == "done"


def test_the_source_and_the_output_are_limited():
    with pytest.raises(CheckpointError, match="11 characters; 10 are"):
        ChatTemplate("x" * 11, limits=ChatLimits(source=10))
    template = ChatTemplate("{{ messages[0].content }}", limits=ChatLimits(output=10))
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(CheckpointError, match="more than 10 characters"):
        template.render([{"role": "user", "content": "x" * 11}])


# -- the process ------------------------------------------------------------------------------------------------------


def children():
    return {p for p in psutil.Process().children() if any("chat_template_worker" in part for part in p.cmdline())}


def test_the_process_starts_once_is_replaced_when_killed_and_ends_with_its_template():
    gc.collect()
    before = children()
    template = ChatTemplate("{{ messages | length }}")
    assert children() == before
    for _ in range(2):
        assert template.render(MESSAGES) == "4"
    (process,) = children() - before
    process.kill()
    process.wait(300)
    assert template.render(MESSAGES) == "4"
    (process,) = children() - before
    del template
    gc.collect()
    assert not process.is_running() and not children() - before


def test_an_interrupted_wait_leaves_no_reply_behind(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(MESSAGES)
    (worker,) = template._free.queue

    class Interrupted:
        close = worker._process.stdout.close

        def readline(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(worker._process, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "lost"}])
    assert template.render([{"role": "user", "content": "next"}]) == "next"
