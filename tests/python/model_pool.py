"""A slow, obvious model of ``kvcatch.BlockPool``: the oracle of the differential tests.

Dicts, sets and lists only. Placements ``queue`` (vLLM's order) and ``sorted``, eviction ``lru``, no
pins. Block contents are keyed by the tuple of all tokens up to the block's end, chained as nested
tuples.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import InvalidArgument, OutOfBlocks, StaleHandle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Chain = int
"""Identity of a prefix: an index into a table of (parent, tokens of the block)."""


@dataclass(eq=False)
class ModelSequence:
    """One sequence: its blocks in order and the tokens known of it."""

    id: int
    owner: str | None
    tags: dict[str, str]
    salt: object
    tokens: list[int]
    num_tokens: int
    num_committed: int = 0
    hit_tokens: int = 0
    reserved: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: list[Chain] = field(default_factory=list)

    def __index__(self) -> int:
        return self.id


class ModelPrefix:
    """A prompt with the chain of its full blocks."""

    def __init__(self, tokens: list[int], chain: list[Chain], salt: object) -> None:
        self.tokens = tokens
        self.chain = chain
        self.salt = salt

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_full_blocks(self) -> int:
        return len(self.chain)

    def __len__(self) -> int:
        return len(self.tokens)


class ModelPool:
    """The pool's public calls, one obvious statement each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        placement: str = "queue",
        eviction: str = "lru",
        null_block: bool = False,
        blocks_per_page: int = 128,
        seed: int = 0,
    ) -> None:
        if placement not in ("queue", "sorted") or eviction != "lru":
            raise InvalidArgument(
                f"the model has queue and sorted with lru, not {placement}+{eviction}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.placement = placement
        self.eviction = eviction
        self.blocks_per_page = blocks_per_page
        self.null_block = null_block
        self.clean: deque[int] = deque(range(int(null_block), num_blocks))
        self.cached: dict[int, None] = {}
        self.refs: dict[int, int] = {}
        self.content: dict[int, Chain] = {}
        self.index: dict[Chain, list[int]] = {}
        self.chains: dict[tuple[object, tuple[int, ...]], Chain] = {}
        self.live: dict[int, ModelSequence] = {}
        self.next_id = 1

    # counts

    @property
    def num_free(self) -> int:
        return len(self.clean)

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    @property
    def num_active(self) -> int:
        return len(self.refs)

    @property
    def num_pinned(self) -> int:
        return 0

    @property
    def num_reserved(self) -> int:
        return sum(seq.reserved for seq in self.live.values())

    @property
    def available(self) -> int:
        return self.num_free + self.num_cached - self.num_reserved

    @property
    def num_sequences(self) -> int:
        return len(self.live)

    @property
    def largest_run(self) -> int:
        return max(self._runs_of([*self.clean, *self.cached]), default=0)

    def _runs_of(self, blocks: Iterable[int]) -> list[int]:
        """Lengths (blocks) of the runs that ``blocks`` form."""
        lengths: list[int] = []
        last = None
        for block in sorted(blocks):
            if last is not None and block == last + 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
            last = block
        return lengths

    # the chain of prefixes

    def _extend(self, chain: list[Chain], tokens: list[int], salt: object, blocks: int) -> None:
        """Lengthen ``chain`` to the first ``blocks`` full blocks of ``tokens``."""
        size = self.block_size
        while len(chain) < blocks:
            parent = chain[-1] if chain else ("salt", salt)
            key = (parent, tuple(tokens[len(chain) * size : (len(chain) + 1) * size]))
            chain.append(self.chains.setdefault(key, len(self.chains)))

    def prefix(self, tokens: Any, *, salt: object = None) -> ModelPrefix:
        if isinstance(tokens, ModelPrefix):
            return tokens
        known = [int(token) for token in tokens]
        chain: list[Chain] = []
        self._extend(chain, known, salt, len(known) // self.block_size)
        return ModelPrefix(known, chain, salt)

    def _found(self, chain: Iterable[Chain]) -> list[int]:
        """Blocks of the longest findable prefix: the first one committed of equal blocks."""
        blocks: list[int] = []
        for identity in chain:
            if identity not in self.index:
                break
            blocks.append(self.index[identity][0])
        return blocks

    def lookup(self, tokens: Any, *, salt: object = None) -> int:
        return len(self._found(self.prefix(tokens, salt=salt).chain)) * self.block_size

    def lookup_many(self, prefixes: Sequence[ModelPrefix]) -> npt.NDArray[np.int64]:
        return np.array([self.lookup(prefix) for prefix in prefixes], dtype=np.int64)

    # handing out and taking back

    def _forget(self, block: int) -> None:
        """The content of ``block`` can no longer be found."""
        identity = self.content.pop(block, None)
        if identity is not None:
            self.index[identity].remove(block)
            if not self.index[identity]:
                del self.index[identity]

    def _evict_one(self) -> int:
        block = next(iter(self.cached))
        del self.cached[block]
        self._forget(block)
        return block

    def _take(self, n: int) -> list[int]:
        if self.placement == "sorted":
            while len(self.clean) < n:
                self.clean.append(self._evict_one())
            taken = sorted(self.clean)[:n]
            for block in taken:
                self.clean.remove(block)
        else:
            taken = [self.clean.popleft() if self.clean else self._evict_one() for _ in range(n)]
        for block in taken:
            self.refs[block] = 1
        return taken

    def _hit(self, block: int) -> None:
        if block in self.refs:
            self.refs[block] += 1
        else:
            del self.cached[block]
            self.refs[block] = 1

    def _release(self, blocks: list[int]) -> None:
        """Drop one reference to each, tail first."""
        clean: list[int] = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            del self.refs[block]
            if block in self.content:
                self.cached[block] = None
            else:
                clean.append(block)
        self.clean.extendleft(reversed(clean))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _refuse(self, required: int) -> None:
        raise OutOfBlocks(
            f"{required} blocks needed, {self.available} available",
            required,
            self.num_free,
            self.num_cached,
            self.num_reserved,
            self.largest_run,
        )

    def _sequence(self, seq: Any) -> ModelSequence:
        found = self.live.get(int(seq.__index__()))
        if found is None:
            raise StaleHandle(f"sequence {int(seq.__index__())} is not alive")
        return found

    def _batch(self, seqs: Any) -> list[ModelSequence]:
        if isinstance(seqs, ModelSequence):
            return [self._sequence(seqs)]
        return [self._sequence(seq) for seq in seqs]

    @staticmethod
    def _spread(value: Any, n: int) -> list[int]:
        return [int(value)] * n if isinstance(value, (int, np.integer)) else [int(v) for v in value]

    # sequences

    def create(
        self,
        tokens: Any,
        *,
        owner: str | None = None,
        tags: dict[str, str] | None = None,
        salt: object = None,
        num_tokens: int | None = None,
        reserve_tokens: int = 0,
        use_cache: bool = True,
        commit: bool = False,
    ) -> ModelSequence:
        prompt = self.prefix(tokens, salt=salt)
        room = len(prompt) if num_tokens is None else num_tokens
        most = (len(prompt) - 1) // self.block_size
        hit = self._found(prompt.chain[:most])[: room // self.block_size] if use_cache else []
        need = self._blocks_for(room) - len(hit)
        ahead = self._blocks_for(room + reserve_tokens) - self._blocks_for(room)
        waking = sum(block in self.cached for block in hit)
        if need + ahead + waking > self.available:
            self._refuse(need + ahead + waking)
        for block in hit:
            self._hit(block)
        seq = ModelSequence(
            self.next_id,
            owner,
            dict(tags or {}),
            prompt.salt,
            list(prompt.tokens),
            room,
            num_committed=len(hit) * self.block_size,
            hit_tokens=len(hit) * self.block_size,
            reserved=ahead,
            blocks=hit + self._take(need),
            chain=prompt.chain[: len(hit)],
        )
        self.next_id += 1
        self.live[seq.id] = seq
        if commit:
            self._commit(seq, room - seq.num_committed)
        return seq

    def append(self, seqs: Any, n_tokens: Any = 1) -> list[tuple[int, int]]:
        batch = self._batch(seqs)
        counts = self._spread(n_tokens, len(batch))
        refs = dict(self.refs)
        required = own = 0
        for seq, n in zip(batch, counts, strict=True):
            copy = self._must_copy(seq, n, refs)
            if copy:
                refs[seq.blocks[-1]] -= 1
            growth = self._blocks_for(seq.num_tokens + n) - len(seq.blocks)
            required += growth + copy
            own += min(growth + copy, seq.reserved)
        if required - own > self.available:
            self._refuse(required - own)
        copies: list[tuple[int, int]] = []
        for seq, n in zip(batch, counts, strict=True):
            copy = self._must_copy(seq, n, self.refs)
            if not copy and n and seq.num_tokens % self.block_size:
                self._forget(seq.blocks[-1])
            fresh = copy + self._blocks_for(seq.num_tokens + n) - len(seq.blocks)
            taken = self._take(fresh)
            if copy:
                source = seq.blocks.pop()
                self.refs[source] -= 1
                copies.append((source, taken[0]))
            seq.blocks += taken
            seq.num_tokens += n
            seq.reserved -= min(fresh, seq.reserved)
        return copies

    def _must_copy(self, seq: ModelSequence, n: int, refs: dict[int, int]) -> bool:
        return n > 0 and seq.num_tokens % self.block_size > 0 and refs[seq.blocks[-1]] > 1

    def _commit(self, seq: ModelSequence, n: int) -> None:
        before = seq.num_committed // self.block_size
        seq.num_committed += n
        after = seq.num_committed // self.block_size
        self._extend(seq.chain, seq.tokens, seq.salt, after)
        for position in range(before, after):
            block = seq.blocks[position]
            if block not in self.content:
                self.content[block] = seq.chain[position]
                self.index.setdefault(seq.chain[position], []).append(block)

    def commit(self, seqs: Any, tokens: Any = None, counts: Any = None) -> int:
        batch = self._batch(seqs)
        if tokens is None:
            known = [min(len(seq.tokens), seq.num_tokens) - seq.num_committed for seq in batch]
            for seq, n in zip(
                batch, known if counts is None else self._spread(counts, len(batch)), strict=True
            ):
                self._commit(seq, n)
            return 0
        new = [int(token) for token in tokens]
        shares = self._spread(
            len(new) // max(1, len(batch)) if counts is None else counts, len(batch)
        )
        start = 0
        for seq, n in zip(batch, shares, strict=True):
            seq.tokens[seq.num_committed :] = new[start : start + n]
            start += n
            self._commit(seq, n)
        return 0

    def fork(
        self, seq: Any, *, owner: str | None = None, tags: dict[str, str] | None = None
    ) -> ModelSequence:
        parent = self._sequence(seq)
        for block in parent.blocks:
            self.refs[block] += 1
        child = ModelSequence(
            self.next_id,
            parent.owner if owner is None else owner,
            dict(parent.tags if tags is None else tags),
            parent.salt,
            list(parent.tokens),
            parent.num_tokens,
            parent.num_committed,
            parent.hit_tokens,
            0,
            list(parent.blocks),
            list(parent.chain),
        )
        self.next_id += 1
        self.live[child.id] = child
        return child

    def truncate(self, seq: Any, num_tokens: int) -> None:
        found = self._sequence(seq)
        keep = self._blocks_for(num_tokens)
        dropped = found.blocks[keep:]
        found.blocks = found.blocks[:keep]
        self._release(dropped)
        found.num_tokens = num_tokens
        found.num_committed = min(found.num_committed, num_tokens)
        del found.chain[num_tokens // self.block_size :]
        found.tokens = found.tokens[: max(num_tokens, found.num_committed)]

    def reserve(self, seq: Any, num_tokens: int) -> None:
        found = self._sequence(seq)
        blocks = self._blocks_for(found.num_tokens + num_tokens) - len(found.blocks)
        if blocks - found.reserved > self.available:
            self._refuse(blocks - found.reserved)
        found.reserved = blocks

    def free(self, seqs: Any) -> None:
        for seq in self._batch(seqs):
            del self.live[seq.id]
            self._release(seq.blocks)

    def evict(self, n: int) -> int:
        done = min(n, len(self.cached))
        for _ in range(done):
            self.clean.appendleft(self._evict_one())
        return done

    # seeing

    def sequences(self) -> list[ModelSequence]:
        return list(self.live.values())

    def block_ids(self, seq: Any) -> npt.NDArray[np.int32]:
        return np.array(self._sequence(seq).blocks, dtype=np.int32)

    def num_tokens(self, seq: Any) -> int:
        return self._sequence(seq).num_tokens

    def num_committed(self, seq: Any) -> int:
        return self._sequence(seq).num_committed

    def num_runs(self, seqs: Any) -> int:
        return sum(
            position == 0 or block != seq.blocks[position - 1] + 1
            for seq in self._batch(seqs)
            for position, block in enumerate(seq.blocks)
        )

    def block_tables(self, seqs: Any, out: npt.NDArray[np.int32], *, pad: int = -1) -> None:
        for row, seq in zip(out, self._batch(seqs), strict=True):
            row[:] = pad
            row[: len(seq.blocks)] = seq.blocks

    def slot_mapping(
        self, seqs: Any, counts: Any = None, *, starts: Any = None, out: npt.NDArray[np.int64]
    ) -> int:
        batch = self._batch(seqs)
        first = (
            [seq.num_committed for seq in batch]
            if starts is None
            else self._spread(starts, len(batch))
        )
        slots: list[int] = []
        lengths = (
            [seq.num_tokens - start for seq, start in zip(batch, first, strict=True)]
            if counts is None
            else self._spread(counts, len(batch))
        )
        for seq, start, n in zip(batch, first, lengths, strict=True):
            slots += [
                seq.blocks[token // self.block_size] * self.block_size + token % self.block_size
                for token in range(start, start + n)
            ]
        out[: len(slots)] = slots
        return len(slots)

    def snapshot(self) -> dict[str, Any]:
        """The parts of the snapshot (version 1) that the replay and ``inspect`` read."""
        histogram: dict[str, int] = {}
        runs = self._runs_of(self.clean)
        for length in runs:
            low = 1 << (length.bit_length() - 1)
            label = str(low) if low == 1 else f"{low}-{2 * low - 1}"
            histogram[label] = histogram.get(label, 0) + 1
        clean = set(self.clean)
        pages = -(-self.num_blocks // self.blocks_per_page)
        pinned = len({b // self.blocks_per_page for b in range(self.num_blocks) if b not in clean})
        filled: dict[int, int] = {}
        for seq in self.live.values():
            for position, block in enumerate(seq.blocks):
                here = min(seq.num_tokens - position * self.block_size, self.block_size)
                filled[block] = max(here, filled.get(block, 0))
        slots, used = len(filled) * self.block_size, sum(filled.values())
        return {
            "format": "kvcatch.snapshot",
            "version": 1,
            "kvcatch": "0.1.0",
            "config": {
                "num_blocks": self.num_blocks,
                "block_size": self.block_size,
                "blocks_per_page": self.blocks_per_page,
                "placement": self.placement,
                "eviction": self.eviction,
                "contiguity": "preferred",
                "null_block": self.null_block,
            },
            "blocks": {
                "total": self.num_blocks,
                "free": self.num_free,
                "cached": self.num_cached,
                "active": self.num_active,
                "pinned": 0,
                "reserved": self.num_reserved,
                "available": self.available,
                "null": int(self.null_block),
            },
            "runs": {
                "largest_run": max(runs, default=0),
                "free_run_histogram": histogram,
                "free_runs": len(runs),
                "fragmentation": 1 - max(runs) / self.num_free if runs else 0.0,
            },
            "pages": {"total": pages, "empty": pages - pinned, "pinned": pinned},
            "tokens": {
                "slots": slots,
                "used": used,
                "internal_fragmentation": 1 - used / slots if slots else 0.0,
            },
            "counters": {},
            "sequences": [
                {
                    "id": seq.id,
                    "owner": seq.owner,
                    "tags": dict(seq.tags),
                    "num_tokens": seq.num_tokens,
                    "num_committed": seq.num_committed,
                    "blocks": len(seq.blocks),
                    "shared_blocks": sum(self.refs[block] > 1 for block in seq.blocks),
                    "runs": self.num_runs(seq),
                    "hit_tokens": seq.hit_tokens,
                    "reserved": seq.reserved,
                }
                for seq in self.live.values()
            ],
            "pins": [],
        }

    def validate(self) -> None:
        """The conservation law, and reference counts equal to what the tables hold."""
        held: dict[int, int] = {}
        for seq in self.live.values():
            assert len(seq.blocks) == self._blocks_for(seq.num_tokens)
            for block in seq.blocks:
                held[block] = held.get(block, 0) + 1
        assert held == self.refs
        everything = sorted([*self.clean, *self.cached, *self.refs])
        assert everything == list(range(int(self.null_block), self.num_blocks))
        assert all(self.content[block] in self.index for block in self.cached)
        assert self.available >= 0
