from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.traces.formats import FORMATS, Row, TraceError, detect
from engine.traces.trace import Trace, TraceRequest

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00+00:00,2399,34\n"
    "2024-05-10 00:00:00.009930+00:00,1264,12\n"
)
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,0,417,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.5,,2,ChatGPT,36,29,65,API log\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1200, "output_length": 40, "hash_ids": [0, 1, 7]},
    {"timestamp": 3000, "input_length": 513, "output_length": 3, "hash_ids": [4, 1]},
]
VLLM = {
    "date": "20261130-120000",
    "endpoint_type": "vllm",
    "num_prompts": 3,
    "request_throughput": 1.5,
    "input_lens": [100, 20, 7],
    "output_lens": [3, 0, 5],
    "ttfts": [0.1, 0.0, 0.1],
    "itls": [[0.01, 0.01], [], [0.01] * 4],
    "start_times": [1004.5, 0.0, 1001.25],
    "generated_texts": ["a", "", "b"],
    "errors": ["", "refused", ""],
}


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def asked(path: Path, **how: Any) -> list[TraceRequest]:
    return list(Trace(path, detect(path), **how).requests())


def seen(path: Path, **how: Any) -> list[tuple[float, int, int]]:
    return [(one.at_s, one.prompt_tokens, one.output_tokens) for one in asked(path, **how)]


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (AZURE_2023, "azure", [(0.0, 374, 44), (4.314579, 396, 109)]),
        (AZURE_2024, "azure", [(0.0, 2399, 34), (0.00993, 1264, 12)]),
        ("\ufeff" + AZURE_2024, "azure", [(0.0, 2399, 34), (0.00993, 1264, 12)]),
        (BURSTGPT_1, "burstgpt", [(0.0, 472, 18), (40.0, 1087, 230)]),
        (BURSTGPT_3, "burstgpt", [(0.0, 906, 446), (51.5, 36, 29)]),
        (lines(*MOONCAKE), "mooncake", [(0.0, 1500, 500), (3.0, 1200, 40), (3.0, 513, 3)]),
        (json.dumps(VLLM), "vllm", [(0.0, 7, 5), (3.25, 100, 3)]),
        (json.dumps(VLLM, indent=2), "vllm", [(0.0, 7, 5), (3.25, 100, 3)]),
    ],
)
def test_each_format_is_told_by_its_content_and_read(
    tmp_path: Path, text: str, kind: str, expected: list[tuple[float, int, int]]
) -> None:
    path = written(tmp_path / "trace", text)
    assert detect(path) == kind
    assert seen(path) == [pytest.approx(one) for one in expected]


def test_what_is_no_trace_is_answered_with_the_formats_there_are(tmp_path: Path) -> None:
    path = written(tmp_path / "shopping.csv", "what,how many\neggs,6\n")
    with pytest.raises(TraceError, match=r"shopping\.csv, line 1: got 'what,how many'") as told:
        detect(path)
    for name, each in FORMATS.items():
        assert f"\n  {name}: {each.about}" in str(told.value)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("azure", AZURE_2023 + "yesterday,1,2\n",
         r"line 4, TIMESTAMP: got 'yesterday', allowed: a date and a time"),
        ("azure", AZURE_2023 + "2023-11-16 19:00:00,many,2\n",
         r"line 4, ContextTokens: got 'many', allowed: whole numbers from 0 to 10000000"),
        ("azure", AZURE_2023 + "2023-11-16 19:00:00,1,-2\n", r"line 4, GeneratedTokens: got '-2'"),
        ("azure", AZURE_2023 + "2023-11-16 19:00:00,1.5,2\n", r"line 4, ContextTokens: got '1.5'"),
        ("azure", AZURE_2023 + "2023-11-16 19:00:00,1\n",
         r"line 4, the line: got \['2023-11-16 19:00:00', '1'\], allowed: 3 columns"),
        ("azure", AZURE_2023 + "2023-11-16 18:15:48,1,2\n",
         r"line 4, TIMESTAMP: got a time 2.99517 s before that of line 3, allowed: times in order"),
        ("azure", "TIMESTAMP,Tokens\n", r"line 1, columns: got \['TIMESTAMP', 'Tokens'\]"),
        ("azure", "", r"line 1, columns: got \[\], allowed: with TIMESTAMP, ContextTokens"),
        ("burstgpt", BURSTGPT_1 + "nan,GPT-4,1,2,3,API log\n",
         r"line 5, Timestamp: got 'nan', allowed: seconds from 0 to 1e\+10"),
        ("mooncake", lines(*MOONCAKE) + "{no\n", r"line 4: no JSON \(.*\), allowed: an object"),
        ("mooncake", "[1]\n", r"line 1, the line: got \[1\], allowed: an object with timestamp"),
        ("mooncake", lines({**MOONCAKE[0], "timestamp": None}), r"line 1, timestamp: missing"),
        ("mooncake", lines({**MOONCAKE[0], "timestamp": "0 s"}),
         r"line 1, timestamp: got '0 s', allowed: milliseconds from 0 to 1e\+13"),
        ("mooncake", lines({**MOONCAKE[0], "input_length": True}), r"input_length: got True"),
        ("mooncake", lines({**MOONCAKE[0], "hash_ids": [0, 1, -2]}),
         r"line 1, hash_ids: got \[0, 1, -2\], allowed: a list of whole numbers from 0"),
        ("mooncake", lines({**MOONCAKE[0], "hash_ids": [0, 1]}),
         r"line 1, hash_ids: got 2 of them, allowed: 3, one for each 512 of the 1500 tokens"),
        ("vllm", json.dumps({**VLLM, "input_lens": None}), r"input_lens: missing, allowed: one"),
        ("vllm", json.dumps({**VLLM, "output_lens": [3, 0]}),
         r"output_lens: got 2 values, allowed: 3, as many as start_times"),
        ("vllm", json.dumps({**VLLM, "output_lens": [3, 0, "x"]}),
         r"request 3, output_lens: got 'x', allowed: whole numbers"),
        ("vllm", json.dumps({**VLLM, "ttfts": [], "start_times": 5}), r"Expected `array"),
        ("vllm", lines(VLLM, VLLM), r"trailing characters .*allowed: one JSON object"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_file_place_value_and_what_is_allowed(
    tmp_path: Path, kind: str, text: str, said: str
) -> None:
    path = written(tmp_path / "bad", text)
    with pytest.raises(TraceError, match=said) as told:
        Trace(path, kind).plan()
    assert str(told.value).startswith(str(path))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"format": "excel"}, "format: got 'excel', allowed: azure, burstgpt, mooncake, vllm"),
        ({"time_scale": 0.0}, "time_scale: got 0.0, allowed: above 0"),
        ({"length_scale": float("nan")}, "length_scale: got nan, allowed: above 0"),
        ({"context_tokens": 1}, "context_tokens: got 1, allowed: 2 or more"),
        ({"length_scale": 0.01},
         "length_scale: got 0.01, allowed: 0.015625 or more, as a block of 512 tokens"),
    ],
)  # fmt: skip
def test_a_replay_that_cannot_be_is_told_what_is_allowed(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Trace(Path("trace"), **{"format": "mooncake", **how})


def test_a_file_is_read_as_it_is_sent(tmp_path: Path) -> None:
    path = written(tmp_path / "conv.csv", AZURE_2023 + "yesterday,1,2\n")
    requests = Trace(path, "azure").requests()
    assert [next(requests).prompt_tokens, next(requests).prompt_tokens] == [374, 396]
    with pytest.raises(TraceError, match="line 4"):
        next(requests)


def test_times_and_lengths_are_scaled_and_every_length_is_one_at_least(tmp_path: Path) -> None:
    path = written(tmp_path / "burst.csv", BURSTGPT_3 + "19440162,,1,ChatGPT,1,1,2,API log\n")
    assert seen(path, time_scale=0.5, length_scale=0.1) == [
        (0.0, 91, 45), (25.75, 4, 3), (26.0, 1, 1),
    ]  # fmt: skip


def test_a_replay_ends_after_so_many_requests_or_so_many_seconds_of_sending(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", lines(*MOONCAKE))
    assert len(asked(path, requests_max=2)) == 2
    assert len(asked(path, seconds_max=3.0)) == 1
    assert len(asked(path, seconds_max=3.0, time_scale=0.9)) == 3


def test_requests_without_prompt_or_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    plan = Trace(written(tmp_path / "burst.csv", BURSTGPT_1), "burstgpt").plan()
    assert (plan.requests, plan.left_out, plan.prompt_tokens, plan.output_tokens) == (
        2, 1, 1559, 248,
    )  # fmt: skip


def test_what_does_not_fit_the_context_is_cut_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", lines(*MOONCAKE))
    trace = Trace(path, "mooncake", context_tokens=900)
    plan = trace.plan()
    fitted = [(one.prompt_tokens, one.output_tokens) for one in trace.requests()]
    assert fitted == [(450, 450), (860, 40), (513, 3)]
    assert (plan.prompts_cut, plan.answers_cut, plan.seconds) == (2, 1, 3.0)


def test_equal_hash_ids_are_equal_tokens_and_others_are_not(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", lines(*MOONCAKE))
    first, second, third = (one.prompt() for one in asked(path, length_scale=0.125))
    assert [len(first), len(second), len(third)] == [188, 150, 65]
    assert first[:128] == second[:128]
    assert first[128:150] != second[128:]
    assert third[64] == first[64]  # block 1, though it is another prompt's second one as well
    assert third[:64] != first[:64]
    assert min(map(min, (first, second, third))) >= 32
    assert max(map(max, (first, second, third))) <= 126


def test_repeated_tokens_are_those_of_blocks_an_earlier_prompt_began_with(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", lines(*MOONCAKE, MOONCAKE[1]))
    assert Trace(path, "mooncake").plan().repeated_tokens == 2 * 512 + 1200
    # A cut prompt has kept fewer blocks, and 600 + 40 tokens pass the context by 140.
    assert Trace(path, "mooncake", context_tokens=500).plan().repeated_tokens == 460 + 460


def test_prompts_are_the_same_for_the_same_seed_and_unlike_for_another(tmp_path: Path) -> None:
    path = written(tmp_path / "conv.csv", AZURE_2023)
    first, second = asked(path)
    assert first.prompt() == asked(path)[0].prompt()
    assert first.prompt()[:16] != second.prompt()[:16]
    assert first.prompt()[:16] != asked(path, seed=1)[0].prompt()[:16]
    assert first.id != asked(path, seed=1)[0].id


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6, unique=True),
    st.integers(1, 512),
    st.sampled_from([1 / 64, 1 / 16, 0.3, 1.0, 1.7]),
    st.integers(0, 2**64),
)
def test_a_prompt_has_its_length_and_whole_blocks_whatever_the_scale(
    blocks: list[int], rest: int, scale: float, seed: int
) -> None:
    row = Row(1, 0, (len(blocks) - 1) * 512 + rest, 1, tuple(blocks))
    trace = Trace(Path("none"), "mooncake", length_scale=scale, seed=seed)
    prompt, _ = trace._lengths(row)
    block = trace.scaled_block_tokens
    assert (len(blocks) - 1) * block < prompt <= len(blocks) * block
    request = TraceRequest(
        at_s=0.0, prompt_tokens=prompt, output_tokens=1, id="x", row=row, block_tokens=block,
        seed=seed,
    )  # fmt: skip
    assert len(request.prompt()) == prompt


def test_the_time_of_a_row_is_kept_to_the_microsecond(tmp_path: Path) -> None:
    path = written(tmp_path / "conv.csv", AZURE_2023)
    first, second = (row.at_us for row in FORMATS["azure"].read(path))
    assert timedelta(microseconds=second - first) == timedelta(seconds=4, microseconds=314579)
