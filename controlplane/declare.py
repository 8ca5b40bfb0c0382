"""`trimtab objective` and `trimtab contract`: what is promised, from files, over the REST API."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controlplane.client import Client, Refused, Stop
from slo.openslo import (
    FILE_CHARS_MAX,
    Document,
    FileError,
    contract_document,
    documents,
    objective_document,
    text_of,
)

ABOUT = {
    "objective": "Promise something: apply files, list, get, delete.",
    "contract": "What misses cost, and have cost so far: list, get, delete.",
}
DOCUMENT_OF = {"objectives": objective_document, "contracts": contract_document}


def add_arguments(command: argparse.ArgumentParser, noun: str) -> None:
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB")
    if noun == "objective":
        about = "Create and update what files declare, objectives and contracts: all or none."
        apply_ = verbs.add_parser("apply", help=about, description=about)
        apply_.add_argument(
            "-f", "--file", action="append", required=True, help="YAML; - is standard input"
        )
        apply_.add_argument("--dry-run", action="store_true", help="say what would change, only")
    verbs.add_parser("list", help=f"Each {noun} and how it stands.")
    get = verbs.add_parser("get", help=f"A {noun} as the file that declares it.")
    delete = verbs.add_parser("delete", help=f"Delete a {noun} and what was counted for it.")
    for one in (get, delete):
        one.add_argument("slug")
    for one in verbs.choices.values():
        one.add_argument("--url", help="control plane (default: TRIMTAB_PUBLIC_URL)")


def run(client: Client, options: argparse.Namespace) -> None:
    """Raises Stop."""
    noun = f"{options.command}s"
    if options.verb == "apply":
        apply(client, options.file, dry_run=options.dry_run)
    elif options.verb == "list":
        for row in client.rows(noun):
            print(ROW_OF[noun](row))
    elif options.verb == "get":
        row = client.get(f"{noun}/{quote(options.slug, safe='')}/")
        sys.stdout.write(text_of([DOCUMENT_OF[noun](row)]))
    else:
        client.call("DELETE", f"/api/v1/{noun}/{quote(options.slug, safe='')}/")
        print(f"Deleted {options.command} {options.slug}.")


def objective_row(row: dict[str, Any]) -> str:
    standing = row["standing"]
    left = standing["budget_left"]
    known = "no data" if left is None else f"{left:.0%} of the budget left"
    state = standing["state"] if row["enabled"] else "disabled"
    return f"{row['slug']:<24}  {state:<8}  {row['service']}: {row['good_event']}, {known}"


def contract_row(row: dict[str, Any]) -> str:
    accrued = row["accrued"]
    if accrued is None:
        owed = f"from {row['starts_on']}"
    elif accrued["percent"] is None:
        owed = "nothing measured yet"
    else:
        owed = f"{accrued['percent']:g} % of the fee so far"
        if accrued["amount"] is not None:
            owed += f", {accrued['amount']:,.2f} {row['currency']}"
    between = f"{row['provider']} to {row['consumer']}"
    return f"{row['slug']:<24}  {row['period']:<5}  {between}: {owed}"


ROW_OF = {"objectives": objective_row, "contracts": contract_row}


# --- apply ----------------------------------------------------------------------------------------


def apply(client: Client, files: list[str], *, dry_run: bool) -> None:
    """Raises Stop naming file, line and field of what does not fit; then nothing was written."""
    found: dict[str, list[tuple[str, Document]]] = {"objectives": [], "contracts": []}
    for name in files:
        try:
            for document in documents(_read(name)):
                found[document.noun].append((name, document))
        except FileError as error:
            raise Stop(f"{name}:{error.line}: {error}") from None
    body: dict[str, Any] = {n: [d.spec for _, d in pairs] for n, pairs in found.items()}
    try:
        answer = client.call(
            "POST", "/api/v1/declarations/", json={**body, "dry_run": dry_run}
        ).json()
    except Refused as refused:
        raise _placed(refused, found) from None
    _tell(answer, dry_run)


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read(FILE_CHARS_MAX + 1)
        with Path(name).open(encoding="utf-8") as file:
            return file.read(FILE_CHARS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise Stop(f"cannot read {name}: {error}") from None


def _placed(refused: Refused, found: dict[str, list[tuple[str, Document]]]) -> Stop:
    """`objectives[2].spec.threshold_ms` as a place in the file."""
    noun, _, rest = (refused.param or "").partition("[")
    index, _, param = rest.partition("].")
    if noun not in found or not index.isdigit() or int(index) >= len(found[noun]):
        return refused
    name, document = found[noun][int(index)]
    path, line = document.at(param)
    return Stop(f"{name}:{line}: {path}: {refused}")


def _tell(answer: dict[str, Any], dry_run: bool) -> None:
    counts = {"created": 0, "changed": 0, "unchanged": 0}
    for noun in ("objectives", "contracts"):
        for one in answer[noun]:
            counts[one["outcome"]] += 1
            print(f"{noun[:-1]} {one['slug']}: {one['outcome']}")
            width = max((len(change["field"]) for change in one["changes"]), default=0)
            for change in one["changes"]:
                steps = _shown(change["after"])
                if one["outcome"] == "changed":
                    steps = f"{_shown(change['before'])} → {steps}"
                print(f"    {change['field']:<{width}}  {steps}")
            if one["note"]:
                print(f"    {one['note']}")
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    print(f"{told or 'Nothing declared'}.{' Dry run: nothing was written.' if dry_run else ''}")


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)
