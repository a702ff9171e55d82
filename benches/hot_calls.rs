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
    ("take_give_64_queue", 200, |n| take_give_64(n, "queue")),
    ("take_give_64_sorted", 200, |n| take_give_64(n, "sorted")),
    ("take_give_64_bitmap", 200, |n| take_give_64(n, "bitmap")),
    ("take_give_64_buddy", 200, |n| take_give_64(n, "buddy")),
    ("evict_64_bitmap_lru", 200, |n| evict_64(n, "lru")),
    ("evict_64_bitmap_slru", 200, |n| evict_64(n, "slru")),
    ("append_256_in_place", 7, append_256_in_place),
    ("append_256_with_a_block_each", 40, append_256_with_a_block_each),
    ("commit_256_no_block_full", 7, commit_256_no_block_full),
    ("commit_256_a_block_full_each", 20, commit_256_a_block_full_each),
    ("create_free_914_blocks_all_hit", 20, create_free_914_blocks_all_hit),
    ("create_free_914_blocks_no_hit", 20, create_free_914_blocks_no_hit),
    ("fork_append_free", 100, fork_append_free),
    ("hash_512_blocks", 20, hash_512_blocks),
    ("lookup_512_blocks_all_hit", 20, lookup_512_blocks_all_hit),
    ("block_tables_256", 10, block_tables_256),
    ("slot_mapping_256", 100, slot_mapping_256),
    ("plan_pages_65536_blocks", 2, plan_pages_65536_blocks),
];

const BLOCK_SIZE: usize = 16;
const BATCH: u32 = 256;

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

/// 16,384 blocks, each in use or not with equal chance; those not in use are given back by `give`.
fn half_full(placement: &str, eviction: &str, give: fn(&mut FreeBlocks, &[BlockId])) -> FreeBlocks {
    let mut free = FreeBlocks::new(16_384, placement, eviction, 0).unwrap();
    let mut all = Vec::new();
    free.take(16_384, Request::default(), &mut all, &mut Vec::new()).unwrap();
    let mut random = Random(1);
    let back: Vec<BlockId> = all.into_iter().filter(|_| random.next() & 1 == 0).collect();
    give(&mut free, &back);
    free
}

fn take_give_64(iterations: usize, placement: &str) {
    let mut free = half_full(placement, "lru", |free, ids| free.give_clean(ids).unwrap());
    let (mut taken, mut evicted) = (Vec::with_capacity(64), Vec::with_capacity(64));
    for _ in 0..iterations {
        taken.clear();
        free.take(64, Request::default(), &mut taken, &mut evicted).unwrap();
        free.give_clean(black_box(&taken)).unwrap();
    }
}

/// Every block that can be had is cached: 64 are evicted, and come back cached.
fn evict_64(iterations: usize, eviction: &str) {
    let give = |free: &mut FreeBlocks, ids: &[BlockId]| {
        for sequence in ids.chunks(64) {
            free.give_cached(sequence).unwrap();
        }
    };
    let mut free = half_full("bitmap", eviction, give);
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

/// 256 sequences of `len` tokens each.
fn batch(len: u32) -> (BlockPool, Vec<i64>) {
    let mut pool = pool(32_768);
    let batch = (0..BATCH).map(|i| pool.create(prompt(i * 10_000, len), committed()).unwrap().raw()).collect();
    (pool, batch)
}

/// The last block holds 1 of 16 tokens: room for 14 calls and one to spare.
fn append_256_in_place(iterations: usize) {
    let (mut pool, batch) = batch(10 * 16 + 1);
    for _ in 0..iterations {
        black_box(pool.append(black_box(&batch), |_| 1).unwrap());
    }
}

fn append_256_with_a_block_each(iterations: usize) {
    let (mut pool, batch) = batch(10 * 16);
    for _ in 0..iterations {
        black_box(pool.append(black_box(&batch), |_| BLOCK_SIZE).unwrap());
    }
}

fn commit_256_no_block_full(iterations: usize) {
    let (mut pool, batch) = batch(10 * 16 + 1);
    pool.append(&batch, |_| 15).unwrap();
    let tokens = vec![7; batch.len()];
    for _ in 0..iterations {
        pool.commit(black_box(&batch), Some(&tokens), |_| Some(1), false).unwrap();
    }
}

fn commit_256_a_block_full_each(iterations: usize) {
    let (mut pool, batch) = batch(10 * 16);
    pool.append(&batch, |_| 40 * BLOCK_SIZE).unwrap();
    let tokens = vec![7; batch.len() * BLOCK_SIZE];
    for _ in 0..iterations {
        pool.commit(black_box(&batch), Some(&tokens), |_| Some(BLOCK_SIZE), false).unwrap();
    }
}

/// Hashing is not in it: the prefix was made before, as a scheduler does.
fn create_free_914_blocks_all_hit(iterations: usize) {
    let mut pool = pool(2_048);
    // One token more than the hit blocks hold, so that all of them may be hit.
    let prefix = prompt(0, 913 * 16 + 1);
    let first = pool.create(prefix.clone(), committed()).unwrap().raw();
    pool.free(&[first]).unwrap();
    for _ in 0..iterations {
        let handle = pool.create(prefix.clone(), committed()).unwrap();
        pool.free(&[handle.raw()]).unwrap();
    }
}

/// Every prompt is new, and evicts what an earlier one left.
fn create_free_914_blocks_no_hit(iterations: usize) {
    let mut pool = pool(2_048);
    let prefixes: Vec<Prefix> = (0..64).map(|i| prompt(i * 20_000, 914 * 16)).collect();
    for i in 0..iterations + 4 {
        let handle = pool.create(prefixes[i % prefixes.len()].clone(), committed()).unwrap();
        pool.free(&[handle.raw()]).unwrap();
    }
}

fn fork_append_free(iterations: usize) {
    let mut pool = pool(4_096);
    let parent = pool.create(prompt(0, 1_000), committed()).unwrap().raw();
    for _ in 0..iterations {
        let child = pool.fork(parent, None, None).unwrap().raw();
        black_box(pool.append(&[child], |_| 1).unwrap());
        pool.free(&[child]).unwrap();
    }
}

fn hash_512_blocks(iterations: usize) {
    let tokens: Vec<u32> = (0..512 * 16).collect();
    for _ in 0..iterations {
        black_box(Prefix::new(black_box(tokens.clone()), BLOCK_SIZE, HashKind::Xxh3, b"").unwrap());
    }
}

fn lookup_512_blocks_all_hit(iterations: usize) {
    let mut pool = pool(4_096);
    let prefix = prompt(0, 512 * 16);
    pool.create(prefix.clone(), committed()).unwrap();
    for _ in 0..iterations {
        black_box(pool.lookup(black_box(&prefix)).unwrap());
    }
}

/// 256 rows of 63 blocks, 64 wide.
fn block_tables_256(iterations: usize) {
    let (pool, batch) = batch(1_000);
    let mut out = vec![0i32; batch.len() * 64];
    for _ in 0..iterations {
        for (&raw, row) in batch.iter().zip(out.chunks_exact_mut(64)) {
            pool.sequences().get(raw).unwrap().write_row(row, -1).unwrap();
        }
        black_box(&mut out);
    }
}

/// The slot of the last token of 256 sequences.
fn slot_mapping_256(iterations: usize) {
    let (pool, batch) = batch(1_000);
    let mut out = vec![0i64; batch.len()];
    for _ in 0..iterations {
        for (&raw, slot) in batch.iter().zip(out.chunks_exact_mut(1)) {
            pool.sequences().get(raw).unwrap().write_slots(black_box(999), BLOCK_SIZE, slot).unwrap();
        }
        black_box(&mut out);
    }
}

fn plan_pages_65536_blocks(iterations: usize) {
    let config = Config { num_blocks: 65_536, block_size: BLOCK_SIZE, placement: "queue".into(), ..Config::default() };
    let mut pool = BlockPool::new(config).unwrap();
    let mut random = Random(2);
    let short = || Admission { ignore_cache: true, ..Admission::default() };
    let handles: Vec<i64> = (0..8_192).map(|_| pool.create(prompt(0, 128), short()).unwrap().raw()).collect();
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
