//! Planning a compaction of 1,048,576 blocks, half of them active at random, 128 blocks per page; what each plan
//! gains is printed before it is timed.
#![allow(missing_docs, clippy::print_stdout)]

use criterion::{Criterion, criterion_group, criterion_main};
use kvcatch::compact::{Cell, PoolView, plan_largest_run, plan_pages, plan_runs};
use kvcatch::ids::BlockId;
use std::hint::black_box;

const BLOCKS: usize = 1 << 20;
const SEQUENCES: usize = 1024;
const LENGTH: usize = 512;

/// SplitMix64: no crate for a shuffle.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * u128::from(n)) >> 64) as u64
    }
}

fn compact(c: &mut Criterion) {
    let mut rng = Rng(1);
    let mut ids: Vec<u32> = (0..BLOCKS as u32).collect();
    for i in (1..BLOCKS).rev() {
        ids.swap(i, rng.below(i as u64 + 1) as usize);
    }
    ids.truncate(SEQUENCES * LENGTH);
    let mut cells = vec![Cell::Free; BLOCKS];
    for &id in &ids {
        cells[id as usize] = Cell::Movable;
    }
    let blocks: Vec<BlockId> = ids.into_iter().map(BlockId).collect();
    let tables: Vec<&[BlockId]> = blocks.chunks(LENGTH).collect();
    let view = PoolView { cells: &cells, blocks_per_page: 128 };

    for (name, plan) in [
        ("pages", plan_pages(&view, None)),
        ("largest_run(4096)", plan_largest_run(&view, 4096, None)),
        ("runs", plan_runs(&view, &tables, None)),
        ("runs, 4096 moves", plan_runs(&view, &tables, Some(4096))),
    ] {
        match plan {
            Ok(plan) => println!("{name}: {:?}, bound {:?}, {} rounds", plan.gain, plan.runs_bound, plan.rounds.len()),
            Err(error) => println!("{name}: {error}"),
        }
    }

    let mut group = c.benchmark_group("compact");
    group.sample_size(20);
    group.bench_function("pages", |b| b.iter(|| plan_pages(black_box(&view), None)));
    group.bench_function("largest_run_4096", |b| b.iter(|| plan_largest_run(black_box(&view), 4096, None)));
    group.bench_function("runs", |b| b.iter(|| plan_runs(black_box(&view), &tables, None)));
    group.bench_function("runs_4096_moves", |b| b.iter(|| plan_runs(black_box(&view), &tables, Some(4096))));
    group.finish();
}

criterion_group!(benches, compact);
criterion_main!(benches);
