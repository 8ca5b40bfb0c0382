"""vLLM on a CPU, eager, in one process; its prefix cache off, as ours is."""

from __future__ import annotations

import os
from typing import Any

from rounds import Answer, Prompts, serve

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm


def load(asked: dict[str, Any]) -> tuple[str, Answer]:
    engine = vllm.LLM(
        model=asked["folder"],
        dtype=asked["dtype"],
        max_model_len=asked["length_max"],
        max_num_seqs=asked["batch_max"],
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def answer(how: str, prompts: Prompts, tokens: int) -> Prompts:
        wanted = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = engine.generate(given, wanted, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    return f"vLLM {vllm.__version__}, {asked['dtype']}, eager", answer


if __name__ == "__main__":
    serve(load)
