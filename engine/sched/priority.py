"""Whose turn it is: three queues that share the engine by weight, and an order within each.

**Between queues**: while several wait, each gets tokens in proportion to its weight. What a queue
was served (tokens computed ÷ weight, counted while anyone waits) says who is behind, and that one
is next (Sheng et al., "Fairness in Serving Large Language Models", OSDI'24; start-time fair
queueing: Goyal et al., SIGCOMM'96). So what one queue leaves others take, and no queue starves. One
that begins to wait starts at the level of those that wait already: idling earns nothing.

**Within a queue**: 0.8 · length · log2(free slots + 1) ÷ 10, the greatest first. Free slots are the
same for all, so the longest goes first; a second of waiting counts as AGING_TOKENS_PER_S tokens of
length, so that nobody is overtaken by who came later than his length explains.

**Who gives way** when the KV pool is short: the lowest queue, of it the latest admitted; each time
it had to raises a request by one queue, so that it comes to its end.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from engine.sched.request import Request

WEIGHTS = {"low": 0.25, "normal": 1.0, "high": 2.0}  # by queue; realtime goes to the high one
QUEUES = tuple(WEIGHTS)
HIGHEST = len(QUEUES) - 1
AGING_TOKENS_PER_S = 1024


def queue_of(request: Request) -> int:
    return min(request.priority, HIGHEST)


def turn_of(request: Request) -> tuple[bool, float]:
    """Sorts a queue: who was sent back first, then who came as early as his length counts for.

    With the same free slots for all, what is compared is length + AGING · (now − arrived); turned
    round and divided by AGING, `now` falls away: the order of two never changes while they wait.
    """
    return not request.preemptions, request.arrived - len(request.tokens) / AGING_TOKENS_PER_S


class Priority:
    """The policy of one scheduler. Off (`on` False), it is first come first served, latest gives
    way. `served` by queue; `waits`: which of them waited when last looked at."""

    def __init__(self) -> None:
        self.on = False
        self._forget()

    def switch(self, on: bool) -> None:
        if on != self.on:
            self.on = on
            self._forget()

    def ordered(self, waiting: deque[Request], count: int) -> deque[Request]:
        """All of `waiting`, of which the first `count` stand in the order of their turn."""
        if not self.on or not waiting:
            return waiting
        queues: list[list[Request]] = [[] for _ in QUEUES]
        for request in waiting:
            queues[queue_of(request)].append(request)
        for queue in queues:
            queue.sort(key=turn_of)
            queue.reverse()  # the next one last, to be popped
        self._level(frozenset(i for i, queue in enumerate(queues) if queue))
        served, left = self.served.copy(), set(self.waits)
        order: list[Request] = []
        while left and len(order) < count:
            i = min(left, key=lambda i: (served[i], -i))
            order.append(queues[i].pop())
            served[i] += len(order[-1].tokens) / WEIGHTS[QUEUES[i]]
            if not queues[i]:
                left.remove(i)
        return deque(chain(order, *map(reversed, queues)))

    def charge(self, decodes: list[Request], chunks: list[tuple[Request, int]], idle: bool) -> None:
        """A step computes these; `idle`: nobody is left waiting, so nobody is behind."""
        if not self.on:
            return
        if idle:
            self._forget()
            return
        for request in decodes:
            self._serve(request, 1)
        for request, tokens in chunks:
            self._serve(request, tokens)

    def victim(self, running: list[Request]) -> Request:
        """Of those that run, in order of admission, who gives its KV blocks back."""
        if not self.on:
            return running[-1]
        return min(reversed(running), key=lambda one: queue_of(one) + one.preemptions)

    def budgets(self, step_tokens: int) -> dict[str, float]:
        """Of the tokens of a step, what each queue that waits is entitled to; the others: 0."""
        waits = self.waits if self.on else frozenset()
        weights = sum(WEIGHTS[QUEUES[i]] for i in waits)
        return {
            name: step_tokens * WEIGHTS[name] / weights if i in waits else 0.0
            for i, name in enumerate(QUEUES)
        }

    def _forget(self) -> None:
        self.served = [0.0] * len(QUEUES)
        self.waits: frozenset[int] = frozenset()

    def _level(self, now: frozenset[int]) -> None:
        """Who begins to wait stands where the one that is furthest behind of the others does."""
        level = min((self.served[i] for i in now & self.waits), default=max(self.served))
        for i in now - self.waits:
            self.served[i] = max(self.served[i], level)
        self.waits = now

    def _serve(self, request: Request, tokens: int) -> None:
        queue = queue_of(request)
        self.served[queue] += tokens / WEIGHTS[QUEUES[queue]]
