"""Microsoft Teams, through a Workflows (Power Automate) webhook.

It answers 202 once the flow has the card; whether the flow posts it is not told. Addresses of the
retired Office 365 connectors (webhook.office.com) are not supported.
"""

from __future__ import annotations

from apprise.plugins.workflows import NotifyWorkflows

from controlplane.alerts.chat import Chat

CHANNEL = Chat(
    slug="teams",
    label="Microsoft Teams",
    address="https://….logic.azure.com/workflows/…/triggers/manual/paths/invoke?…&sig=…",
    plugin=NotifyWorkflows,
    parts=NotifyWorkflows.parse_native_url,
    bytes_max=10_000,
    markdown=True,
)
