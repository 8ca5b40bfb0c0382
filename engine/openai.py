"""The OpenAI wire format: from a JSON body to a Request, from tokens to JSON.

What the engine does not do (n > 1, logprobs, tools, …) is answered with an error that names it,
never ignored.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.tokenizer import ROLES, ChatError, Detokenizer, Tokenizer
from engine.sched.request import NORMAL, PRIORITIES, Finish, Request

STOPS_MAX = 4
STOP_BYTES_MAX = 64
MESSAGES_MAX = 1024
REQUEST_ID_CHARS_MAX = 128
CACHE_SALT_CHARS_MAX = 128
MAX_TOKENS_DEFAULT = 16

# Asking for the value at which these do nothing is allowed; anything else is not supported.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "top_p": (1, 1.0),
    "top_k": (-1, 0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}


class ApiError(Exception):
    """An answer in the error shape; `headers` go with it (Retry-After, Allow)."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": str(self), "param": self.param}}


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, f"{param}: {message}", param=param)


@dataclass
class Call:
    """A parsed call: the Request to run and how its answer is to be written."""

    request: Request
    chat: bool
    stream: bool
    include_usage: bool


def parse(
    body: dict[str, Any],
    *,
    chat: bool,
    request_id: str,
    parent: str,
    model: str,
    tokenizer: Tokenizer,
    tokens_max: int,
    priority: str = "",
    arrived: float | None = None,
) -> Call:
    """Raises ApiError 400 naming the field, its value and what is allowed; 404 for other models."""
    arrived = time.monotonic() if arrived is None else arrived
    asked = body.get("model", model)
    if asked != model:
        raise ApiError(
            404, "model_not_found", f"model: got {asked!r}, served: {model}", param="model"
        )
    for name, neutral in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise bad(
                name, f"got {value!r}, this engine supports only {neutral[0]!r}", "unsupported"
            )
    prompt = chat_tokens(body, tokenizer) if chat else prompt_tokens(body, tokenizer)
    default = tokens_max - len(prompt) if chat else MAX_TOKENS_DEFAULT
    field = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = integer(body, field, default, 1)
    if len(prompt) + max_tokens > tokens_max:
        raise bad(
            field if len(prompt) < tokens_max else "prompt",
            f"{len(prompt)} prompt tokens and {max_tokens} to generate pass the model's limit "
            f"(max_model_len) of {tokens_max} tokens",
            "context_length_exceeded",
        )
    temperature = number(body, "temperature", 1.0, 0.0, 2.0)
    generator = None
    if temperature > 0:
        seed = body.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise bad("seed", f"got {seed!r}, allowed: integers from 0 on")
        generator = np.random.default_rng(seed)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise bad("stream_options", f"got {options!r}, want an object")
    request = Request(
        id=request_id[:REQUEST_ID_CHARS_MAX].strip(),
        tokens=np.array(prompt, np.int64),
        max_tokens=max_tokens,
        arrived=arrived,
        queued=time.monotonic(),
        ignore_eos=flag(body, "ignore_eos"),
        stop=stops(body),
        temperature=temperature,
        generator=generator,
        allowed=allowed_tokens(body, tokenizer),
        parent=parent,
        priority=priority_of(priority),
        salt=cache_salt(body),
    )
    return Call(request, chat, flag(body, "stream"), flag(options, "include_usage"))


def priority_of(header: str) -> int:
    """0 to 3 from the x-priority header, a number or its name; normal without one."""
    word = header.strip().lower()
    if not word:
        return NORMAL
    if word in PRIORITIES:
        return PRIORITIES.index(word)
    if word in ("0", "1", "2", "3"):
        return int(word)
    raise bad("x-priority", f"got {header!r}, allowed: 0 to 3, {', '.join(PRIORITIES)}")


def cache_salt(body: dict[str, Any]) -> str:
    """Requests of one salt share cached prefixes; "" is the salt of those that name none."""
    value = body.get("cache_salt")
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= CACHE_SALT_CHARS_MAX:
        raise bad("cache_salt", f"want a text of 1 to {CACHE_SALT_CHARS_MAX} characters")
    return value


def prompt_tokens(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Text, or a list of token ids, of one prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) and (tokens := tokenizer.encode(prompt)):
        return tokens
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt_tokens({"prompt": prompt[0]}, tokenizer)
    if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        if not 0 <= min(prompt) <= max(prompt) < len(tokenizer.pieces):
            raise bad("prompt", f"token ids must lie in 0 to {len(tokenizer.pieces) - 1}")
        return prompt
    raise bad("prompt", "want one text, or one non-empty list of token ids")


def allowed_tokens(body: dict[str, Any], tokenizer: Tokenizer) -> np.ndarray | None:
    """`allowed_token_ids`, as vLLM: the only tokens the answer may be made of; None: any."""
    value = body.get("allowed_token_ids")
    if value is None:
        return None
    vocabulary = len(tokenizer.pieces)
    ids = isinstance(value, list) and all(type(i) is int for i in value)
    if not ids or not value or not 0 <= min(value) <= max(value) < vocabulary:
        raise bad(
            "allowed_token_ids", f"want a non-empty list of token ids, each 0 to {vocabulary - 1}"
        )
    return np.unique(np.array(value, np.int64))


def chat_tokens(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MESSAGES_MAX:
        raise bad("messages", f"want a list of 1 to {MESSAGES_MAX} messages")
    turns = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad(f"messages[{i}]", "want an object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            allowed = ", ".join(ROLES)
            raise bad(f"messages[{i}].role", f"got {role!r}, allowed: {allowed}")
        if isinstance(content, list) and all(
            isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
            for p in content
        ):
            content = "".join(p["text"] for p in content)
        if not isinstance(content, str):
            raise bad(f"messages[{i}].content", "want text, or a list of text parts")
        turns.append((role, content))
    try:
        tokens = tokenizer.encode_chat(turns)
    except ChatError as error:
        raise bad("messages", str(error)) from None
    if not tokens:
        raise bad("messages", "the model's chat template makes no text of them")
    return tokens


def stops(body: dict[str, Any]) -> tuple[bytes, ...]:
    value = body.get("stop") or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > STOPS_MAX:
        raise bad("stop", f"want a text or at most {STOPS_MAX} texts")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text.encode()) <= STOP_BYTES_MAX:
            raise bad("stop", f"got {text!r}, want a text of 1 to {STOP_BYTES_MAX} bytes")
    return tuple(text.encode() for text in texts)


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(name, f"got {value!r}, allowed: true, false")
    return value


def integer(body: dict[str, Any], name: str, default: int, minimum: int) -> int:
    value = body.get(name)
    if value is None:
        return max(default, minimum)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise bad(name, f"got {value!r}, allowed: integers from {minimum} on")
    return value


def number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise bad(name, f"got {value!r}, allowed: {low} to {high}")
    return float(value)


class Text:
    """Tokens in, text out: holds back a cut character, and what might begin a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.pieces = tokenizer.pieces
        self.detokenizer = Detokenizer()
        self.held = b""
        self.hold_bytes = max(map(len, request.stop), default=1) - 1

    def feed(self, tokens: list[int], final: bool) -> str:
        part = self.held + b"".join([self.pieces[token] for token in tokens])
        if final:
            self.held = b""
            if self.request.finish is Finish.STOP:
                begins = [part.find(stop) for stop in self.request.stop]
                part = part[: min((at for at in begins if at >= 0), default=len(part))]
        else:
            cut = max(0, len(part) - self.hold_bytes)
            part, self.held = part[:cut], part[cut:]
        return self.detokenizer.feed(part, final)


class Writer:
    """Writes the answer of one call, whole or as server-sent events."""

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer) -> None:
        self.call = call
        self.model = model
        kind = "chatcmpl" if call.chat else "cmpl"
        self.id = f"{kind}-{call.request.id}"
        self.created = int(time.time())
        self.text = Text(call.request, tokenizer)
        name = "chat.completion.chunk" if call.chat else "text_completion"
        head = {"id": self.id, "object": name, "created": self.created, "model": model}
        start = f'data: {json.dumps(head)[:-1]}, "choices": [{{"index": 0, '
        self.head = start + ('"delta": {"content": ' if call.chat else '"text": ')
        self.role = '"role": "assistant", ' if call.chat else ""

    def event(self, tokens: list[int], final: bool) -> str:
        """One event for the tokens of one wake-up; the last one carries the finish reason."""
        text = json.dumps(self.text.feed(tokens, final))
        reason = f'"{self.call.request.finish}"' if final else "null"
        if self.call.chat:
            start = self.head
            if self.role:
                start = start.replace('"delta": {', '"delta": {' + self.role)
                self.role = ""
            return f'{start}{text}}}, "finish_reason": {reason}}}]}}\n\n'
        return f'{self.head}{text}, "logprobs": null, "finish_reason": {reason}}}]}}\n\n'

    def end(self) -> str:
        """What follows the last event."""
        usage = ""
        if self.call.include_usage:
            head = self.head[: self.head.index('"choices"')]
            usage = f'{head}"choices": [], "usage": {json.dumps(self.usage())}}}\n\n'
        return usage + "data: [DONE]\n\n"

    def usage(self) -> dict[str, Any]:
        request = self.call.request
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.generated,
            "total_tokens": request.prompt_tokens + request.generated,
            "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
        }

    def whole(self, tokens: list[int]) -> dict[str, Any]:
        text = self.text.feed(tokens, True)
        choice: dict[str, Any] = {"index": 0, "finish_reason": str(self.call.request.finish)}
        if self.call.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice |= {"text": text, "logprobs": None}
        return {
            "id": self.id,
            "object": "chat.completion" if self.call.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": self.usage(),
        }
