//! `slru` from outside: what it promises over `lru`, on the policy itself and through a pool.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{HashMap, VecDeque};

use kvcatch::eviction::{Eviction, Lru, Slru};
use kvcatch::ids::BlockId;
use proptest::prelude::*;

/// A toy cache of sequences over a policy: sequence `name` is `n` blocks, looked up from its start.
struct Cache<E> {
    policy: E,
    /// Content of each block: sequence and position.
    content: HashMap<BlockId, (u32, usize)>,
    place: HashMap<(u32, usize), BlockId>,
    clean: Vec<BlockId>,
}

impl<E: Eviction> Cache<E> {
    fn new(policy: E, num_blocks: u32) -> Self {
        let clean = (0..num_blocks).map(BlockId).collect();
        Self { policy, content: HashMap::new(), place: HashMap::new(), clean }
    }

    /// Runs a sequence of `n` blocks through; the number of blocks it hit.
    fn run(&mut self, name: u32, n: usize) -> usize {
        let hits: Vec<BlockId> = (0..n).map_while(|at| self.place.get(&(name, at)).copied()).collect();
        let mut blocks = hits.clone();
        for &id in &hits {
            self.policy.remove(id);
            self.policy.hit(id);
        }
        for at in hits.len()..n {
            let id = self.clean.pop().unwrap_or_else(|| {
                let victim = self.policy.pop().unwrap();
                self.policy.forget(victim);
                let lost = self.content.remove(&victim).unwrap();
                self.place.remove(&lost);
                victim
            });
            // What was evicted from under a hole may lie there still: it is replaced.
            if let Some(old) = self.place.insert((name, at), id) {
                self.content.remove(&old);
                self.policy.remove(old);
                self.policy.forget(old);
                self.clean.push(old);
            }
            self.content.insert(id, (name, at));
            blocks.push(id);
        }
        blocks.reverse();
        self.policy.push(&blocks);
        self.policy.validate().unwrap();
        hits.len()
    }
}

const POOL: u32 = 400;
const LEN: usize = 40;

/// A cache past the cold start (6 pools of evictions), filled with sequences never hit.
fn warm<E: Eviction>(policy: E) -> Cache<E> {
    let mut cache = Cache::new(policy, POOL);
    for name in 0..80 {
        cache.run(name, LEN);
    }
    cache
}

/// A conversation is hit twice, then a scan of two pools passes; the blocks it hits after that.
fn hits_after_a_scan<E: Eviction>(policy: E) -> usize {
    let mut cache = warm(policy);
    for _ in 0..3 {
        cache.run(1000, LEN);
    }
    for name in 2000..2020 {
        cache.run(name, LEN);
    }
    cache.run(1000, LEN)
}

#[test]
fn a_conversation_survives_a_scan_where_lru_loses_it() {
    assert_eq!(hits_after_a_scan(Lru::new(POOL as usize)), 0);
    assert_eq!(hits_after_a_scan(Slru::new(POOL as usize)), LEN);
}

#[test]
fn a_returning_sequence_is_recognised_by_its_probe_and_kept_from_then_on() {
    let mut cache = warm(Slru::new(POOL as usize));
    cache.run(1000, LEN);
    for name in 2000..2012 {
        cache.run(name, LEN); // more than a pool
    }
    assert_eq!(cache.run(1000, LEN), 16, "the start of a sequence never hit is its probe");
    for name in 3000..3005 {
        cache.run(name, LEN);
    }
    assert_eq!(cache.run(1000, LEN), LEN, "a sequence that was hit stays whole");
}

#[test]
fn sequences_that_all_return_soon_are_kept_whole_in_the_end() {
    let mut cache = warm(Slru::new(POOL as usize));
    let mut hits = Vec::new();
    for name in 1000..1400 {
        cache.run(name, LEN);
        hits.push(cache.run(name - 3, LEN)); // each comes back once, half a pool later
    }
    assert_eq!(hits[10..15], [16; 5], "at first a probe is what is left");
    assert_eq!(hits[390..], [LEN; 10], "then the control has seen that keeping them pays");
}

#[test]
fn what_a_hit_leaves_behind_goes_before_what_was_never_hit() {
    let mut policy = Slru::new(100);
    let ids: Vec<BlockId> = (0..100).map(BlockId).collect();
    for _ in 0..7 {
        policy.push(&ids);
        while policy.pop().is_some() {}
    }
    policy.hit(ids[0]); // in use: the next push is of content that was hit
    policy.push(&ids[..20]);
    policy.push(&ids[20..30]);
    for &id in &ids[10..20] {
        policy.remove(id);
        policy.hit(id);
        policy.validate().unwrap();
    }
    policy.push(&ids[10..20]);
    assert_eq!(policy.order()[..10], ids[..10]);
    let (order, mut popped) = (policy.order(), Vec::new());
    while let Some(id) = policy.pop() {
        popped.push(id);
    }
    assert_eq!(order, popped);
}

/// One step of a random run; numbers pick among what is possible.
#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Pop,
    Hit(usize),
    HitRest(usize),
    Remove(usize),
    Touch(usize),
    Forget(usize),
    Remap(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..24usize).prop_map(Step::Push),
        20 => Just(Step::Pop),
        2 => any::<usize>().prop_map(Step::Hit),
        1 => any::<usize>().prop_map(Step::HitRest),
        1 => any::<usize>().prop_map(Step::Remove),
        1 => any::<usize>().prop_map(Step::Touch),
        1 => any::<usize>().prop_map(Step::Forget),
        2 => any::<usize>().prop_map(Step::Remap),
    ]
}

/// Runs steps over `Slru` and calls `check` after each, with what `Lru` does on the same steps.
fn drive(num_blocks: u32, steps: &[Step], mut check: impl FnMut(&Slru, &Lru)) {
    let (mut slru, mut lru) = (Slru::new(num_blocks as usize), Lru::new(num_blocks as usize));
    let mut out: VecDeque<BlockId> = (0..num_blocks).map(BlockId).collect();
    for step in steps {
        let inside = slru.order();
        let pick = |k: usize| (!inside.is_empty()).then(|| inside[k % inside.len()]);
        let leave = |slru: &mut Slru, out: &mut VecDeque<BlockId>, id| {
            slru.remove(id);
            out.push_back(id);
        };
        match *step {
            Step::Push(n) => {
                let ids: Vec<BlockId> = out.drain(..n.min(out.len())).collect();
                slru.push(&ids);
                lru.push(&ids);
            }
            Step::Pop => {
                let popped = slru.pop();
                assert_eq!(popped, inside.first().copied(), "pop follows order()");
                if let Some(id) = popped {
                    lru.remove(id);
                    out.push_back(id);
                }
            }
            Step::Hit(k) | Step::Remove(k) => {
                if let Some(id) = pick(k) {
                    leave(&mut slru, &mut out, id);
                    lru.remove(id);
                    if matches!(step, Step::Hit(_)) {
                        slru.hit(id);
                    }
                }
            }
            Step::HitRest(k) => {
                for &id in inside.iter().skip(k % (inside.len() + 1)).take(5) {
                    leave(&mut slru, &mut out, id);
                    lru.remove(id);
                    slru.hit(id);
                }
            }
            Step::Touch(k) => slru.hit(BlockId(k as u32 % num_blocks)),
            Step::Forget(k) => {
                if !out.is_empty() {
                    slru.forget(out[k % out.len()]);
                }
            }
            Step::Remap(k) => {
                let (Some(from), Some(to)) = (pick(k), out.pop_front()) else { continue };
                slru.remap(from, to);
                lru.remap(from, to);
                out.push_back(from);
                let moved: Vec<BlockId> = inside.iter().map(|&id| if id == from { to } else { id }).collect();
                assert_eq!(slru.order(), moved, "remap keeps the order");
            }
        }
        slru.validate().unwrap();
        check(&slru, &lru);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn cold_start_is_lru(steps in prop::collection::vec(step(), 1..300)) {
        // 6 pools of evictions are more than there are steps.
        drive(64, &steps, |slru, lru| assert_eq!(slru.order(), lru.order()));
    }

    #[test]
    fn every_invariant_holds_after_every_step(steps in prop::collection::vec(step(), 1..800)) {
        drive(24, &steps, |slru, lru| {
            let sorted = |mut ids: Vec<BlockId>| { ids.sort_unstable(); ids };
            assert_eq!(slru.len(), lru.len());
            assert_eq!(sorted(slru.order()), sorted(lru.order()));
        });
    }
}
