"""`trimtab replay` against a real engine: every request once, lengths and prefixes as recorded."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from controlplane.demo.house import free_port
from controlplane.replay.__main__ import main
from controlplane.replay.results import COLUMNS, METADATA
from tests.engine.conftest import ROOT, EngineProcess

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = EngineProcess("--prefix-cache", "on")
    yield process
    process.stop()


def mooncake(path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows))
    return path


def counted(url: str, name: str) -> float:
    """Under all its labels."""
    found = re.findall(rf"^vllm:{name}_total\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    assert found, name
    return sum(map(float, found))


def test_a_trace_is_sent_as_recorded_measured_and_written_down(
    engine: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(
        tmp_path / "trace.jsonl",
        (0, 1500, 32, [5, 6, 7]),
        (900, 1200, 40, [5, 6, 8]),
        (900, 0, 0, []),
        (1800, 20_000, 8, list(range(40))),
    )
    out, before = tmp_path / "requests.parquet", counted(engine.url, "prefix_cache_hits")
    asked = [str(path), "--url", engine.url, "--length-scale", "0.125", "--out", str(out)]
    assert main([*asked, "--slo", "ttft=60000,tpot=60000"]) == 0
    said = capsys.readouterr().out
    assert "3 requests in 1.8 s" in said
    assert "1 that had no prompt or no answer" in said
    assert "1 prompts and 0 answers, to fit 2,048 tokens" in said
    assert "3 ok, 0 rejected, 0 lost" in said
    assert "100.0% of all sent" in said
    # Two blocks of 64 tokens, shared as in the trace: the engine finds what the file says it may.
    assert counted(engine.url, "prefix_cache_hits") - before == 128

    table = pq.read_table(out)
    assert set(table.column_names) == {"sent_at", *COLUMNS}
    rows = table.to_pylist()
    assert [row["prompt_tokens"] for row in rows] == [188, 150, 2047]
    assert [row["generated_tokens"] for row in rows] == [4, 5, 1]
    assert [row["trace_prompt_tokens"] for row in rows] == [1500, 1200, 20_000]
    assert [row["trace_row"] for row in rows] == [1, 2, 4]
    assert [row["due_s"] for row in rows] == pytest.approx([0.0, 0.9, 1.8])
    for row in rows:
        assert row["status"] == "ok"
        assert row["sent_s"] - row["due_s"] == pytest.approx(row["late_s"])
        assert 0 < row["ttft_s"] <= row["e2e_s"]
        assert (row["tpot_s"] is None) == (row["generated_tokens"] == 1)
    gap = (rows[1]["sent_at"] - rows[0]["sent_at"]).total_seconds()
    assert gap == pytest.approx(rows[1]["sent_s"] - rows[0]["sent_s"], abs=1e-5)
    how = json.loads(table.schema.metadata[METADATA.encode()])
    assert (how["format"], how["slo_ms"]) == ("mooncake", {"ttft": 60000, "tpot": 60000})


def test_interrupted_it_says_how_it_went_until_then(engine: EngineProcess, tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (0, 80, 4, [1]), (600_000, 80, 4, [2]))
    before = counted(engine.url, "request_success")
    command = [sys.executable, "-m", "controlplane.replay", str(path), "--url", engine.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = ""
        while "1 of 2 sent" not in said:
            line = child.stdout.readline()
            assert line, said
            said += line
        deadline = time.monotonic() + 30
        while counted(engine.url, "request_success") == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # until the client, too, has the answer
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "1 request in 0.0 s, and ended before the trace did" in rest
    assert "1 ok, 0 rejected, 0 lost" in rest


def test_a_bad_line_is_found_before_anything_is_sent(
    engine: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (0, 80, 4, [1]), (5, 80, -4, [2]))
    before = counted(engine.url, "prompt_tokens")
    assert main([str(path), "--url", engine.url]) == 1
    told = capsys.readouterr()
    assert f"trimtab replay: {path}, line 2, output_length: got -4, allowed: whole" in told.err
    assert counted(engine.url, "prompt_tokens") == before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:{port}", "Does an engine run there?"),
        ("127.0.0.1:8100", "url: got '127.0.0.1:8100', want http://host:port"),
        ("http://127.0.0.1:{port}/llm", "want http://host:port"),
    ],
)
def test_where_no_engine_answers_the_address_is_named(
    url: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (0, 80, 4, [1]))
    assert main([str(path), "--url", url.format(port=free_port())]) == 1
    assert said in capsys.readouterr().err


def test_what_cannot_be_written_or_read_is_told_at_once(
    engine: EngineProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (0, 80, 4, [1]))
    assert main([str(path), "--url", engine.url, "--out", str(tmp_path)]) == 1
    assert f"Is a directory: '{tmp_path}'" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--url", engine.url]) == 1
    assert "No such file or directory" in capsys.readouterr().err
