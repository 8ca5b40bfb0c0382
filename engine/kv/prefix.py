"""Which cached blocks begin a sequence: a chain of hashes, one for each full block of tokens.

A block's hash covers its tokens, all tokens before them, and the salt of who asked (the request
field `cache_salt`), so equal hashes mean equal KV, and nobody is served from another salt's blocks.
Blocks of sequences that ended stay until the pool needs them. The design is vLLM's automatic prefix
caching (hash chain, reference counts, least recently used first and of a sequence its tail first);
RadixAttention (Zheng et al., arXiv:2312.07104) finds the same prefixes with a tree.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from engine.kv.allocator import Allocator

HASH_BYTES = 32  # whoever finds two inputs of one hash reads another's cache: 2^128 tries
TTL_JITTER = 0.1  # of the TTL, up and down: what was cached together is not lost together
AWAITED_TOKENS_MIN = 32  # fewer are computed twice rather than waited for


@dataclass(eq=False)
class Chain:
    """One sequence in the cache. `hashes[i]` is that of its full block i, `root` what precedes.

    `kept`: how many of its blocks the cache has taken in. Of no use to any index but `index`.
    `awaits`: while it waits for another sequence, the last block that this one is computing for it.
    """

    index: dict[bytes, int]
    root: bytes
    hashes: list[bytes] = field(default_factory=list)
    kept: int = 0
    awaits: bytes = b""

    def extend(self, tokens: np.ndarray, block_size: int) -> None:
        """Hashes the full blocks of `tokens` (int64, the whole sequence) not hashed yet."""
        last = self.hashes[-1] if self.hashes else self.root
        for i in range(len(self.hashes), len(tokens) // block_size):
            block = blake2b(last, digest_size=HASH_BYTES)
            block.update(tokens[i * block_size : (i + 1) * block_size].data)
            last = block.digest()
            self.hashes.append(last)


class PrefixCache:
    """Finds, takes and keeps cached blocks of one allocator; of the step thread only.

    A sequence takes part from its admission (`chain`) to its end, or, when the cache was turned on
    or flushed meanwhile, no more. `ttl_s`: what nobody used for that long is not used again; 0: no
    limit. Turned off it finds and keeps nothing, and costs nothing.
    """

    def __init__(
        self,
        allocator: Allocator,
        block_size: int,
        *,
        on: bool = False,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.on = on
        self.ttl_s = ttl_s
        self.clock = clock
        self.random = random.Random(0)
        self._index: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._expires: dict[int, float] = {}
        self._computing: dict[bytes, Chain] = {}
        self.hot: list[tuple[np.ndarray, str]] = []
        self._hot: set[bytes] = set()
        allocator.evicted = self._forget

    def chain(self, chain: Chain | None, tokens: np.ndarray, salt: str) -> Chain | None:
        """The chain of a sequence that waits with these tokens (int64); None while turned off.

        `chain` is the one it had before, which is gone on with where it can be. The last token is
        left out: it is computed in any case, for its logits choose the next.
        """
        if not self.on:
            return None
        if chain is None or chain.index is not self._index:
            chain = self._new_chain(salt)
        chain.extend(tokens[:-1], self.block_size)
        return chain

    def _new_chain(self, salt: str) -> Chain:
        # Marked as a salt, so that no salt can be made to look like a block.
        root = blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt").digest()
        return Chain(self._index, root)

    def outlived(self, chain: Chain | None) -> bool:
        """Whether a sequence of this chain was computed before the cache began, or was flushed.

        Its KV may have been kept, and rounded, otherwise than that of new sequences.
        """
        return self.on and (chain is None or chain.index is not self._index)

    def find(self, chain: Chain | None) -> list[int]:
        """The longest run of cached blocks from the start."""
        if chain is None:
            return []
        if self.ttl_s:
            self._expire(chain)
        found: list[int] = []
        for known in chain.hashes:
            block = self._index.get(known)
            if block is None:
                break
            found.append(block)
        return found

    def waits(self, chain: Chain | None) -> bool:
        """Whether what `awaited` said still holds: no search, for it is asked at every step."""
        return chain is not None and chain.awaits in self._computing

    def awaited(self, chain: Chain | None, found: int) -> bool:
        """Whether another sequence is just now computing enough of what follows `found` blocks."""
        if chain is None or not self._computing:
            return False
        following = chain.hashes[found:]
        computing = [*takewhile(self._computing.__contains__, following)]
        if len(computing) * self.block_size < AWAITED_TOKENS_MIN:
            return False
        chain.awaits = computing[-1]
        return True

    def take(self, chain: Chain | None, blocks: list[int]) -> None:
        """A sequence begins with these blocks, as `find` gave them, and will compute the others."""
        if chain is None:
            return
        self.allocator.share(blocks)
        chain.kept = len(blocks)
        for known in chain.hashes[chain.kept :]:
            self._computing.setdefault(known, chain)

    def keep(
        self, chain: Chain | None, tokens: np.ndarray, table: np.ndarray, computed: int
    ) -> None:
        """Takes in the full blocks (int64 `table`) of a sequence's `computed` first `tokens`."""
        full = computed // self.block_size
        if chain is None or chain.index is not self._index or full <= chain.kept:
            return
        chain.extend(tokens[:computed], self.block_size)
        for known, block in zip(
            chain.hashes[chain.kept : full], table[chain.kept : full].tolist(), strict=True
        ):
            if self._computing.get(known) is chain:
                del self._computing[known]
            # Computed twice, the first stays.
            if known not in self._index:
                self._index[known] = block
                self._hashes[block] = known
                self.allocator.keep(block)
                if known in self._hot:
                    self.allocator.pin(block)
        chain.kept = full

    def release(self, chain: Chain | None, blocks: list[int]) -> None:
        """A sequence ends, or goes back to the queue: its blocks, all of them, in order."""
        if chain is not None:
            for known in chain.hashes[chain.kept :]:
                if self._computing.get(known) is chain:
                    del self._computing[known]
            if self.ttl_s:
                jitter = 1 + self.random.uniform(-TTL_JITTER, TTL_JITTER)
                self._expires.update(dict.fromkeys(blocks, self.clock() + jitter * self.ttl_s))
        self.allocator.release(reversed(blocks))

    @property
    def hot_blocks(self) -> int:
        """How many blocks `pin` holds, or will when they are cached."""
        return len(self._hot)

    def pin(self, tokens: np.ndarray, salt: str) -> None:
        """Full blocks of these tokens (int64) are neither evicted nor do they expire.

        Whenever they are cached: now, and again after a flush.
        """
        chain = self._new_chain(salt)
        chain.extend(tokens, self.block_size)
        self.hot.append((tokens, salt))
        self._hot.update(chain.hashes)
        for known in reversed(chain.hashes):  # the tail first, should they be unpinned
            if known in self._index:
                self.allocator.pin(self._index[known])

    def unpin(self) -> None:
        """Ends all that `pin` did."""
        self.hot, self._hot = [], set()
        self.allocator.unpin()

    def flush(self) -> int:
        """Forgets everything, also what running sequences began with; returns how many blocks.

        Not what is to be pinned.
        """
        forgotten = len(self._hashes)
        for block in self._hashes:
            self.allocator.drop(block)
        # A new index, so that no chain from before adds to it.
        self._index, self._hashes, self._expires, self._computing = {}, {}, {}, {}
        return forgotten

    def turn(self, on: bool) -> None:
        """On or off, from the next admission on."""
        if on is not self.on:
            self.flush()
            self.on = on

    def _expire(self, chain: Chain) -> None:
        now, allocator = self.clock(), self.allocator
        blocks = {self._index[known] for known in chain.hashes if known in self._index}
        for block in blocks - allocator.pinned:
            if not allocator.references(block) and self._expires[block] <= now:
                self._forget(block)
                allocator.drop(block)

    def _forget(self, block: int) -> None:
        del self._index[self._hashes.pop(block)]
        self._expires.pop(block, None)
