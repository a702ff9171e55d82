//! Every placement against an obvious model, and the two structures under them against naive ones.
//!
//! Random sequences of insert, remove and take; after each the placement must hold exactly the ids of the model and
//! pass its own `validate()`. What each placement promises beyond that is checked on every take.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::{BTreeSet, VecDeque};

use fixedbitset::FixedBitSet;
use kvcatch::ids::BlockId;
use kvcatch::placement::{self, BitSet, Hint, Placement, RunIndex};
use proptest::prelude::*;

/// Widest room that `bitmap` keeps behind a sequence: a stretch longer than a request by this much always fits it.
const WIDEST_GAP: usize = 32;

fn config(cases: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// How ids that come back are ordered.
#[derive(Clone, Copy, Debug)]
enum Order {
    Up,
    Down,
    Mixed,
}

#[derive(Clone, Debug)]
enum Op {
    /// Up to `n` handed-out ids from `at` on come back.
    Insert { at: u16, n: u8, order: Order },
    /// One id is taken out by name.
    Remove { at: u16 },
    /// `n` ids (as far as there are), behind a handed-out one for `after`.
    Take { n: u16, after: Option<u16> },
    /// A sequence grows by one block behind the one it got last.
    Grow { at: u16 },
}

fn op() -> impl Strategy<Value = Op> {
    let order = prop_oneof![Just(Order::Up), Just(Order::Down), Just(Order::Mixed)];
    prop_oneof![
        3 => (any::<u16>(), 1..60u8, order).prop_map(|(at, n, order)| Op::Insert { at, n, order }),
        1 => any::<u16>().prop_map(|at| Op::Remove { at }),
        2 => (0..40u16, proptest::option::of(any::<u16>())).prop_map(|(n, after)| Op::Take { n, after }),
        1 => (0..320u16, Just(None)).prop_map(|(n, after)| Op::Take { n, after }),
        4 => any::<u16>().prop_map(|at| Op::Grow { at }),
    ]
}

/// Lengths and starts of the maximal stretches of `free`.
fn stretches(free: &BTreeSet<u32>) -> Vec<(u32, u32)> {
    let mut found: Vec<(u32, u32)> = Vec::new();
    for &id in free {
        match found.last_mut() {
            Some((start, len)) if *start + *len == id => *len += 1,
            _ => found.push((id, 1)),
        }
    }
    found
}

fn is_one_run(ids: &[BlockId]) -> bool {
    ids.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1)
}

/// A placement beside the model of what it holds.
struct Machine {
    placement: Box<dyn Placement>,
    bound: u32,
    free: BTreeSet<u32>,
    /// Hand-out order of `queue`.
    queue: VecDeque<u32>,
    /// Blocks handed out, by [`Op::Grow`] continued from the last of each take.
    tails: Vec<u32>,
}

impl Machine {
    fn new(name: &str, bound: u32) -> Self {
        let mut placement = placement::by_name(name, bound as usize).unwrap();
        let all: Vec<BlockId> = (0..bound).map(BlockId).collect();
        placement.insert(&all);
        Self { placement, bound, free: (0..bound).collect(), queue: (0..bound).collect(), tails: Vec::new() }
    }

    fn out(&self) -> Vec<u32> {
        (0..self.bound).filter(|id| !self.free.contains(id)).collect()
    }

    fn insert(&mut self, at: u16, n: u8, order: Order) {
        let out = self.out();
        if out.is_empty() {
            return;
        }
        let at = usize::from(at) % out.len();
        let mut ids: Vec<u32> = out.iter().copied().skip(at).take(usize::from(n)).collect();
        match order {
            Order::Up => {}
            Order::Down => ids.reverse(),
            // Every third first, so that stretches up, down and single ids all come in one call.
            Order::Mixed => ids.sort_by_key(|id| (id % 3, id.wrapping_mul(if id % 3 == 1 { u32::MAX } else { 1 }))),
        }
        let blocks: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
        self.placement.released(&blocks);
        self.placement.insert(&blocks);
        for &id in ids.iter().rev() {
            self.queue.push_front(id);
        }
        self.free.extend(&ids);
        self.tails.retain(|id| !ids.contains(id));
    }

    fn remove(&mut self, at: u16) {
        if self.free.is_empty() {
            return;
        }
        let id = *self.free.iter().nth(usize::from(at) % self.free.len()).unwrap();
        self.placement.remove(BlockId(id));
        self.free.remove(&id);
        self.queue.retain(|&other| other != id);
    }

    fn take(&mut self, n: usize, after: Option<u32>) {
        let n = n.min(self.free.len());
        let mut out = vec![BlockId(u32::MAX)];
        let hint = Hint { after: after.map(BlockId), left: self.free.len() - n, fixed: false };
        self.placement.take(n, hint, &mut out);
        assert_eq!(out[0], BlockId(u32::MAX), "what stood in `out` before is touched");
        let taken = &out[1..];
        assert_eq!(taken.len(), n, "not as many as asked for");
        let distinct: BTreeSet<u32> = taken.iter().map(|id| id.0).collect();
        assert_eq!(distinct.len(), n, "an id is handed out twice: {taken:?}");
        assert!(distinct.is_subset(&self.free), "handed out and not free: {taken:?}");
        if n > 0 {
            self.check_choice(taken, after);
        }
        self.free.retain(|id| !distinct.contains(id));
        self.queue.retain(|id| !distinct.contains(id));
        if let Some(last) = taken.last() {
            self.tails.retain(|&tail| Some(tail) != after);
            self.tails.push(last.0);
        }
    }

    fn check_choice(&self, taken: &[BlockId], after: Option<u32>) {
        let n = taken.len();
        let ids: Vec<u32> = taken.iter().map(|id| id.0).collect();
        let behind = after.map_or(0, |after| (after + 1..).take_while(|id| self.free.contains(id)).count());
        let growth = ids.iter().zip(after.map_or(0, |after| after + 1)..).take_while(|&(&id, next)| id == next).count();
        match self.placement.name() {
            "queue" => assert!(ids.iter().eq(self.queue.iter().take(n)), "not vLLM's order: {ids:?}"),
            "sorted" => assert!(ids.iter().eq(self.free.iter().take(n)), "not the lowest ids: {ids:?}"),
            "buddy" => {
                assert!(growth >= behind.min(n), "free blocks behind {after:?} passed over: {ids:?}");
                if after.is_none() {
                    let size = n.next_power_of_two() as u32;
                    let mut pieces = (0..).map(|i| i * size).take_while(|start| start + size <= self.bound);
                    let whole = pieces.any(|start| (start..start + size).all(|id| self.free.contains(&id)));
                    assert!(!whole || is_one_run(taken), "a piece of {size} is free, but not used for {n}: {ids:?}");
                }
            }
            "bitmap" => {
                // The gap behind a block is its own, so all that is free directly behind it is there for its growth.
                assert!(growth >= behind.min(n), "free blocks behind {after:?} passed over: {ids:?}");
                let longest = stretches(&self.free).iter().map(|&(_, len)| len as usize).max().unwrap_or(0);
                let gaps = !self.tails.is_empty();
                if growth == 0 && longest >= n + if gaps { WIDEST_GAP } else { 0 } {
                    assert!(is_one_run(taken), "a stretch of {longest} is free, but {n} lie scattered: {ids:?}");
                }
            }
            other => panic!("no such placement: {other}"),
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Insert { at, n, order } => self.insert(at, n, order),
            Op::Remove { at } => self.remove(at),
            Op::Take { n, after } => {
                let out = self.out();
                let after = after.filter(|_| !out.is_empty()).map(|at| out[usize::from(at) % out.len()]);
                self.take(usize::from(n), after);
            }
            Op::Grow { at } => {
                if !self.tails.is_empty() {
                    let after = self.tails[usize::from(at) % self.tails.len()];
                    self.take(1, Some(after));
                }
            }
        }
    }

    fn check(&self) {
        self.placement.validate().unwrap();
        assert_eq!(self.placement.len(), self.free.len());
        assert_eq!(self.placement.is_empty(), self.free.is_empty());
        let order: Vec<u32> = self.placement.order().iter().map(|id| id.0).collect();
        assert_eq!(order.len(), self.free.len(), "order() does not list every id once");
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), self.free);
        if self.placement.name() == "queue" {
            assert!(order.iter().eq(&self.queue), "order() is not the order of hand-out");
        }
        let longest = stretches(&self.free).iter().map(|&(_, len)| len as usize).max().unwrap_or(0);
        assert_eq!(self.placement.largest_run(), longest);
    }
}

fn against_the_model(name: &str, bound: u32, ops: &[Op]) {
    let mut machine = Machine::new(name, bound);
    machine.check();
    for op in ops {
        machine.run(op);
        machine.check();
    }
    // Everything comes back, and the pool is one run again.
    let out = machine.out();
    if !out.is_empty() {
        let blocks: Vec<BlockId> = out.iter().copied().map(BlockId).collect();
        machine.placement.released(&blocks);
        machine.placement.insert(&blocks);
        machine.free.extend(&out);
        machine.placement.validate().unwrap();
    }
    assert_eq!(machine.placement.len(), bound as usize);
    assert_eq!(machine.placement.largest_run(), bound as usize);
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn queue_against_the_model(bound in 1..300u32, ops in prop::collection::vec(op(), 60..=90)) {
        against_the_model("queue", bound, &ops);
    }

    #[test]
    fn sorted_against_the_model(bound in 1..300u32, ops in prop::collection::vec(op(), 60..=90)) {
        against_the_model("sorted", bound, &ops);
    }

    #[test]
    fn bitmap_against_the_model(bound in 1..300u32, ops in prop::collection::vec(op(), 60..=90)) {
        against_the_model("bitmap", bound, &ops);
    }

    #[test]
    fn buddy_against_the_model(bound in 1..300u32, ops in prop::collection::vec(op(), 60..=90)) {
        against_the_model("buddy", bound, &ops);
    }
}

fn full(name: &str, bound: u32) -> Box<dyn Placement> {
    Machine::new(name, bound).placement
}

fn take(placement: &mut dyn Placement, n: usize, after: Option<BlockId>) -> Vec<BlockId> {
    let mut out = Vec::new();
    let left = placement.len() - n;
    placement.take(n, Hint { after, left, fixed: false }, &mut out);
    placement.validate().unwrap();
    out
}

#[test]
fn every_placement_serves_a_request_for_the_whole_pool() {
    for name in placement::NAMES {
        for bound in 1..=300u32 {
            let mut placement = full(name, bound);
            assert_eq!(placement.name(), name);
            let mut ids = take(&mut *placement, bound as usize, None);
            // No order but its own is promised by buddy where the pool is not one piece.
            if name != "buddy" || bound.is_power_of_two() {
                assert!(is_one_run(&ids), "{name} of {bound}: {ids:?}");
            }
            assert!(placement.is_empty());
            ids.sort_unstable();
            assert!(ids.iter().map(|id| id.0).eq(0..bound), "{name} of {bound}");
            // In two halves and tail first it comes back, and is whole again.
            for part in ids.chunks(bound.div_ceil(2) as usize) {
                let back: Vec<BlockId> = part.iter().rev().copied().collect();
                placement.released(&back);
                placement.insert(&back);
                placement.validate().unwrap();
            }
            assert_eq!(take(&mut *placement, bound as usize, None).len(), bound as usize);
        }
    }
}

#[test]
fn buddy_trims_the_tail_back() {
    let mut buddy = full("buddy", 8);
    let ids = take(&mut *buddy, 5, None);
    assert!(is_one_run(&ids));
    assert_eq!(buddy.len(), 3);
    assert_eq!(buddy.largest_run(), 3);
    assert_eq!(take(&mut *buddy, 3, None).len(), 3);
    // Any request of any pool size leaves exactly the rest.
    for bound in 1..=130u32 {
        for n in 1..=bound {
            let mut buddy = full("buddy", bound);
            assert_eq!(take(&mut *buddy, n as usize, None).len(), n as usize);
            assert_eq!(buddy.len(), (bound - n) as usize);
            if n <= 1 << bound.ilog2() {
                assert!(buddy.largest_run() >= (bound - n) as usize / 2, "pool of {bound}, request for {n}");
            }
        }
    }
}

#[test]
fn bitmap_keeps_room_for_sequences_that_grow_side_by_side() {
    let mut bitmap = full("bitmap", 256);
    let mut sequences: Vec<Vec<BlockId>> = (0..4).map(|_| take(&mut *bitmap, 8, None)).collect();
    for _ in 0..6 {
        for blocks in &mut sequences {
            let last = blocks.last().copied();
            blocks.extend(take(&mut *bitmap, 1, last));
        }
    }
    for blocks in &sequences {
        assert!(is_one_run(blocks), "a sequence was cut up by its neighbour: {blocks:?}");
    }
    // A gap is soft: who needs everything gets everything.
    let rest = bitmap.len();
    assert_eq!(take(&mut *bitmap, rest, None).len(), rest);
}

#[test]
fn bitmap_gap_lapses_when_its_owner_comes_back() {
    let mut bitmap = full("bitmap", 64);
    let ids = take(&mut *bitmap, 4, None);
    bitmap.released(&ids);
    bitmap.insert(&ids);
    bitmap.validate().unwrap();
    assert!(is_one_run(&take(&mut *bitmap, 64, None)));
}

#[test]
fn unknown_placement_is_refused() {
    assert!(placement::by_name("first_fit", 8).unwrap_err().to_string().contains("queue, sorted, bitmap, buddy"));
}

// ---------------------------------------------------------------------------------------------- BitSet

#[derive(Clone, Debug)]
enum BitOp {
    Insert(u32),
    Remove(u32),
    InsertRange(u32, u32),
    RemoveRange(u32, u32),
}

fn bit_op() -> impl Strategy<Value = BitOp> {
    prop_oneof![
        2 => any::<u32>().prop_map(BitOp::Insert),
        1 => any::<u32>().prop_map(BitOp::Remove),
        2 => (any::<u32>(), any::<u32>()).prop_map(|(a, b)| BitOp::InsertRange(a, b)),
        2 => (any::<u32>(), any::<u32>()).prop_map(|(a, b)| BitOp::RemoveRange(a, b)),
    ]
}

/// The stretch from `at` on (at most `most` long) whose bits all are `is`.
fn uniform(model: &FixedBitSet, at: usize, most: usize, is: bool) -> usize {
    (at..model.len()).take(most).take_while(|&i| model.contains(i) == is).count()
}

proptest! {
    #![proptest_config(config(120))]

    /// One, two, three and four levels, at and around the bounds of a level.
    #[test]
    fn bit_set_against_fixedbitset(
        bound in prop_oneof![1..140usize, 4_060..4_200usize, 262_100..262_200usize],
        ops in prop::collection::vec(bit_op(), 1..60),
        probes in prop::collection::vec(any::<u32>(), 12),
    ) {
        let mut set = BitSet::new(bound);
        let mut model = FixedBitSet::with_capacity(bound);
        for op in ops {
            match op {
                BitOp::Insert(at) => {
                    let at = at as usize % bound;
                    prop_assert_eq!(set.insert(at as u32), !model.put(at));
                }
                BitOp::Remove(at) => {
                    let at = at as usize % bound;
                    prop_assert_eq!(set.remove(at as u32), model.contains(at));
                    model.set(at, false);
                }
                BitOp::InsertRange(at, len) => {
                    let at = at as usize % bound;
                    let len = uniform(&model, at, 1 + len as usize % 9_000, false);
                    set.insert_range(at as u32, len as u32);
                    model.insert_range(at..at + len);
                }
                BitOp::RemoveRange(at, len) => {
                    let at = at as usize % bound;
                    let len = uniform(&model, at, 1 + len as usize % 9_000, true);
                    set.remove_range(at as u32, len as u32);
                    model.set_range(at..at + len, false);
                }
            }
            let count = model.count_ones(..);
            prop_assert_eq!(set.len(), count);
            prop_assert_eq!(set.is_empty(), count == 0);
            for probe in &probes {
                let at = *probe as usize % (bound + 70);
                prop_assert_eq!(set.contains(at as u32), at < bound && model.contains(at));
                let next = (at.min(bound)..bound).find(|&i| model.contains(i));
                prop_assert_eq!(set.next(at as u32), next.map(|i| i as u32), "next from {}", at);
                let previous = (0..=at.min(bound - 1)).rev().find(|&i| model.contains(i));
                prop_assert_eq!(set.previous(at as u32), previous.map(|i| i as u32), "previous from {}", at);
            }
        }
        prop_assert!(set.iter().map(|id| id as usize).eq(model.ones()));
        let word = probes[0] as usize % bound / 64;
        for bit in 0..64 {
            prop_assert_eq!(set.word(word) >> bit & 1 == 1, set.contains((word * 64 + bit) as u32));
        }
    }
}

// -------------------------------------------------------------------------------------------- RunIndex

#[derive(Clone, Debug)]
enum RunOp {
    Insert(u32, u32),
    Remove(u32, u32),
}

fn run_op() -> impl Strategy<Value = RunOp> {
    let len = || prop_oneof![3 => 1..8u32, 3 => 1..80u32, 1 => 1..700u32];
    prop_oneof![
        3 => (any::<u32>(), len()).prop_map(|(at, len)| RunOp::Insert(at, len)),
        2 => (any::<u32>(), len()).prop_map(|(at, len)| RunOp::Remove(at, len)),
    ]
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn run_index_against_a_set(
        bound in prop_oneof![1..300usize, 2_000..4_097usize],
        ops in prop::collection::vec(run_op(), 1..80),
        needs in prop::collection::vec(prop_oneof![0..70u32, 60..900u32], 6),
    ) {
        let mut index = RunIndex::new(bound);
        let mut model = FixedBitSet::with_capacity(bound);
        for op in ops {
            match op {
                RunOp::Insert(at, len) => {
                    let at = at as usize % bound;
                    let len = uniform(&model, at, len as usize, false);
                    index.insert(at as u32, len as u32);
                    model.insert_range(at..at + len);
                }
                RunOp::Remove(at, len) => {
                    let at = at as usize % bound;
                    let len = uniform(&model, at, len as usize, true);
                    index.remove(at as u32, len as u32);
                    model.set_range(at..at + len, false);
                }
            }
            index.validate().unwrap();
            let runs = stretches(&model.ones().map(|id| id as u32).collect());
            prop_assert_eq!(index.len(), model.count_ones(..));
            prop_assert_eq!(index.is_empty(), runs.is_empty());
            prop_assert_eq!(index.num_runs(), runs.len());
            let longest = runs.iter().max_by_key(|&&(start, len)| (len, std::cmp::Reverse(start)));
            prop_assert_eq!(index.largest().map(|run| (run.start, run.len)), longest.copied());
            for &need in &needs {
                // A pool this small has fewer than 64 runs above 64 blocks: best fit is exact in every size class.
                let fitting = runs.iter().filter(|&&(_, len)| len >= need.max(1));
                let best = fitting.min_by_key(|&&(start, len)| (len, start));
                let found = index.best_fit(need).map(|run| (run.start, run.len));
                prop_assert_eq!(found, best.copied(), "best fit for {}", need);
            }
        }
        prop_assert!(index.iter().map(|id| id as usize).eq(model.ones()));
        let runs = stretches(&model.ones().map(|id| id as u32).collect());
        let starts: Vec<u32> = runs.iter().map(|&(start, _)| start).collect();
        for (start, len) in runs {
            prop_assert_eq!(index.run_at(start), len);
            for id in start..start + len {
                prop_assert!(index.contains(id));
                let around = index.run_around(id);
                prop_assert_eq!((around.start, around.len), (start, len));
            }
        }
        for id in (0..bound as u32 + 70).filter(|id| !starts.contains(id)) {
            prop_assert_eq!(index.run_at(id), 0);
        }
    }
}

#[test]
fn best_fit_among_many_long_runs_is_always_long_enough() {
    // More runs of one size class than are compared: any that fits may come, none that does not.
    let mut index = RunIndex::new(90_000);
    for i in 0..600u32 {
        index.insert(i * 150, 128 + i % 16);
    }
    index.validate().unwrap();
    for need in 100..=143 {
        let run = index.best_fit(need).unwrap();
        assert!(run.len >= need, "{need}: {run:?}");
        assert_eq!(run.start % 150, 0);
    }
    assert!(index.best_fit(144).is_none());
}
