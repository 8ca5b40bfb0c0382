"""The hot list: prompts whose KV is computed before the first request comes, and pinned.

A file of JSON, one body of /v1/completions or /v1/chat/completions a line; of each, only what makes
its prompt (`prompt` or `messages`) and `cache_salt` matter.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine import openai
from engine.config import EngineConfig
from engine.http import ApiError
from engine.models.tokenizer import Tokenizer
from engine.sched.request import Request

PROMPTS_MAX = 256
FIELDS = ("prompt", "messages", "cache_salt")


def read(path: Path, config: EngineConfig, tokenizer: Tokenizer) -> list[Request]:
    """One request for one token each. Raises ValueError naming file and line, or OSError."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if len(lines) > PROMPTS_MAX:
        raise ValueError(f"{path}: got {len(lines)} prompts, allowed: {PROMPTS_MAX}")
    requests = []
    for number, line in enumerate(lines, start=1):
        try:
            body = dict(json.loads(line))
            asked = {name: body[name] for name in FIELDS if name in body}
            call = openai.parse(
                {**asked, "max_tokens": 1, "temperature": 0, "ignore_eos": True},
                chat="messages" in body,
                request_id=f"warm-{number}",
                parent="",
                model=config.model_name,
                tokenizer=tokenizer,
                tokens_max=config.model_len_max,
            )
        except (ValueError, TypeError, ApiError) as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from None
        requests.append(call.request)
    return requests
