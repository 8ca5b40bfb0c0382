"""The command line of the demo: what is refused is named, with what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.demo.options import options
from controlplane.demo.scenarios import SCENARIOS


def test_help_names_every_scenario_and_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit, match="0"):
        options(["--help"])
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 60
    assert {line.split()[0] for line in shown if line.startswith("  ")} >= set(SCENARIOS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--scenario brust", "invalid choice: 'brust' (choose from 'burst', 'long-prompts'"),
        ("--quiet-min 0", "--quiet-min: got '0', allowed: a number above 0"),
        ("--load nan", "--load: got 'nan', allowed: a number above 0, at most 4"),
        ("--load 99", "--load: got '99', allowed: a number above 0, at most 4"),
        ("--calm 5", "--calm: got '5', allowed: a number above 0, at most 1"),
        ("--scale inf", "--scale: got 'inf', allowed: a number above 0"),
        ("--seed -1", "--seed: got '-1', allowed: a whole number from 0 on"),
        ("--web-port 65536", "--web-port: got '65536', allowed: 1 to 65535"),
        ("--web-port 8100", "--engine-port: 8100 is the web port already"),
        ("--minutes 3.2", "--minutes: got 3.2, allowed: 3.25 or more, the 3 before the shift"),
        ("--quiet-min 40", "--minutes: got 30, allowed: 40.25 or more, the 40 before the shift"),
        ("--scenario burst --trace Makefile", "--trace: not with --scenario"),
        ("--load 0.5 --trace Makefile", "--trace: not with --load"),
        (
            "--trace /nofile",
            "--trace: cannot read '/nofile': No such file or directory. Wanted:",
        ),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(
    capsys: pytest.CaptureFixture[str], given: str, words: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options(given.split())
    assert words in capsys.readouterr().err


def test_a_port_is_where_the_control_planes_setting_has_it_unless_its_option_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMTAB_WEB_PORT", "9000")
    monkeypatch.setenv("TRIMTAB_OTLP_GRPC_PORT", "0")
    chosen = options([])
    assert (chosen.web_port, chosen.otlp_port, chosen.otlp_grpc_port) == (9000, 4318, 0)
    assert options(["--web-port", "9001"]).web_port == 9001
    monkeypatch.setenv("TRIMTAB_OTLP_PORT", "abc")
    with pytest.raises(SystemExit, match="2"):
        options([])
    told = capsys.readouterr().err
    assert "TRIMTAB_OTLP_PORT: got 'abc', allowed: 1 to 65535" in told
    assert "--otlp-port:" not in told
    assert options(["--otlp-port", "9002"]).otlp_port == 9002


def test_the_quiet_is_as_many_control_windows_at_either_pace(tmp_path: Path) -> None:
    assert options(["--home", str(tmp_path)]).quiet_min == 3
    assert options(["--pace", "fast"]).quiet_min == 0.75
    assert options(["--pace", "fast", "--quiet-min", "2"]).quiet_min == 2
