"""What a chat template may use, and what it may not."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import jinja2
import pytest

import chat_render
from chat_render import answer, render

MESSAGES = [{"role": "system", "content": "a <b>"}, {"role": "user", "content": "é 🦙"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m['content'] | trim }};{% endfor %}",
         "system:a <b>;user:é 🦙;"),
        ("  {% if true %}\nkept\n  {% endif %}\n", "kept\n"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "é 🦙"}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "a <b>"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ undefined_name }}{{ 'set' if undefined_name is defined else 'unset' }}", "unset"),
    ],
)  # fmt: skip
def test_a_template_has_what_transformers_gives_it(template: str, text: str) -> None:
    assert render(template, {"messages": MESSAGES}) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__code__.x }}",
        "{{ '{0.__class__.__base__}'.format(1) }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox_or_changes_what_is_outside(template: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        render(template, {"messages": MESSAGES})


def test_the_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_render, "MAX_CHARACTERS", 100)
    assert len(render("{% for i in range(10) %}{{ 10 * 'a' }}{% endfor %}", {})) == 100
    with pytest.raises(jinja2.TemplateRuntimeError, match="more than 100 characters"):
        render("{% for i in range(11) %}{{ 10 * 'a' }}{% endfor %}", {})


def test_an_old_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_render, "version", lambda name: "3.1.5")
    assert "jinja2 3.1.5 has a leaky sandbox" in answer("{}")["error"]


ESCAPE = """
import os, socket, subprocess, sys
from pathlib import Path
import chat_render
chat_render.restrict()
allowed = []
for name, attempt in {
    "system": lambda: os.system("true"),
    "popen": lambda: subprocess.run(["true"]),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
    "remove": lambda: os.remove(sys.argv[1]),
    "write": lambda: Path(sys.argv[1]).write_text("changed"),
    "memory": lambda: bytes(1 << 30),
}.items():
    try:
        attempt()
        allowed.append(name)
    except (PermissionError, OSError, MemoryError):
        pass
print(allowed)
"""


def test_even_outside_the_sandbox_nothing_is_run_sent_or_written(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.touch()
    folder = Path(chat_render.__file__).parent
    command = [sys.executable, "-c", ESCAPE, str(canary)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert canary.read_bytes() == b""


def test_the_command_answers_in_json() -> None:
    request = json.dumps({"template": "{{ x }}", "variables": {"x": "🦙"}})
    command = [sys.executable, "-P", chat_render.__file__]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"text": "🦙"}
