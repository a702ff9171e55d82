"""One sequence's life in a block pool, step by step: python examples/library.py.

Every line that states a fact asserts it.
"""

import numpy as np

import kvcatch

pool = kvcatch.BlockPool(
    num_blocks=1_024, block_size=16, placement="bitmap", eviction="slru", blocks_per_page=32
)
print(pool)

# A prompt is admitted: its blocks are handed out all or nothing.
prompt = np.arange(1_000, 1_100, dtype=np.int32)
first = pool.create(prompt, owner="req-17", tags={"tenant": "acme"})
assert first.hit_tokens == 0
assert len(pool.block_ids(first)) == 7  # 100 tokens in blocks of 16
assert pool.num_runs(first) == 1  # one transfer descriptor

# Once its keys and values are written, others may find its full blocks.
pool.commit(first)
assert pool.lookup(prompt) == 96
question = np.concatenate([prompt[:80], np.arange(5_000, 5_050, dtype=np.int32)])
second = pool.create(question, owner="req-18", tags={"tenant": "acme"}, commit=True)
assert second.hit_tokens == 80
miss = pool.explain_miss(np.concatenate([prompt[:90], [7] * 20]))
assert (miss.reason, miss.hit_tokens, miss.diverges_at) == ("diverged", 80, 90)
print(miss)

# One call per engine step serves the whole batch: room, tables, slots, and what was written.
batch = np.array([first.id, second.id], dtype=np.int64)
tables = np.empty((2, 16), dtype=np.int32)
slots = np.empty(2, dtype=np.int64)
for step in range(20):
    copies = pool.append(batch, 1)
    assert copies == []
    pool.block_tables(batch, out=tables)
    pool.slot_mapping(batch, 1, out=slots)
    pool.commit(batch, np.array([10_000 + step, 20_000 + step], dtype=np.int32))
assert pool.num_tokens(first) == 120
assert slots[0] == tables[0, 119 // 16] * 16 + 119 % 16

# A fork shares every block; the first write into the shared tail asks for a copy.
child = pool.fork(first, owner="req-17/a")
((source, target),) = pool.append([child], 1)
assert source == pool.block_ids(first)[-1]
assert target == pool.block_ids(child)[-1]

# Who holds what, and what is held by owners that are gone.
for row in pool.holdings(by="tenant"):
    print(row)
print(pool.audit(live=["req-17", "req-18"]))

# A request that cannot be served changes nothing and says what was missing.
refusal = None
try:
    pool.create(np.arange(20_000, dtype=np.int32))
except kvcatch.OutOfBlocks as error:
    refusal = error
assert refusal is not None
assert refusal.required == 1_250
assert refusal.free + refusal.cached < refusal.required
print(refusal)

# A plan to empty pages: what it moves, what it gains. Apply it as a whole, or drop it.
others = [pool.create(np.arange(320, dtype=np.int32) + 1_000 * n) for n in range(10, 30)]
pool.free(others[::2])
plan = pool.plan_compaction("pages", max_moves=256)
assert plan.num_moves > 0
assert plan.empty_pages_after > plan.empty_pages_before
print(plan)
plan.apply()  # tables, prefix index and owners at once; plan.src and plan.dst are for the copy kernel

pool.free([first, second, child, *others[1::2]])
pool.validate()
assert pool.num_active == 0
print(pool)
