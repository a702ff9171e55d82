//! The program whose instructions `tests/callgrind` counts; it times nothing.
//!
//! `hot_calls --list` prints a line for each scenario, its name and how many iterations are enough to count it.
//! `hot_calls NAME ITERATIONS` sets up, then makes the call that often. The setup may not depend on ITERATIONS, and
//! the calls must go on at one and the same cost (give back what is taken, or grow evenly): the harness runs N and 2 N
//! iterations and divides the difference.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::process::ExitCode;

use kvcatch::compact::Objective;
use kvcatch::free::{FreeBlocks, Request};
use kvcatch::ids::BlockId;
use kvcatch::pool::{Admission, BlockPool, Config};
use kvcatch::prefix::{HashKind, Prefix};

/// Name, iterations that are enough, and what sets up and then makes the call that often.
type Scenario = (&'static str, usize, fn(usize));

const SCENARIOS: &[Scenario] = &[
    ("take_64_and_give_clean", 200, take_64_and_give_clean),
    ("take_64_evicting_and_give_cached", 200, take_64_evicting_and_give_cached),
    ("append_1_to_256", 160, append_1_to_256),
    ("commit_1_to_256", 160, commit_1_to_256),
    ("create_4096_and_free", 20, create_4096_and_free),
    ("hash_8192_tokens", 20, hash_8192_tokens),
    ("lookup_8192_tokens_all_hit", 20, lookup_8192_tokens_all_hit),
    ("fork_append_and_free", 100, fork_append_and_free),
    ("plan_pages_65536_blocks", 2, plan_pages_65536_blocks),
];

const BLOCK_SIZE: usize = 16;

/// A small generator (splitmix64): the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

/// 65,536 blocks, each in use or not with equal chance; those not in use are given back by `give`.
fn half_full(give: fn(&mut FreeBlocks, &[BlockId])) -> FreeBlocks {
    let mut free = FreeBlocks::new(65_536, "bitmap", "lru", 0).unwrap();
    let mut all = Vec::new();
    free.take(65_536, Request::default(), &mut all, &mut Vec::new()).unwrap();
    let mut random = Random(1);
    let back: Vec<BlockId> = all.into_iter().filter(|_| random.next() & 1 == 0).collect();
    give(&mut free, &back);
    free
}

fn take_64_and_give_clean(iterations: usize) {
    let mut free = half_full(|free, ids| free.give_clean(ids).unwrap());
    let (mut taken, mut evicted) = (Vec::with_capacity(64), Vec::with_capacity(64));
    for _ in 0..iterations {
        taken.clear();
        free.take(64, Request::default(), &mut taken, &mut evicted).unwrap();
        free.give_clean(black_box(&taken)).unwrap();
    }
}

fn take_64_evicting_and_give_cached(iterations: usize) {
    let mut free = half_full(|free, ids| free.give_cached(ids).unwrap());
    let (mut taken, mut evicted) = (Vec::with_capacity(64), Vec::with_capacity(64));
    for _ in 0..iterations {
        taken.clear();
        evicted.clear();
        free.take(64, Request::default(), &mut taken, &mut evicted).unwrap();
        free.give_cached(black_box(&taken)).unwrap();
    }
}

fn pool(num_blocks: usize) -> BlockPool {
    BlockPool::new(Config { num_blocks, block_size: BLOCK_SIZE, ..Config::default() }).unwrap()
}

fn prompt(first: u32, len: u32) -> Prefix {
    Prefix::new((first..first + len).collect(), BLOCK_SIZE, HashKind::Xxh3, b"").unwrap()
}

fn committed() -> Admission {
    Admission { commit: true, ..Admission::default() }
}

/// 256 sequences of 1,000 tokens each.
fn batch_of_256() -> (BlockPool, Vec<i64>) {
    let mut pool = pool(65_536);
    let batch = (0..256).map(|i| pool.create(prompt(i * 10_000, 1_000), committed()).unwrap().raw()).collect();
    (pool, batch)
}

fn append_1_to_256(iterations: usize) {
    let (mut pool, batch) = batch_of_256();
    for _ in 0..iterations {
        black_box(pool.append(black_box(&batch), |_| 1).unwrap());
    }
}

fn commit_1_to_256(iterations: usize) {
    let (mut pool, batch) = batch_of_256();
    let tokens = vec![7; batch.len()];
    // Room for any number of iterations, so that append is part of the setup alone.
    pool.append(&batch, |_| 1_000).unwrap();
    for _ in 0..iterations {
        pool.commit(black_box(&batch), Some(&tokens), |_| Some(1), false).unwrap();
    }
}

fn create_4096_and_free(iterations: usize) {
    let mut pool = pool(65_536);
    for _ in 0..iterations {
        // The first iteration misses and is the same in both runs of the harness; all others hit.
        let handle = pool.create(prompt(0, 4_096), committed()).unwrap();
        pool.free(&[handle.raw()]).unwrap();
    }
}

fn hash_8192_tokens(iterations: usize) {
    let tokens: Vec<u32> = (0..8_192).collect();
    for _ in 0..iterations {
        black_box(Prefix::new(black_box(tokens.clone()), BLOCK_SIZE, HashKind::Xxh3, b"").unwrap());
    }
}

fn lookup_8192_tokens_all_hit(iterations: usize) {
    let mut pool = pool(65_536);
    pool.create(prompt(0, 8_192), committed()).unwrap();
    let prefix = prompt(0, 8_192);
    for _ in 0..iterations {
        black_box(pool.lookup(black_box(&prefix)).unwrap());
    }
}

fn fork_append_and_free(iterations: usize) {
    let mut pool = pool(65_536);
    let parent = pool.create(prompt(0, 1_000), committed()).unwrap().raw();
    for _ in 0..iterations {
        let child = pool.fork(parent, None, None).unwrap().raw();
        black_box(pool.append(&[child], |_| 1).unwrap());
        pool.free(&[child]).unwrap();
    }
}

fn plan_pages_65536_blocks(iterations: usize) {
    let mut pool = pool(65_536);
    let mut random = Random(2);
    let handles: Vec<i64> =
        (0..8_192).map(|_| pool.create(prompt(0, 128), Admission::default()).unwrap().raw()).collect();
    let drop: Vec<i64> = handles.into_iter().filter(|_| random.next() & 1 == 0).collect();
    pool.free(&drop).unwrap();
    for _ in 0..iterations {
        black_box(pool.plan_compaction(Objective::Pages, None, None).unwrap());
    }
}

fn main() -> ExitCode {
    // `cargo bench` passes --bench.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--list"] => {
            for (name, iterations, _) in SCENARIOS {
                println!("{name} {iterations}");
            }
            ExitCode::SUCCESS
        }
        [name, iterations] => match (SCENARIOS.iter().find(|scenario| scenario.0 == name), iterations.parse()) {
            (Some(scenario), Ok(iterations)) => {
                scenario.2(iterations);
                ExitCode::SUCCESS
            }
            _ => ExitCode::from(2),
        },
        _ => ExitCode::from(2),
    }
}
