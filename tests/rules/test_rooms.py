"""Who may import whom, where import-linter's contracts cannot say it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]

# folder of plug-ins → what of ours a plug-in may import (NORMS, Rooms)
PLUGINS = {
    "controlplane.diagnosis.causes": {"controlplane.diagnosis.cause", "tracing.types"},
    "controlplane.actions.knobs": {"controlplane.actions.knob"},
    "controlplane.alerts.channels": {
        "controlplane.alerts.channel",
        "controlplane.alerts.post",
        "controlplane.alerts.chat",
    },
    "slo.indicators": {"slo.indicator", "tracing.types"},
    "gpu_agent.sources": {"gpu_agent.source", "gpu_agent.otlp"},
    "gpu_agent.engines": {
        "gpu_agent.engine_adapter",
        "gpu_agent.protocol",
        "gpu_agent.bounded",
    },
}

# When requests come, and who sends them: neither knows the engine's inside.
GENERATOR = {
    *("engine.load", "engine.replay"),
    *("engine.traces", "engine.traces.formats", "engine.traces.trace"),
}
SENDERS = ("controlplane.demo", "controlplane.replay")


@pytest.fixture(scope="session")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "controlplane", "slo", "tracing", "gpu_agent", "engine", cache_dir=None
    )


def modules(folder: str) -> list[str]:
    package = importlib.import_module(folder)
    return [f"{folder}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]


@pytest.mark.parametrize("folder", PLUGINS)
def test_a_plugin_imports_its_contract_and_types_and_nothing_else(
    folder: str, graph: grimp.ImportGraph
) -> None:
    assert modules(folder), f"{folder} is empty"
    for module in modules(folder):
        imported = {
            name
            for name in graph.find_modules_directly_imported_by(module)
            if name.split(".")[0] in {"controlplane", "slo", "tracing", "gpu_agent", "engine"}
        }
        assert imported <= PLUGINS[folder], f"{module} imports {imported - PLUGINS[folder]}"


def test_the_judge_sees_telemetry_through_types_query_and_analysis(
    graph: grimp.ImportGraph,
) -> None:
    allowed = ("tracing.types", "tracing.query", "tracing.analysis")
    for module in {m for m in graph.modules if m.split(".")[0] == "slo"}:
        for name in graph.find_modules_directly_imported_by(module):
            if name.startswith("tracing"):
                assert name.startswith(allowed), f"{module} imports {name}"


def test_demo_and_replay_alone_use_the_engines_load_generator_and_nothing_else_of_it(
    graph: grimp.ImportGraph,
) -> None:
    for module in {m for m in graph.modules if m.split(".")[0] in {"controlplane", "slo"}}:
        for name in graph.find_modules_directly_imported_by(module):
            if name.split(".")[0] == "engine":
                assert module.startswith(("controlplane.demo", "controlplane.replay")), (
                    f"{module} imports {name}"
                )
                assert name in GENERATOR, f"{module} imports {name}"
    for module in GENERATOR:
        for name in graph.find_modules_directly_imported_by(module):
            if name.split(".")[0] == "engine":
                assert name in GENERATOR, f"{module} imports {name}"


def test_every_package_says_in_six_lines_what_lives_there() -> None:
    for path in ROOT.glob("*/**/__init__.py"):
        top = path.relative_to(ROOT).parts[0]
        if top not in {"controlplane", "slo", "tracing", "gpu_agent", "engine"}:
            continue
        if "migrations" in path.parts:
            continue
        text = path.read_text()
        assert text.startswith('"""'), f"{path} has no docstring"
        assert len(text.splitlines()) <= 8, f"{path} is longer than six lines of docstring"


def test_no_room_is_called_utils() -> None:
    for name in ("utils", "helpers", "common", "manager"):
        assert not [p for p in ROOT.glob(f"[a-z]*/**/{name}.py") if "node_modules" not in p.parts
                    and ".venv" not in p.parts]  # fmt: skip
