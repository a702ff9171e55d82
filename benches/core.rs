//! Criterion benches of the core's hot calls; `benches/figures.py` measures the same from Python, beside baselines.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvcatch::free::{FreeBlocks, Request};
use kvcatch::ids::BlockId;
use kvcatch::placement;
use kvcatch::pool::{Admission, BlockPool, Config};
use kvcatch::prefix::{HashKind, Prefix};

const BLOCK_SIZE: usize = 16;

/// 65,536 blocks, each free or in use with equal chance.
fn half_full(placement: &str) -> FreeBlocks {
    let mut free = FreeBlocks::new(65_536, placement, "lru", 0).unwrap();
    let mut all = Vec::new();
    free.take(65_536, Request::default(), &mut all, &mut Vec::new()).unwrap();
    let mut state = 1u64;
    let back: Vec<BlockId> = all
        .into_iter()
        .filter(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 63 == 0
        })
        .collect();
    free.give_clean(&back).unwrap();
    free
}

fn take_and_give(c: &mut Criterion) {
    let mut group = c.benchmark_group("take_and_give_64");
    group.throughput(Throughput::Elements(64));
    for name in placement::NAMES {
        let mut free = half_full(name);
        let (mut taken, mut evicted) = (Vec::new(), Vec::new());
        group.bench_function(name, |b| {
            b.iter(|| {
                taken.clear();
                free.take(64, Request::default(), &mut taken, &mut evicted).unwrap();
                free.give_clean(black_box(&taken)).unwrap();
            });
        });
    }
    group.finish();
}

fn prompt(first: u32, len: u32) -> Prefix {
    Prefix::new((first..first + len).collect(), BLOCK_SIZE, HashKind::Xxh3, b"").unwrap()
}

/// 256 sequences of 1,000 tokens and more: one in sixteen needs a block at any step.
fn batch(placement: &str) -> (BlockPool, Vec<i64>) {
    let config =
        Config { num_blocks: 262_144, block_size: BLOCK_SIZE, placement: placement.into(), ..Config::default() };
    let mut pool = BlockPool::new(config).unwrap();
    let batch = (0..256).map(|i| pool.create(prompt(i * 10_000, 1_000 + i), Admission::default()).unwrap().raw());
    let batch = batch.collect();
    (pool, batch)
}

fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append_256");
    group.throughput(Throughput::Elements(256));
    for name in placement::NAMES {
        let (mut pool, batch) = batch(name);
        let mut steps = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                black_box(pool.append(black_box(&batch), |_| 1).unwrap());
                steps += 1;
                if steps % 4_096 == 0 {
                    for (i, &raw) in batch.iter().enumerate() {
                        pool.truncate(raw, 1_000 + i).unwrap();
                    }
                }
            });
        });
    }
    group.finish();
}

fn prefixes(c: &mut Criterion) {
    let config = Config { num_blocks: 65_536, block_size: BLOCK_SIZE, ..Config::default() };
    let mut pool = BlockPool::new(config).unwrap();
    let made: Vec<Prefix> = (0..100).map(|i| prompt(i * 8_192, 8_192)).collect();
    for prefix in &made {
        pool.create(prefix.clone(), Admission { commit: true, ..Admission::default() }).unwrap();
    }
    let mut group = c.benchmark_group("prefix_8192_tokens");
    group.throughput(Throughput::Elements(8_192));
    let mut next = (0..made.len()).cycle();
    group.bench_function("lookup_all_hit", |b| {
        b.iter(|| black_box(pool.lookup(&made[next.next().unwrap_or(0)]).unwrap()));
    });
    for (name, kind) in [("hash_xxh3", HashKind::Xxh3), ("hash_blake3", HashKind::Blake3)] {
        group.bench_function(name, |b| {
            b.iter_batched(
                || made[0].tokens().to_vec(),
                |tokens| Prefix::new(tokens, BLOCK_SIZE, kind, b"").unwrap(),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = core;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(20);
    targets = take_and_give, append, prefixes
}
criterion_main!(core);
