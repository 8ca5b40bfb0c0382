"""Continuous batching: who runs in the next step, and what came of it.

One step mixes all running decodes (one token each, first come first) with chunks of prompts:
those already begun, then newly admitted ones (continuous batching: Yu et al., OSDI'22; chunked
prefill: Agrawal et al., arXiv:2308.16369; paged KV, preemption by recompute or by swap: Kwon et
al., SOSP'23). Every call comes from the step thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.exec.reblock import slots
from engine.exec.rows import Rows
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import Allocator
from engine.kv.prefix import PrefixCache
from engine.kv.tier import HostTier
from engine.models.tokenizer import ByteTokenizer, Tokenizer
from engine.pause import Pause
from engine.sched.ahead import copy_ahead
from engine.sched.length_window import LengthWindow
from engine.sched.priority import Priority
from engine.sched.request import Finish, Request
from engine.sched.stalls import Stalls

PASSED_REQUESTS_MAX = 32  # that wait for a prefix, or their like, while those behind are admitted


@dataclass
class Chunk:
    """`count` tokens of one sequence from `start` on; `last`: they complete its known tokens."""

    request: Request
    row: int
    start: int
    count: int
    last: bool


@dataclass
class Plan:
    """One step. `decodes[i]` stands in row `rows[i]`; longest context first."""

    decodes: list[Request]
    rows: np.ndarray
    chunks: list[Chunk]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token from this step, in the order of the runner's answer."""
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.last]


@dataclass
class Outcome:
    """What a step brought: `tokens[i]` for `requests[i]`; `gaps_s`: since their last token."""

    requests: list[Request]
    tokens: list[int]
    first: list[Request]
    finished: list[Request]
    gaps_s: np.ndarray


class Scheduler:
    """`waiting` is first come first served, unless `priority` is on; `running` is in order of
    admission."""

    def __init__(
        self, rows: Rows, prefixes: PrefixCache, tokenizer: Tokenizer | None = None
    ) -> None:
        """`tokenizer` says what ends an answer; None: the built-in models'."""
        self.rows = rows
        self.prefixes = prefixes
        tokenizer = tokenizer or ByteTokenizer()
        self.pieces = tokenizer.pieces
        self.ends = np.zeros(len(self.pieces), bool)
        self.ends[list(tokenizer.eos)] = True
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.priority = Priority()
        self.lengths = LengthWindow()
        self.paused = Pause.NOT
        self.preemptions = 0
        self.begun = 0  # requests admitted once and not ended: those that run, and those sent back
        self.left_requests = 0  # of those ever added, how many no longer wait for the first time
        self.left_tokens = 0
        self.prefix_queries = 0  # prompt tokens looked up, and of them found
        self.prefix_hits = 0
        self.deferred = 0  # requests that wait for a prefix, of those that wait
        self.stalls = Stalls()
        self.tier: HostTier | None = None
        self.swapping = False  # who is preempted is copied into the tier

    @property
    def allocator(self) -> Allocator:
        return self.prefixes.allocator

    def add(self, request: Request) -> None:
        assert request.limit <= self.rows.tokens.shape[1]
        self.waiting.append(request)

    def hold_until(self, config: RuntimeConfig) -> float:
        """When an idle engine may start its first waiting request; 0.0 for at once.

        max_wait_ms trades the first request's wait for a fuller first batch; a batch that is
        full already (by requests or by tokens) waits no longer.
        """
        if self.running or not self.waiting or config.max_wait_ms == 0:
            return 0.0
        tokens = sum(len(request.tokens) for request in self.waiting)
        if len(self.waiting) >= config.max_num_seqs or tokens >= config.max_num_batched_tokens:
            return 0.0
        return self.waiting[0].arrived + config.max_wait_ms / 1000

    def plan(self, config: RuntimeConfig, now: float) -> Plan | None:
        """The next step, or None when there is nothing to run, or nothing may."""
        if self.tier is not None:
            self.tier.ahead.end()  # of a step that failed
        if self.paused is Pause.KEEP:
            if self.tier is not None:
                self.tier.ahead.roll_back()
            self.stalls.turn(now)  # nobody is looked at, so nobody stalls
            return None
        budget = config.max_num_batched_tokens
        chunk_tokens = self.lengths.chunk_tokens(config)
        self.priority.switch(config.priority_weights == "on")
        preemptions = self.preemptions
        self.deferred = 0
        self.swapping = config.preemption == "swap"
        known, computed = self.rows.known, self.rows.computed
        running = np.array([request.row for request in self.running], np.int64)
        missing = [*zip(self.running, (known[running] - computed[running]).tolist(), strict=True)]
        begun = [request for request, tokens in missing if tokens > 1]
        decodes = self._grow_decodes([one for one, tokens in missing if tokens == 1][:budget])
        budget -= len(decodes)
        chunks: list[Chunk] = []
        for request in begun:
            if budget <= 0:
                break
            chunk = self._next_chunk(request, min(budget, chunk_tokens))
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.count
        if self.preemptions == preemptions and (self.begun or not self.paused):
            self._admit(config, budget, chunk_tokens, chunks, now)
        self.stalls.turn(now)
        # A later allocation may have taken the blocks of one that was planned before it.
        decodes = [request for request in decodes if request.row >= 0]
        chunks = [chunk for chunk in chunks if chunk.request.row >= 0]
        if not decodes and not chunks:
            return None
        if self.priority.on:
            prompts = [(chunk.request, chunk.count) for chunk in chunks]
            self.priority.charge(decodes, prompts, idle=not self.waiting)
        if self.tier is not None:
            depth = config.prefetch_depth_tokens
            copy_ahead(self.tier, self.prefixes, self.waiting, len(self.running), depth)
        rows = np.array([request.row for request in decodes], np.int64)
        contexts = computed[rows].tolist()
        order = sorted(range(len(rows)), key=contexts.__getitem__, reverse=True)
        return Plan([decodes[i] for i in order], rows[order], chunks)

    def commit(self, plan: Plan, tokens: np.ndarray, began: float, now: float) -> Outcome:
        """Takes over the runner's `tokens` (int64, aligned with `plan.sampled`)."""
        rows = self.rows
        if self.tier is not None:
            self.tier.ahead.end()
            if not plan.chunks:
                self.tier.ahead.timed(now - began)
        rows.computed[plan.rows] += 1
        for chunk in plan.chunks:
            rows.computed[chunk.row] += chunk.count
            chunk.request.chunks.append((began, now, chunk.count))
            self._keep(chunk.request)
        requests = plan.sampled
        last = [chunk.row for chunk in plan.chunks if chunk.last]
        sampled = np.concatenate([plan.rows, np.array(last, np.int64)]) if last else plan.rows
        known = rows.known[sampled]
        rows.tokens[sampled, known] = tokens
        known += 1
        rows.known[sampled] = known
        begun, gaps = rows.begun[sampled], now - rows.touched[sampled]
        first = [one for one, has in zip(requests, begun.tolist(), strict=True) if not has]
        if first:
            gaps = gaps[begun]
            rows.begun[sampled] = True
        for request in first:
            request.first_token = now
        rows.touched[sampled] = now
        stopped = self.ends[tokens] & ~rows.ignore_eos[sampled]
        for i, has in enumerate(rows.has_stop[sampled].tolist()):
            if has:
                stopped[i] |= self._stop_string_ends(requests[i], sampled[i])
        finished = []
        for i, ended in enumerate((stopped | (known >= rows.limit[sampled])).tolist()):
            if ended:
                self._end(requests[i], Finish.STOP if stopped[i] else Finish.LENGTH, now)
                finished.append(requests[i])
        return Outcome(requests, tokens.tolist(), first, finished, gaps)

    def abandon(self, request: Request, finish: Finish, now: float) -> bool:
        """Takes a request out, wherever it stands; False when it had ended already."""
        if request.finish is not None:
            return False
        if request.row < 0:
            self.waiting.remove(request)
            self._leave_queue(request)
            if self.tier is not None:
                self.tier.drop(request)
            self.begun -= bool(request.scheduled)
            request.finish, request.finished = finish, now
        else:
            self._end(request, finish, now)
        return True

    def halve_pool(self) -> None:
        """Takes half of the blocks away; preempts where they are not free.

        Raises NotPossible, nothing changed, when a lone request would not fit any more.
        """
        blocks, one = self.allocator.blocks, self.rows.tables.shape[1]
        if blocks - blocks // 2 < one:
            raise NotPossible(
                "does_not_fit", "", f"half of {blocks} blocks would not hold one sequence of {one}"
            )
        if self.tier is not None:
            self.tier.ahead.roll_back()  # a step that failed has left a piece of its own
        self.prefixes.unpin()
        while not self.allocator.withhold(blocks // 2):
            self._preempt(self.priority.victim(self.running))

    def _end(self, request: Request, finish: Finish, now: float) -> None:
        request.generated = int(self.rows.known[request.row]) - request.prompt_tokens
        request.finish, request.finished = finish, now
        self.begun -= 1
        self._release(request)
        self.running.remove(request)

    def _leave_queue(self, request: Request) -> None:
        if not request.scheduled:
            self.left_requests += 1
            self.left_tokens += request.prompt_tokens

    def _release(self, request: Request) -> None:
        self._keep(request)
        self.prefixes.release(request.chain, self.rows.close(request.row))
        request.row = -1

    def _keep(self, request: Request) -> None:
        """What of it is in full blocks can begin others from now on."""
        rows, row = self.rows, request.row
        computed = int(rows.computed[row])
        self.prefixes.keep(request.chain, rows.tokens[row], rows.tables[row], computed)

    def _admit(
        self, config: RuntimeConfig, budget: int, chunk_tokens: int, chunks: list[Chunk], now: float
    ) -> None:
        """Moves waiting requests into the batch while requests, tokens and blocks allow it.

        Those that begin as one that is being computed wait for it, and let others pass (single
        flight): it runs, and with its end, or its preemption, they go on by themselves. So do those
        of another length than the step's, when there is a window: behind the first in the queue.
        Paused, only those that had begun, and were preempted since, are let in: they go first.
        """
        room = config.max_num_seqs - len(self.running)
        if budget <= 0 or room <= 0:
            return
        self.waiting = self.priority.ordered(self.waiting, room + PASSED_REQUESTS_MAX)
        if self.paused:
            self.waiting = deque(sorted(self.waiting, key=lambda one: not one.scheduled))
        group = self.lengths.group(config, self.allocator, [chunk.request for chunk in chunks])
        passed = 0
        while (
            passed < min(len(self.waiting), PASSED_REQUESTS_MAX)
            and budget > 0
            and len(self.running) < config.max_num_seqs
        ):
            request = self.waiting[passed]
            if self.paused and not request.scheduled:
                break
            if self.tier is not None and self.prefixes.outlived(request.chain):
                self.tier.drop(request)  # or others would begin with it
            request.chain = self.prefixes.chain(request.chain, request.tokens, request.salt)
            if self.prefixes.waits(request.chain):
                self.deferred += 1
                passed += 1
                continue
            found = self.prefixes.find(request.chain)
            start = len(found) * self.rows.block_size
            if self.tier is not None:
                start = max(start, self.tier.tokens(request))
            if self.prefixes.awaited(request.chain, start // self.rows.block_size):
                self.deferred += 1
                passed += 1
                continue
            missing = len(request.tokens) - start
            if group is not None and not group.takes(missing):
                if not group.grown:
                    break
                passed += 1
                continue
            count = min(missing, budget, chunk_tokens)
            needed = self._blocks_to_own(request, start + count)
            needed -= sum(not self.allocator.available(block) for block in found)
            # Room for one more block each, so that admitting does not preempt in the next step.
            spare = 0 if self.allocator.contiguous else len(self.running)
            if self.running and not self.allocator.fits(needed + spare):
                if needed + spare <= self.allocator.free_blocks:
                    self.stalls.held_up = request
                break
            del self.waiting[passed]
            self._leave_queue(request)
            request.row = self.rows.open(
                request.tokens,
                request.limit,
                ignore_eos=request.ignore_eos,
                has_stop=bool(request.stop),
                begun=bool(request.first_token),
            )
            self.running.append(request)
            self.begun += not request.scheduled  # with `running`: what comes next may fail
            self._begin_with(request, found)
            if group is not None:
                group.add(missing)
                if not request.scheduled:
                    self.lengths.saw(request.prompt_tokens)
            request.scheduled = request.scheduled or now
            chunk = self._next_chunk(request, count)
            assert chunk is not None
            chunks.append(chunk)
            budget -= chunk.count

    def _begin_with(self, request: Request, found: list[int]) -> None:
        """Its first blocks are these, computed by others before."""
        row, tokens = request.row, len(found) * self.rows.block_size
        self.prefixes.take(request.chain, found)
        self.rows.append_blocks(row, found)
        self.rows.computed[row] = tokens
        if self.tier is not None:
            self._copy_back(request, self.tier)
        request.to_compute = len(request.tokens) - int(self.rows.computed[row])
        if request.chain is not None and not request.scheduled:
            request.cached_tokens = tokens
            self.prefix_queries += request.prompt_tokens
            self.prefix_hits += tokens

    def _copy_back(self, request: Request, tier: HostTier) -> None:
        """What the tier kept of it, beyond the blocks it begins with and what was copied ahead."""
        first, tokens = int(self.rows.computed[request.row]), tier.tokens(request)
        if tokens <= first:
            tier.drop(request)
            return
        ahead = tier.ahead.take(request, first)
        self.rows.append_blocks(request.row, ahead)
        first = min(first + len(ahead) * self.rows.block_size, tokens)
        fits = self._own(request, tokens)
        assert fits, "it was admitted without room for what was kept of it"
        tier.take(request, first, self._slots(request, first, tokens))
        self.rows.computed[request.row] = tokens

    def _slots(self, request: Request, first: int, end: int) -> np.ndarray:
        return slots(self.rows.layout, request.row, np.arange(first, end))

    def _next_chunk(self, request: Request, tokens_max: int) -> Chunk | None:
        """The next chunk with its blocks; None when the request itself had to be preempted."""
        if request.row < 0:
            return None
        row = request.row
        start, known = int(self.rows.computed[row]), int(self.rows.known[row])
        count = min(tokens_max, known - start)
        if not self._own(request, start + count):
            return None
        return Chunk(request, row, start, count, last=start + count == known)

    def _grow_decodes(self, decodes: list[Request]) -> list[Request]:
        """Gives each decode the block of its next token; those preempted for it drop out."""
        rows = np.array([request.row for request in decodes], np.int64)
        room = self.rows.owned[rows] * self.rows.block_size - self.rows.computed[rows]
        for request, tokens in zip(decodes, room.tolist(), strict=True):
            if tokens <= 0 and request.row >= 0:
                self._own(request, int(self.rows.computed[request.row]) + 1)
        return [request for request in decodes if request.row >= 0]

    def _blocks_to_own(self, request: Request, tokens: int) -> int:
        """For its next `tokens`; in a contiguous pool for all that will ever be computed of it."""
        if self.allocator.contiguous:
            tokens = request.limit - 1  # nobody reads the KV of its last token
        return -(-tokens // self.rows.block_size)

    def _own(self, request: Request, tokens: int) -> bool:
        """Blocks for `tokens` tokens, preempting while the pool is short.

        False when that was the request itself. A lone request always fits (EngineConfig).
        """
        row = request.row
        needed = self._blocks_to_own(request, tokens) - int(self.rows.owned[row])
        if needed <= 0:
            return True
        while (blocks := self.allocator.allocate(needed)) is None:
            victim = self.priority.victim(self.running)
            assert victim is not request or len(self.running) > 1, "the pool is too small for one"
            self._preempt(victim)
            if victim is request:
                return False
        self.rows.append_blocks(row, blocks)
        return True

    def _preempt(self, victim: Request) -> None:
        """Back to the head of the queue with all its tokens; its KV is computed again later.

        Or copied back, when it is swapped and the tier has room.
        """
        computed = int(self.rows.computed[victim.row])
        if self.swapping and self.tier is not None and computed:
            self.tier.put(victim, self._slots(victim, 0, computed))
        victim.tokens = self.rows.tokens[victim.row, : self.rows.known[victim.row]].copy()
        self._release(victim)
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        victim.preemptions += 1
        self.preemptions += 1

    def _stop_string_ends(self, request: Request, row: int) -> bool:
        """Whether the newest token completes a stop string, be it in the middle of its bytes."""
        tokens, newest = self.rows.tokens[row], int(self.rows.known[row]) - 1
        tail = self.pieces[tokens[newest]]
        enough = len(tail) + max(map(len, request.stop)) - 1
        for at in range(newest - 1, request.prompt_tokens - 1, -1):
            if len(tail) >= enough:
                break
            tail = self.pieces[tokens[at]] + tail
        return any(stop in tail for stop in request.stop)
