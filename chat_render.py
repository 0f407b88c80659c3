"""Render a chat template in a process of its own: what may go wrong in it ends there.

    python -P chat_render.py < REQUEST        for chat_template.py

A template is a program by whoever wrote the checkpoint. It runs in jinja2's sandbox, which gives it
nothing to call but itself, in a process with little memory and time that can write no file. REQUEST
is a JSON object of `template` and `variables`; stdout gets one of `text` or of `error`. What a
template may use is what transformers gives it (its utils/chat_template_utils.py).
"""

import contextlib
import json
import resource
import sys
from datetime import datetime
from importlib.metadata import version
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 4
MEMORY_BYTES = 1 << 29
MAX_CHARACTERS = 1 << 22
OLDEST_JINJA = (3, 1, 6)  # CVE-2025-27516 and others lead out of older sandboxes
# Audit events; the second line of defence, should the sandbox leak.
FORBIDDEN = (
    *("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.putenv", "os.remove", "os.rename"),
    *("os.rmdir", "os.system", "os.truncate", "ctypes.", "shutil.", "socket.", "subprocess."),
)


class Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render(template: str, variables: dict[str, Any]) -> str:
    """The text of a template.

    Raises:
        jinja2.TemplateError: it is malformed, leaves the sandbox or raises; other errors are of the
            Python that it amounts to.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    parts, characters = [], 0
    for part in environment.from_string(template).generate(variables):
        parts.append(part)
        characters += len(part)
        if characters > MAX_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"makes more than {MAX_CHARACTERS} characters")
    return "".join(parts)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def restrict() -> None:
    """Take from this process what no template needs."""
    limits = {
        resource.RLIMIT_CPU: CPU_S,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(kind, (limit, limit))

    def refuse(event: str, arguments: object) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"no {event} for a template")

    sys.addaudithook(refuse)


def answer(request: str) -> dict[str, str]:
    found = version("jinja2")
    if tuple(int(part) for part in found.split(".")[:3]) < OLDEST_JINJA:
        return {"error": f"jinja2 {found} has a leaky sandbox; install 3.1.6 or later"}
    restrict()
    try:
        return {"text": render(**json.loads(request))}
    except Exception as error:  # a template may raise whatever Python raises
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(answer(sys.stdin.read())))
