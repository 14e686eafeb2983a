"""Chat templates against transformers: the same text, whatever a template makes use of."""

from __future__ import annotations

import json

import pytest

from kdgen.text.chat import messages_of, render_chat
from kdgen.text.tokenizer import TextFiles

reference = pytest.importorskip("transformers.utils.chat_template_utils", reason="the oracle needs transformers: pip install kdgen[oracle]")

TEMPLATES = {
    "whitespace": "{%- for m in messages -%}\n  {% if m.role == 'user' %}\n<u>{{ m.content | trim }}\n  {%- endif %}\n{% endfor %}\n\n",
    "namespace": (
        "{% set ns = namespace(system='', first=true) %}{% for m in messages %}{% if m['role'] == 'system' %}"
        "{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.system }}{% for m in messages[::-1] %}{{ loop.index0 }}{% endfor %}"
    ),
    "macro": (
        "{% macro turn(m) -%}<|im_{{ m.role }}|>{{ m.content }}<|im_end|>{%- endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=True, ensure_ascii=True) }}"
    ),
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined": "{% if not tools and thinking is not defined and not documents %}{{ nothing }}x{% endif %}{{ add_generation_prompt }}",
    "strings": "{{ messages[-1].content.split(' ')[0].upper() }}{{ messages[-1].content.startswith('T') }}{{ '%s-%d' | format('a', 3) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "be <brief>"])
def test_the_same_text(name: str, system: str | None) -> None:
    config = {"chat_template": TEMPLATES[name], "bos_token": "<s>"}
    ours = render_chat(
        TextFiles("folder", {"tokenizer_config.json": json.dumps(config).encode()}), messages_of("Tell  me\nmore é ", system)
    )
    conversations = [messages_of("Tell  me\nmore é ", system)]
    rendered, _ = reference.render_jinja_template(conversations, chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>")
    assert ours == rendered[0]
