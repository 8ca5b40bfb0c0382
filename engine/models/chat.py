"""A model's own chat template: from a conversation to the text it was trained on.

Templates are Jinja, and come with the weights: whoever made those could write anything there, so
they run in Jinja's sandbox, and see the conversation and nothing else. What they may call is what
transformers gives them (`apply_chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.models.errors import ModelError
from engine.models.tokenizer import ChatError

# An earlier name is the only one that templates know.
RENAMED = {"developer": "system"}


class ChatTemplate:
    """`tokens`: the text of bos_token, eos_token, …; raises ModelError where it is no template."""

    def __init__(self, text: str, tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = now
        self.tokens = tokens
        try:
            self.template = environment.from_string(text)
        except TemplateError as error:
            raise ModelError(f"{where}: chat_template: no template that runs: {error}") from error

    def render(self, messages: list[tuple[str, str]]) -> str:
        """With the assistant's opening at the end. Raises ChatError with the template's reason."""
        turns = [
            {"role": RENAMED.get(role, role), "content": content} for role, content in messages
        ]
        try:
            return self.template.render(
                messages=turns, add_generation_prompt=True, tools=None, **self.tokens
            )
        # What a template does wrong with what it is given is Python's own errors, of any kind.
        except Exception as error:
            raise ChatError(f"the model's chat template does not take them: {error}") from error


def tojson(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own, for a model, not for a page: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def refuse(message: str) -> None:
    raise TemplateError(message)


def now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
