"""transformers: `generate` on a batch, and `generate_batch`, its continuous batching."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from rounds import Answer, Prompts, serve

PAGE_TOKENS = 32


def load(asked: dict[str, Any]) -> tuple[str, Answer]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        asked["folder"], dtype=getattr(torch, asked["dtype"])
    )
    greedy = model.generation_config
    greedy.do_sample, greedy.eos_token_id, greedy.pad_token_id = False, None, 0
    endless = copy.deepcopy(greedy)
    endless.eos_token_id = -1
    tokens_max = asked["batch_max"] * asked["length_max"]
    paged = transformers.ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=asked["batch_max"] * -(-asked["length_max"] // PAGE_TOKENS) + 1,
        max_batch_tokens=tokens_max,
        allow_block_sharing=False,
    )

    def generate(prompts: Prompts, tokens: int) -> Prompts:
        assert "paged" not in model.config._attn_implementation, "left so by generate_batch"
        given = torch.tensor(prompts)
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens)
        return made[:, given.size(1) :].tolist()

    def generate_batch(prompts: Prompts, tokens: int) -> Prompts:
        made = model.generate_batch(
            prompts,
            generation_config=endless,
            continuous_batching_config=paged,
            persistent_manager=True,
            max_new_tokens=tokens,
        )
        return [list(each.generated_tokens) for each in made.values()]

    ways = {"generate": generate, "generate_batch": generate_batch}
    version = f"transformers {transformers.__version__}, {model.dtype}"
    return version, lambda how, *rest: ways[how](*rest)


if __name__ == "__main__":
    serve(load)
