"""allowed_token_ids: an answer is made of these only, whoever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.knobs import RuntimeConfig
from engine.models.llama import Llama
from engine.models.tokenizer import ByteTokenizer
from engine.openai import ApiError, allowed_tokens
from engine.sched.request import Request
from tests.engine.conftest import bench, request

ALLOWED = np.array([7, 65, 66, 200, 261])
PROMPT = [66, 80, 7, 91] * 10


def limited(name: str, temperature: float = 0.0) -> Request:
    asked = request(name, PROMPT, 24)
    asked.allowed, asked.temperature = ALLOWED, temperature
    asked.generator = np.random.default_rng(5) if temperature else None
    return asked


def test_it_is_the_likeliest_of_those_allowed_alone_and_in_any_batch(model: Llama) -> None:
    expected, sequence = [], list(PROMPT)
    for _ in range(24):
        logits = model.dense(torch.tensor(sequence))[-1]
        expected.append(int(ALLOWED[int(logits[torch.from_numpy(ALLOWED)].argmax())]))
        sequence.append(expected[-1])
    free, _ = bench(model).generate([request("free", PROMPT, 24)], RuntimeConfig())
    assert not set(free["free"]) <= set(ALLOWED.tolist()), "it would not say so by itself"
    for chunk in (8, 512):
        crowd = [request(str(i), [66 + i] * 30, 24) for i in range(6)]
        asked = [*crowd, limited("limited"), request("free", PROMPT, 24), limited("warm", 1.5)]
        found, _ = bench(model).generate(asked, RuntimeConfig(prefill_chunk_tokens=chunk))
        assert found["limited"] == expected
        assert found["free"] == free["free"]
        assert set(found["warm"]) <= set(ALLOWED.tolist())
        assert len(set(found["warm"])) > 1
        alone, _ = bench(model).generate([limited("warm", 1.5)], RuntimeConfig())
        assert alone["warm"] == found["warm"]


@pytest.mark.parametrize("ids", [[], 7, ["a"], [True], [-1], [262], [1.0]])
def test_what_is_no_list_of_tokens_is_refused_by_name(ids: object) -> None:
    words = "allowed_token_ids: want a non-empty list of token ids, each 0 to 261"
    with pytest.raises(ApiError, match=words):
        allowed_tokens({"allowed_token_ids": ids}, ByteTokenizer())


def test_a_list_is_a_set_and_nothing_is_any() -> None:
    assert allowed_tokens({}, ByteTokenizer()) is None
    found = allowed_tokens({"allowed_token_ids": [9, 3, 9]}, ByteTokenizer())
    assert found is not None
    assert found.tolist() == [3, 9]
