"""`trimtab objective` and `trimtab contract`: what is promised, from files, over the REST API."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controlplane.client import Client, Refused, Stop
from controlplane.columns import table
from slo.openslo import (
    FILE_CHARS_MAX,
    Document,
    FileError,
    contract_document,
    documents,
    objective_document,
    text_of,
)

DOCUMENT_OF = {"objectives": objective_document, "contracts": contract_document}


def add_arguments(command: argparse.ArgumentParser, noun: str) -> None:
    verbs = command.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")

    def add(name: str, about: str) -> Any:
        verb = verbs.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        verb.add_argument("--url", help="control plane (default: TRIMTAB_PUBLIC_URL)")
        return verb.add_argument

    if noun == "objective":
        argument = add("apply", "create and update what files declare, contracts too: all or none")
        argument("-f", "--file", action="append", required=True, help="YAML; - is standard input")
        argument("--dry-run", action="store_true", help="say what would change, only")
    add("list", f"every {noun} and how it stands")
    add("get", f"print the {noun} as the file that declares it")(
        "slug", metavar="SLUG", help="as listed"
    )
    add("delete", f"delete the {noun} and what was counted for it")(
        "slug", metavar="SLUG", help="as listed"
    )


def run(client: Client, options: argparse.Namespace) -> None:
    """Raises Stop."""
    noun = f"{options.command}s"
    if options.verb == "apply":
        apply(client, options.file, dry_run=options.dry_run)
    elif options.verb == "list":
        heads, cells = TABLE_OF[noun]
        none = f"No {options.command} yet. Declare one: trimtab objective apply -f FILE"
        print(*table(heads, map(cells, client.rows(noun)), none=none), sep="\n")
    elif options.verb == "get":
        row = client.get(f"{noun}/{quote(options.slug, safe='')}/")
        sys.stdout.write(text_of([DOCUMENT_OF[noun](row)]))
    else:
        client.call("DELETE", f"/api/v1/{noun}/{quote(options.slug, safe='')}/")
        print(f"Deleted {options.command} {options.slug}.")


def objective_row(row: dict[str, Any]) -> tuple[str, ...]:
    standing = row["standing"]
    left = standing["budget_left"]
    known = "no data" if left is None else f"{left:.0%}"
    state = standing["state"] if row["enabled"] else "disabled"
    return row["slug"], state, known, row["service"], row["good_event"]


def contract_row(row: dict[str, Any]) -> tuple[str, ...]:
    accrued = row["accrued"]
    if accrued is None:
        owed = f"from {row['starts_on']}"
    elif accrued["percent"] is None:
        owed = "nothing measured yet"
    else:
        owed = f"{accrued['percent']:g} % of the fee"
        if accrued["amount"] is not None:
            owed += f", {accrued['amount']:,.2f} {row['currency']}"
    return row["slug"], row["period"], row["provider"], row["consumer"], owed


TABLE_OF: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[str, ...]]]] = {
    "objectives": (("OBJECTIVE", "STATE", "BUDGET LEFT", "SERVICE", "GOOD IS"), objective_row),
    "contracts": (("CONTRACT", "PER", "PROVIDER", "CONSUMER", "OWED SO FAR"), contract_row),
}


# --- apply ----------------------------------------------------------------------------------------


def apply(client: Client, files: list[str], *, dry_run: bool) -> None:
    """Raises Stop naming file, line and field of what does not fit; then nothing was written."""
    found: dict[str, list[tuple[str, Document]]] = {"objectives": [], "contracts": []}
    for name in files:
        try:
            for document in documents(_read(name)):
                found[document.noun].append((name, document))
        except FileError as error:
            raise Stop(f"{_shown_name(name)}:{error.line}: {error}") from None
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
        reason = getattr(error, "strerror", None) or str(error)
        raise Stop(f"cannot read {_shown_name(name)}: {reason}") from None


def _shown_name(name: str) -> str:
    return "standard input" if name == "-" else name


def _placed(refused: Refused, found: dict[str, list[tuple[str, Document]]]) -> Stop:
    """`objectives[2].spec.threshold_ms` as a place in the file."""
    noun, _, rest = (refused.param or "").partition("[")
    index, _, param = rest.partition("].")
    if noun not in found or not index.isdigit() or int(index) >= len(found[noun]):
        return refused
    name, document = found[noun][int(index)]
    path, line = document.at(param)
    return Stop(f"{_shown_name(name)}:{line}: {path}: {refused}")


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
