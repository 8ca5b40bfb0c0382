"""WeCom's group robots. A refusal comes as HTTP 200 with an errcode.

WeCom sends no Retry-After; its limit of 20 messages a minute (45009) is met with our own backoff.
"""

from __future__ import annotations

from apprise.plugins.wecombot import NotifyWeComBot

from controlplane.alerts.chat import Chat

CHANNEL = Chat(
    slug="wecom",
    label="WeCom",
    address="https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=…",
    plugin=NotifyWeComBot,
    parts=NotifyWeComBot.parse_native_url,
    bytes_max=1_700,  # of 2,048 with the title
    code="errcode",
    final={
        40008: "the robot does not take such a message",
        40058: "the robot does not take such a message",
        44004: "the message is empty",
        45002: "the message is too long",
        60020: "this machine's address may not use the robot",
        93000: "the robot's address is unknown; was it removed from the chat?",
        93004: "the robot is switched off",
        93008: "the robot is not in the chat any more",
    },
)
