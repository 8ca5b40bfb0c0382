"""Incidents that are told as one: the first of them and those that are part of it."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.diagnosis.models import Incident


@dataclass(frozen=True)
class Group:
    """`head` carries the thread of messages; `members` are the others, oldest first."""

    head: Incident
    members: tuple[Incident, ...]

    @property
    def all(self) -> tuple[Incident, ...]:
        return (self.head, *self.members)

    @property
    def over(self) -> bool:
        return all(i.state == Incident.State.CLOSED for i in self.all)

    @property
    def speaker(self) -> Incident:
        """Whose story is told: the first that still burns, the head once none does."""
        return next((i for i in self.all if i.state == Incident.State.OPEN), self.head)


def group_of(incident: Incident) -> Group:
    """The group an incident belongs to, itself alone if to none."""
    head = incident.part_of or incident
    members = head.parts.select_related("objective").order_by("opened_at", "id")
    return Group(head, tuple(members))
