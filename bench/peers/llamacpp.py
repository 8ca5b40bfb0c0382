"""llama.cpp through its C interface: all prompts in one batch, then a token of each at a time.

It computes with the weights as the file has them, 4 bits each.
"""

from __future__ import annotations

from typing import Any

import llama_cpp as c
import numpy as np
from rounds import Answer, Prompts, serve


def load(asked: dict[str, Any]) -> tuple[str, Answer]:
    c.llama_backend_init()
    model = c.llama_model_load_from_file(asked["gguf"].encode(), c.llama_model_default_params())
    tokens_max = asked["batch_max"] * asked["length_max"]
    wanted = c.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = tokens_max
    wanted.n_seq_max = asked["batch_max"]
    wanted.n_threads = wanted.n_threads_batch = 1
    context = c.llama_init_from_model(model, wanted)
    words = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(tokens_max, 0, 1)

    def put(token: int, position: int, sequence: int, last: bool) -> int:
        """Where in the batch it stands."""
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, last
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens += 1
        return at

    def chosen(places: list[int]) -> list[int]:
        if c.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = (c.llama_get_logits_ith(context, place) for place in places)
        return [int(np.ctypeslib.as_array(each, (words,)).argmax()) for each in logits]

    def answer(how: str, prompts: Prompts, tokens: int) -> Prompts:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        batch.n_tokens = 0
        ends = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                at = put(token, position, sequence, position + 1 == len(prompt))
            ends.append(at)
        made = [[token] for token in chosen(ends)]
        for step in range(tokens - 1):
            batch.n_tokens = 0
            ends = [
                put(one[-1], len(prompt) + step, sequence, True)
                for sequence, (one, prompt) in enumerate(zip(made, prompts, strict=True))
            ]
            for one, token in zip(made, chosen(ends), strict=True):
                one.append(token)
        return made

    return f"llama-cpp-python {c.__version__}, Q4_1", answer


if __name__ == "__main__":
    serve(load)
