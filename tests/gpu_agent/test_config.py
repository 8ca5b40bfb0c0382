"""Settings: where they come from, which one wins, and how a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_agent.config import SETTINGS, Config, ConfigError, EngineConfig, load, parser

TOKENS = {"TRIMTAB_AGENT_TOKEN": "a", "TRIMTAB_INGEST_TOKEN": "i"}


def settings(tmp_path: Path, *argv: str, **environ: str) -> Config:
    environ = {"TRIMTAB_HOME": str(tmp_path), **TOKENS, **environ}
    return load(["--node", "n1", *argv], environ, adapters=["reference", "vllm"])


def test_defaults(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert (config.scrape_s, config.health_port) == (5.0, 8200)
    assert (config.spool_bytes_max, config.spool_age_s_max) == (268_435_456, 28_800.0)
    assert config.state_dir == tmp_path / "agent-n1"
    assert config.stop_file == tmp_path / "agent-n1/STOP"
    assert config.engines == ()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("scrape_s = 1\nhealth_port = 1\ntimeout_s = 1\n")
    config = settings(
        tmp_path,
        *("--config", str(file), "--scrape-s", "3"),
        TRIMTAB_AGENT_SCRAPE_S="2",
        TRIMTAB_AGENT_HEALTH_PORT="2",
    )
    assert (config.scrape_s, config.health_port, config.timeout_s) == (3, 2, 1)


def test_engines_from_each_place(tmp_path: Path) -> None:
    one = EngineConfig("e0", "chat", "reference", "http://h:1")
    text = "name=e0,service=chat,url=http://h:1/"
    assert settings(tmp_path, "--engine", text).engines == (one,)
    assert settings(tmp_path, TRIMTAB_AGENT_ENGINES=text).engines == (one,)
    file = tmp_path / "agent.toml"
    file.write_text('[[engines]]\nname = "e0"\nservice = "chat"\nurl = "http://h:1"\n')
    assert settings(tmp_path, "--config", str(file)).engines == (one,)


def test_the_agents_id_is_made_once(tmp_path: Path) -> None:
    first = settings(tmp_path).agent_id
    assert settings(tmp_path).agent_id == first
    (tmp_path / "agent-n1/agent_id").write_text("me")
    with pytest.raises(ConfigError, match="agent_id: got 'me', want a UUID"):
        settings(tmp_path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--scrape-s", "0"], "--scrape-s: got '0', want a number from 0.1 to 3600"),
        (["--scrape-s", "fast"], "--scrape-s: got 'fast'"),
        (["--scrape-s", "nan"], "--scrape-s: got 'nan', want a number"),
        (["--health-port", "70000"], "got '70000', want a whole number from 0 to 65535"),
        (["--otlp-url", "localhost:4318"], "--otlp-url: got 'localhost:4318', want http://"),
        (["--otlp-url", "http://me:pw@h"], "want a URL without user or password"),
        (["--node", "a b"], "--node: got 'a b', want 1 to 63 letters"),
        (["--ca-file", "/none"], "--ca-file: got '/none', want a file that is there"),
        (["--gpu", "maybe"], "--gpu: got 'maybe', want on or off"),
        (["--engine", "e0"], "--engine: got 'e0', want name=N,service=S,adapter=A,url=U"),
        (["--engine", "name=e,service=s"], "want name, service, adapter, url"),
        (
            ["--engine", "name=e,service=s,adapter=x,url=http://h"],
            "engine adapter: got 'x', allowed: reference, vllm",
        ),
        (["--engine", "name=e,service=s,url=ftp://h"], "engine url: got 'ftp://h'"),
        (["--engine", "name=e,service=s,url=http://h"] * 2, "two are called 'e'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    tmp_path: Path, argv: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, *argv)
    assert words in str(caught.value)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("scrap_s = 1\n")
    with pytest.raises(ConfigError, match=r"scrap_s: allowed: agent_token_file, "):
        settings(tmp_path, "--config", str(file))
    file.write_text("scrape_s =")
    with pytest.raises(ConfigError, match=r"agent\.toml: "):
        settings(tmp_path, "--config", str(file))


def test_tokens_come_from_environment_or_file_and_are_never_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent_token: none given, set TRIMTAB_AGENT_TOKEN or"):
        settings(tmp_path, TRIMTAB_AGENT_TOKEN="")
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    config = settings(tmp_path, "--agent-token-file", str(secret), TRIMTAB_AGENT_TOKEN="")
    assert config.agent_token == "s3cret"
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, TRIMTAB_AGENT_TOKEN="s3 cret")
    assert "s3" not in str(caught.value)


def test_help_names_every_setting() -> None:
    text = parser().format_help()
    for setting in SETTINGS:
        assert "--" + setting.name.replace("_", "-") in text
    assert "token" not in {setting.name for setting in SETTINGS}
