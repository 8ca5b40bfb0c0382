"""Files of objectives and contracts: OpenSLO's form to what the REST API takes, and back.

    apiVersion: openslo/v1
    kind: SLO
    metadata: {name: chat-ttft, displayName: First token within 500 ms}
    spec:
      service: chat
      indicator: {spec: {latency: {threshold_ms: 500}}}
      timeWindow: [{duration: 30d, isRolling: true}]
      objectives: [{target: 0.99}]

Of OpenSLO v1 it has what Trimtab can keep: rolling windows of days, the Occurrences method, one
objective, and Trimtab's own indicators by name; `fastBurn` and `enabled` are ours. A contract is
`apiVersion: trimtab/v1, kind: Contract`. Whatever else a file says is refused, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from difflib import get_close_matches
from typing import Any

import yaml

FILE_CHARS_MAX = 1024 * 1024
NODES_MAX = 20_000
DOCUMENTS_MAX = 200
NESTING_MAX = 16
_DURATION = re.compile(r"([1-9][0-9]{0,3})([dw])")


class FileError(ValueError):
    """What is wrong, in which line and at which field of the file."""

    def __init__(self, line: int, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.line = line


@dataclass(frozen=True)
class Document:
    """One objective or contract: `spec` is what the REST API takes.

    `places` says where in the file a field of `spec` is: "spec.threshold_ms" to the path of it.
    """

    noun: str
    spec: dict[str, Any]
    places: Mapping[str, str]
    lines: Mapping[str, int]

    def at(self, param: str) -> tuple[str, int]:
        """Path and line of a field the API complained about, or of what it stands in."""
        path, rest = param, ""
        while path and path not in self.places:
            path, _, last = path.rpartition(".")
            rest = f".{last}{rest}"
        place = f"{self.places[path]}{rest}" if path else ""
        return place or param, self.line_of(place)

    def line_of(self, path: str) -> int:
        return line_of(self.lines, path)


def line_of(lines: Mapping[str, int], path: str) -> int:
    """The line of the path, or of the nearest thing around it that is in the file."""
    while path and path not in lines:
        path = re.sub(r"(\.[^.\[]*|\[\d+\])$", "", path) if re.search(r"[.\[]", path) else ""
    return lines.get(path, lines[""])


# --- reading --------------------------------------------------------------------------------------


def documents(text: str) -> list[Document]:
    """Every document of a file. Raises FileError."""
    if len(text) > FILE_CHARS_MAX:
        raise FileError(1, "", f"the file is over {FILE_CHARS_MAX} characters, which is the most")
    try:
        nodes = list(yaml.compose_all(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise FileError(mark.line + 1 if mark else 1, "", str(error.problem)) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise FileError(1, "", f"not YAML: {error}") from None
    if len(nodes) > DOCUMENTS_MAX:
        raise FileError(1, "", f"{len(nodes)} documents, allowed: at most {DOCUMENTS_MAX}")
    plains = [_Plain().of(node) for node in nodes]
    return [_document(plain) for plain in plains if plain.value is not None]


@dataclass
class _Plain:
    """A YAML tree as plain values, and the line of every path in it."""

    lines: dict[str, int] = field(default_factory=dict)
    value: Any = None
    nodes: int = 0

    def of(self, node: yaml.Node) -> _Plain:
        self.value = self._read(node, "", 0)
        return self

    def _read(self, node: yaml.Node, path: str, depth: int) -> Any:
        self.lines[path] = line = node.start_mark.line + 1
        self.nodes += 1
        if self.nodes > NODES_MAX or depth > NESTING_MAX:
            raise FileError(line, path, "too much, or nested too deep")
        if isinstance(node, yaml.SequenceNode):
            return [self._read(n, f"{path}[{i}]", depth + 1) for i, n in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise FileError(line, path, str(error)) from None
        return value.isoformat() if isinstance(value, date) else value

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise FileError(key.start_mark.line + 1, path, "a plain name is wanted as key")
            if key.value in found:
                raise FileError(key.start_mark.line + 1, path, f"{key.value!r} stands here twice")
            inner = f"{path}.{key.value}" if path else key.value
            found[key.value] = self._read(value, inner, depth + 1)
            self.lines[inner] = key.start_mark.line + 1
        return found


@dataclass
class _Taken:
    """A part of a document while its keys are taken out one by one; `allowed` are all it may have,
    None: whatever it has. A name that is not is told first, whatever it may be missing for."""

    value: Any
    path: str
    lines: Mapping[str, int]
    allowed: Collection[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, dict):
            got = "missing" if self.value is None else f"got {self.value!r}"
            raise self.error(f"{got}, wanted: names with values")
        self.left = dict(self.value)
        if self.allowed is not None:
            self._refuse_others(self.allowed)

    def _refuse_others(self, allowed: Collection[str]) -> None:
        for key in self.left:
            if key not in allowed:
                near = get_close_matches(key, allowed, n=1)
                meant = f"did you mean {near[0]}? " if near else ""
                raise self.error(f"not supported; {meant}allowed here: {', '.join(allowed)}", key)

    def error(self, message: str, key: str = "") -> FileError:
        path = ".".join(part for part in (self.path, key) if part)
        return FileError(line_of(self.lines, path), path, message)

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def part(self, key: str, allowed: Collection[str] | None) -> _Taken:
        path = ".".join(part for part in (self.path, key) if part)
        return _Taken(self.take(key), path, self.lines, allowed)

    def only(self, key: str, allowed: Collection[str]) -> _Taken:
        """The one object of a list of one."""
        given = self.take(key)
        if not isinstance(given, list) or len(given) != 1:
            raise self.error(f"got {given!r}, wanted: a list of one", key)
        return _Taken(given[0], f"{self.path}.{key}[0]", self.lines, allowed)


def _document(plain: _Plain) -> Document:
    top = _Taken(plain.value, "", plain.lines, ("apiVersion", "kind", "metadata", "spec"))
    version, kind = top.take("apiVersion"), top.take("kind")
    if (version, kind) not in READERS:
        known = "; ".join(f"apiVersion: {v}, kind: {k}" for v, k in READERS)
        raise top.error(f"apiVersion: {version}, kind: {kind}; allowed: {known}")
    reader, fields = READERS[version, kind]
    metadata, spec = top.part("metadata", ("name", "displayName")), top.part("spec", fields)
    found: dict[str, Any] = {"slug": metadata.take("name"), "name": metadata.take("displayName")}
    places = {"slug": "metadata.name", "name": "metadata.displayName"}
    noun = reader(spec, found, places)
    given = {name: value for name, value in found.items() if value is not None}
    return Document(noun, given, places, plain.lines)


def _slo(spec: _Taken, found: dict[str, Any], places: dict[str, str]) -> str:
    method = spec.take("budgetingMethod", "Occurrences")
    if method != "Occurrences":
        raise spec.error(f"got {method!r}, allowed: Occurrences", "budgetingMethod")
    for key, name in (("service", "service"), ("fastBurn", "fast_burn"), ("enabled", "enabled")):
        found[name], places[name] = spec.take(key), f"spec.{key}"
    found["window_days"] = _window_days(spec)
    places["window_days"] = "spec.timeWindow[0].duration"
    indicator = spec.part("indicator", ("spec",)).part("spec", None)
    if len(indicator.left) != 1:
        raise indicator.error("wanted: one indicator by its name, with its parameters")
    ((kind, parameters),) = indicator.left.items()
    found |= {"indicator": kind, "spec": parameters if parameters is not None else {}}
    places |= {"indicator": "spec.indicator.spec", "spec": f"spec.indicator.spec.{kind}"}
    objective = spec.only("objectives", ("target", "targetPercent"))
    found["target"], places["target"] = _target(objective)
    return "objectives"


def _window_days(spec: _Taken) -> int | None:
    if "timeWindow" not in spec.left:
        return None
    window = spec.only("timeWindow", ("duration", "isRolling"))
    duration, rolling = window.take("duration"), window.take("isRolling", True)
    if rolling is not True:
        raise window.error(f"got {rolling!r}, allowed: true, for windows roll", "isRolling")
    match = _DURATION.fullmatch(str(duration))
    if match is None:
        raise window.error(f"got {duration!r}, allowed: days or weeks, as 30d or 4w", "duration")
    return int(match[1]) * (7 if match[2] == "w" else 1)


def _target(objective: _Taken) -> tuple[Any, str]:
    target, percent = objective.take("target"), objective.take("targetPercent")
    if (target is None) == (percent is None):
        raise objective.error("wanted: target or targetPercent, one of them")
    if percent is None:
        return target, f"{objective.path}.target"
    if isinstance(percent, bool) or not isinstance(percent, int | float):
        raise objective.error(f"got {percent!r}, wanted: a number", "targetPercent")
    return round(percent / 100, 12), f"{objective.path}.targetPercent"


def _contract(spec: _Taken, found: dict[str, Any], places: dict[str, str]) -> str:
    for name, key in CONTRACT_FIELDS.items():
        found[name], places[name] = spec.take(key), f"spec.{key}"
    if "fee" in spec.left:
        fee = spec.part("fee", ("amount", "currency"))
        found["fee"], places["fee"] = fee.take("amount"), "spec.fee.amount"
        found["currency"], places["currency"] = fee.take("currency"), "spec.fee.currency"
    return "contracts"


Reader = Callable[[_Taken, dict[str, Any], dict[str, str]], str]
SLO_FIELDS = (
    "service", "indicator", "timeWindow", "budgetingMethod", "objectives", "fastBurn", "enabled",
)  # fmt: skip
CONTRACT_FIELDS = {  # as the REST API calls them → as a file does
    "provider": "provider", "consumer": "consumer", "objectives": "objectives",
    "period": "period", "terms": "penalty", "starts_on": "startsOn",
}  # fmt: skip
READERS: dict[tuple[Any, Any], tuple[Reader, Collection[str]]] = {
    ("openslo/v1", "SLO"): (_slo, SLO_FIELDS),
    ("trimtab/v1", "Contract"): (_contract, (*CONTRACT_FIELDS.values(), "fee")),
}


# --- writing --------------------------------------------------------------------------------------


def text_of(documents_: Iterable[Mapping[str, Any]]) -> str:
    """The file that declares them."""
    dumped: str = yaml.safe_dump_all(
        documents_, sort_keys=False, allow_unicode=True, width=100, explicit_start=True
    )
    return dumped


def objective_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the REST API answers of an objective, as a document that declares the same."""
    return {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": row["slug"], "displayName": row["name"]},
        "spec": {
            "service": row["service"],
            "indicator": {"spec": {row["indicator"]: row["spec"]}},
            "timeWindow": [{"duration": f"{row['window_days']}d", "isRolling": True}],
            "budgetingMethod": "Occurrences",
            "objectives": [{"target": row["target"]}],
            "fastBurn": row["fast_burn"],
            "enabled": row["enabled"],
        },
    }


def contract_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the REST API answers of a contract, as a document that declares the same."""
    spec = {
        "provider": row["provider"],
        "consumer": row["consumer"],
        "objectives": row["objectives"],
        "period": row["period"],
        "penalty": row["terms"],
        "startsOn": row["starts_on"],
    }
    if row["fee"] is not None:
        spec["fee"] = {"amount": row["fee"], "currency": row["currency"]}
    return {
        "apiVersion": "trimtab/v1",
        "kind": "Contract",
        "metadata": {"name": row["slug"], "displayName": row["name"]},
        "spec": spec,
    }
