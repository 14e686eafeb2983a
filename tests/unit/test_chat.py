"""Chat templates: what they are given, what they may not do, and what is said about those that fail."""

from __future__ import annotations

import datetime
import json
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kdgen.errors import KdgenError
from kdgen.text.chat import ChatRenderer, messages_of, render_chat
from kdgen.text.tokenizer import TextFiles

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def files(template: object, **config: Any) -> TextFiles:
    return TextFiles("folder", {"tokenizer_config.json": json.dumps({"chat_template": template} | config).encode()})


Render = Callable[..., str]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatRenderer]:
    with ChatRenderer(cpu_seconds=1) as opened:
        yield opened


@pytest.fixture
def render(renderer: ChatRenderer) -> Render:
    def by_template(template: object, prompt: str = "hi", system: str | None = None, **config: Any) -> str:
        return render_chat(files(template, **config), messages_of(prompt, system), renderer)

    return by_template


def test_messages_in_a_template(render: Render) -> None:
    assert render(PLAIN) == "<|user|>hi<|assistant|>"
    assert render(PLAIN, system="be\nbrief") == "<|system|>be\nbrief<|user|>hi<|assistant|>"
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token={"content": "</s>"}) == "<s>hi</s>"
    assert render([{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]) == "<|user|>hi<|assistant|>"


def test_a_template_of_its_own_file_comes_first() -> None:
    both = files("no")
    own = TextFiles("folder", {**both.contents, "chat_template.jinja": b"yes"})
    assert render_chat(own, messages_of("hi", None)) == "yes"


def test_what_transformers_gives_templates(render: Render) -> None:
    assert render("{{ messages[0] | tojson }}", "<é>") == '{"role": "user", "content": "<é>"}'
    assert render("{% for m in messages * 3 %}\n  {% if loop.index == 2 %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}\n") == "user\n"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% if tools %}no{% endif %}{% if thinking is defined %}no{% endif %}yes") == "yes"
    with pytest.raises(KdgenError, match=r"folder/tokenizer_config\.json: the chat template refuses these messages: no system messages"):
        render("{{ raise_exception('no system messages') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(render: Render, template: str) -> None:
    with pytest.raises(KdgenError, match="the chat template refuses these messages: "):
        render(template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "folder: has no chat template"),
        ([{"name": "rag", "template": "x"}], "folder: has no chat template"),
        ("a\n{% for %}", "line 2 of the chat template: "),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% break %}", "'break' outside loop"),
        ("{{ cycler() }}", "the chat template refuses these messages: at least one item"),
        ("{{ (1e308 * 10) | int }}", "the chat template refuses these messages: "),
        ("{{ raise_exception('x' * 10 ** 6) }}", f"refuses these messages: {'x' * 300}…"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ([{"name": ["default"], "template": "x"}], "folder: has no chat template"),
    ],
)
def test_templates_that_fail(render: Render, template: object, said: str) -> None:
    with pytest.raises(KdgenError) as error:
        render(template)
    assert said in str(error.value)


NEST = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NEST * 3 + "{% endfor %}" * 3, "uses more than 1 s of CPU time"),
        ("{{ 10 ** (10 ** 8) }}", "uses more than 1 s of CPU time"),
        ("{{ lipsum(n=10 ** 7) }}", "uses more than 1 s of CPU time"),
        ("{{ messages[0].role * 10 ** 7 }}", "gives a text of more than 16777216 characters"),
        (NEST * 2 + "{{ 'a' * 1000 }}" + "{% endfor %}" * 2, "gives a text of more than 16777216 characters"),
        ("{{ '%2000000000d' % 1 }}", "needs more than 512 MiB of memory"),
        ("{{ 'a'.center(2000000000) }}", "needs more than 512 MiB of memory"),
        ("{{ '{:2000000000}'.format(1) }}", "needs more than 512 MiB of memory"),
        ("{{ messages | tojson(indent=2000000000) }}", "needs more than 512 MiB of memory"),
        ("{% set ns = namespace(x='a') %}" + NEST + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "needs more than 512 MiB of memory"),
    ],
)
def test_limits_of_time_memory_and_output(render: Render, template: str, said: str) -> None:
    """Each ends in one message, soon, and the next template is rendered as if nothing had been."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(KdgenError) as error:
        render(template)
    assert str(error.value).startswith("folder/tokenizer_config.json: the chat template ") and said in str(error.value)
    assert time.monotonic() - began < 20, "a machine with other work has time for a second of it"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17, "KiB: nothing of it reaches this process"
    assert render(PLAIN) == "<|user|>hi<|assistant|>"
