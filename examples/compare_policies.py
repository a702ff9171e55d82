"""Compare allocator policies from Python: python examples/compare_policies.py [TRACE].

Without a trace it uses the built-in chat workload. ``kvcatch bench`` does the same and more.
"""

import sys

from kvcatch.bench import BenchConfig, run_bench
from kvcatch.workload import Order, ReplaySettings, generate, read_trace

if len(sys.argv) > 1:
    workload, num_blocks = read_trace(sys.argv[1], requests=300), 60_000
else:
    workload, num_blocks = generate("chat", requests=500, seed=0), 8_192
print(workload)

for order in ("fcfs", "cache_aware:64"):
    config = BenchConfig(
        policies=("queue", "bitmap", "bitmap+slru"),
        num_blocks=num_blocks,
        settings=ReplaySettings(max_num_seqs=64, order=Order.parse(order)),
    )
    for policy, row in run_bench(workload, config).policies.items():
        print(
            f"{order:<15} {policy:<12} {row.runs_per_sequence:8.2f} runs per sequence, "
            f"{row.hit_tokens:>9,} hit tokens, {row.preemptions:>3} preemptions, "
            f"p99 wait {row.waiting_steps_p99:>6,} steps, {row.us_per_decode_token:5.2f} us/token"
        )
