"""Slack's incoming webhooks. It answers `ok`, or a status with one word such as invalid_token."""

from __future__ import annotations

from apprise.plugins.slack import NotifySlack

from controlplane.alerts.chat import Chat

CHANNEL = Chat(
    slug="slack",
    label="Slack",
    address="https://hooks.slack.com/services/T…/B…/…",
    plugin=NotifySlack,
    parts=NotifySlack.parse_native_url,
    bytes_max=7_500,
)
