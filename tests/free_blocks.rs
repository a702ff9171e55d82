//! `FreeBlocks`, every placement with every eviction, against a model that keeps a place for each block.
//!
//! Under `queue`, and for what `lru` and `clairvoyant` give up, the model also knows the order; with `queue` and `lru`
//! that is vLLM's `FreeKVCacheBlockQueue`, which is modelled once more by itself, as vLLM has it.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, clippy::print_stdout, missing_docs)]

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};

use kvcatch::error::{Error, Shortage};
use kvcatch::eviction;
use kvcatch::free::{FreeBlocks, Place, Request};
use kvcatch::ids::BlockId;
use kvcatch::placement::{self, BitSet};
use proptest::prelude::*;

fn config(cases: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// What is wrong with a list of blocks given back.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Nothing,
    OneTwice,
    OneNotOut,
    OneOutOfRange,
}

#[derive(Clone, Debug)]
enum Op {
    Take { n: u8, after: Option<u8>, contiguous: bool },
    Give { at: u8, n: u8, cached: bool, tail_first: bool, wrong: Wrong },
    Remove { id: u8 },
    Extract { id: u8 },
    Touch { id: u8 },
    MakeClean { id: u8 },
    Relocate { from: u8, to: u8 },
    Retain { id: u8, priority: u8, ttl: Option<u8> },
    Clock { forward: u8 },
    NextUse { id: u8, when: u8 },
    Evict { n: u8 },
    FindRun { n: u8, after: Option<u8>, excluded: Vec<u8> },
    TakeExactly { start: u8, n: u8 },
}

fn op() -> impl Strategy<Value = Op> {
    // Ids a little beyond the pool too.
    let id = || 0..45u8;
    let wrong = prop_oneof![
        12 => Just(Wrong::Nothing),
        1 => Just(Wrong::OneTwice),
        1 => Just(Wrong::OneNotOut),
        1 => Just(Wrong::OneOutOfRange),
    ];
    prop_oneof![
        6 => (prop_oneof![3 => 0..6u8, 1 => 0..45u8], prop::option::weighted(0.4, id()), prop::bool::weighted(0.2))
            .prop_map(|(n, after, contiguous)| Op::Take { n, after, contiguous }),
        7 => (any::<u8>(), 0..12u8, prop::bool::weighted(0.7), any::<bool>(), wrong)
            .prop_map(|(at, n, cached, tail_first, wrong)| Op::Give { at, n, cached, tail_first, wrong }),
        2 => id().prop_map(|id| Op::Remove { id }),
        1 => id().prop_map(|id| Op::Extract { id }),
        1 => id().prop_map(|id| Op::Touch { id }),
        1 => id().prop_map(|id| Op::MakeClean { id }),
        2 => (id(), id()).prop_map(|(from, to)| Op::Relocate { from, to }),
        2 => (id(), 0..4u8, prop::option::of(0..12u8)).prop_map(|(id, priority, ttl)| Op::Retain { id, priority, ttl }),
        1 => (0..6u8).prop_map(|forward| Op::Clock { forward }),
        1 => (id(), 0..20u8).prop_map(|(id, when)| Op::NextUse { id, when }),
        1 => (0..6u8).prop_map(|n| Op::Evict { n }),
        1 => (1..8u8, prop::option::weighted(0.3, id()), prop::collection::vec(id(), 0..6))
            .prop_map(|(n, after, excluded)| Op::FindRun { n, after, excluded }),
        1 => (id(), 0..6u8).prop_map(|(start, n)| Op::TakeExactly { start, n }),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Out,
    Clean,
    Cached,
}

/// Group among the cached blocks, first to go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Expired,
    Ordinary,
    Retained(u8),
}

#[derive(Clone, Copy, Debug)]
struct Victim {
    id: u32,
    group: Group,
    pushed: u64,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    priority: u8,
    until: u64,
    next_use: u64,
}

const NOTHING_KNOWN: Known = Known { priority: 0, until: 0, next_use: u64::MAX };

struct Model {
    is: Vec<Is>,
    /// Clean blocks as `queue` hands them out.
    clean: VecDeque<u32>,
    victims: Vec<Victim>,
    known: Vec<Known>,
    pushes: u64,
    now: u64,
    evictions: u64,
    clairvoyant: bool,
}

impl Model {
    fn count(&self, is: Is) -> usize {
        self.is.iter().filter(|&&other| other == is).count()
    }

    fn is(&self, id: u32) -> Option<Is> {
        self.is.get(id as usize).copied()
    }

    /// Cached blocks, next victim first.
    fn order_of_victims(&self) -> Vec<u32> {
        let key = |victim: &Victim| {
            let far = if self.clairvoyant && victim.group == Group::Ordinary {
                u64::MAX - self.known[victim.id as usize].next_use
            } else {
                0
            };
            (victim.group, far, victim.pushed)
        };
        let mut victims = self.victims.clone();
        victims.sort_by_key(key);
        victims.iter().map(|victim| victim.id).collect()
    }

    fn push(&mut self, id: u32) {
        self.pushes += 1;
        let group = match self.known[id as usize].priority {
            0 => Group::Ordinary,
            priority => Group::Retained(priority),
        };
        self.victims.push(Victim { id, group, pushed: self.pushes });
    }

    /// The block is handed out, with what is known about its content if that stays.
    fn leave(&mut self, id: u32, content_lost: bool) {
        self.is[id as usize] = Is::Out;
        self.clean.retain(|&other| other != id);
        self.victims.retain(|victim| victim.id != id);
        if content_lost {
            self.known[id as usize] = NOTHING_KNOWN;
        }
    }

    fn become_clean(&mut self, id: u32) {
        self.leave(id, true);
        self.is[id as usize] = Is::Clean;
        self.clean.push_front(id);
    }

    fn longest(&self, counts: impl Fn(Is) -> bool) -> usize {
        let (mut best, mut run) = (0, 0);
        for &is in &self.is {
            run = if counts(is) { run + 1 } else { 0 };
            best = best.max(run);
        }
        best
    }

    fn shortage(&self, required: usize) -> Shortage {
        Shortage {
            required,
            free: self.count(Is::Clean),
            cached: self.count(Is::Cached),
            reserved: 0,
            largest_run: self.longest(|is| is != Is::Out),
        }
    }

    fn find_run(&self, n: usize, after: Option<u32>, excluded: &BTreeSet<u32>) -> Option<u32> {
        let usable = |id: u32| self.is(id).is_some_and(|is| is != Is::Out) && !excluded.contains(&id);
        let ends = |start: u32| (start..start + n as u32).all(usable);
        if let Some(after) = after {
            return Some(after + 1).filter(|&start| ends(start));
        }
        let cost = |start: u32| {
            let lost = (start..start + n as u32).filter(|&id| self.is(id) == Some(Is::Cached)).count();
            let below = (0..start).rev().take_while(|&id| usable(id)).count();
            let above = (start..).take_while(|&id| usable(id)).count();
            (lost, below + above, start)
        };
        (0..self.is.len() as u32).filter(|&start| ends(start)).min_by_key(|&start| cost(start))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    OutOfBlocks(Shortage),
    Invalid(&'static str),
    DoubleFree(u32),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::OutOfBlocks { shortage, .. } => Self::OutOfBlocks(shortage),
            Error::InvalidArgument { name, .. } => Self::Invalid(name),
            Error::DoubleFree { block } => Self::DoubleFree(block.0),
            error => panic!("never from FreeBlocks: {error}"),
        }
    }
}

struct Machine {
    free: FreeBlocks,
    model: Model,
    /// The last call was refused.
    refused: Cell<bool>,
}

impl Machine {
    fn new(n: usize, placement: &str, eviction: &str, seed: u64) -> Self {
        let free = FreeBlocks::new(n, placement, eviction, seed).unwrap();
        assert_eq!((free.placement(), free.eviction(), free.num_blocks()), (placement, eviction, n));
        let model = Model {
            is: vec![Is::Clean; n],
            clean: (0..n as u32).collect(),
            victims: Vec::new(),
            known: vec![NOTHING_KNOWN; n],
            pushes: 0,
            now: 0,
            evictions: 0,
            clairvoyant: eviction == "clairvoyant",
        };
        Self { free, model, refused: Cell::new(false) }
    }

    fn is_queue(&self) -> bool {
        self.free.placement() == "queue"
    }

    /// Victims go one by one in the model's order: no random policy, and no candidates kept between calls.
    fn knows_victims(&self) -> bool {
        self.free.eviction() != "slru" && self.free.placement() != "bitmap"
    }

    fn dump(&self) -> String {
        format!("{:?}", self.free)
    }

    fn agree(&self, predicted: Result<(), Refusal>, got: Result<(), Error>) -> bool {
        let got = got.map_err(Refusal::from);
        assert_eq!(got, predicted);
        self.refused.set(got.is_err());
        got.is_ok()
    }

    fn take(&mut self, n: usize, after: Option<u32>, contiguous: bool) {
        let model = &self.model;
        let start = if contiguous { model.find_run(n, after, &BTreeSet::new()) } else { None };
        let predicted = match after.map(|after| model.is(after)) {
            Some(None) => Err(Refusal::Invalid("block")),
            Some(Some(is)) if is != Is::Out => Err(Refusal::Invalid("after")),
            _ if n > model.count(Is::Clean) + model.count(Is::Cached) => Err(Refusal::OutOfBlocks(model.shortage(n))),
            _ if contiguous && n > 0 && start.is_none() => Err(Refusal::OutOfBlocks(model.shortage(n))),
            _ => Ok(()),
        };
        // What stands in the buffers stays there.
        let (mut out, mut evicted) = (vec![BlockId(7)], vec![BlockId(9)]);
        let request = Request { after: after.map(BlockId), contiguous, fixed: false };
        let taken = self.free.take(n, request, &mut out, &mut evicted);
        let served = self.agree(predicted, taken);
        assert_eq!((out.remove(0), evicted.remove(0)), (BlockId(7), BlockId(9)));
        assert_eq!(out.len(), if served { n } else { 0 });
        let start = start.filter(|_| n > 0);
        self.check_taken(&out, &evicted, start, contiguous);
        if let (false, Some(after)) = (contiguous, after.filter(|_| served && n > 0)) {
            let growing = matches!(self.free.placement(), "bitmap" | "buddy");
            let next = self.model.is(after + 1) == Some(Is::Clean);
            assert!(
                !(growing && next) || out[0].0 == after + 1,
                "block behind {after} is free and passed over: {out:?}"
            );
        }
        for id in out {
            self.model.evictions += u64::from(self.model.is(id.0) == Some(Is::Cached));
            self.model.leave(id.0, true);
        }
    }

    fn check_taken(&self, out: &[BlockId], evicted: &[BlockId], start: Option<u32>, exactly: bool) {
        let model = &self.model;
        let distinct: BTreeSet<u32> = out.iter().map(|id| id.0).collect();
        assert_eq!(distinct.len(), out.len(), "a block is handed out twice: {out:?}");
        assert!(
            distinct.iter().all(|&id| model.is(id).is_some_and(|is| is != Is::Out)),
            "not there to be taken: {out:?}"
        );
        let lost: Vec<BlockId> = out.iter().copied().filter(|id| model.is(id.0) == Some(Is::Cached)).collect();
        assert_eq!(evicted, lost, "lost content is not what is reported");
        if let Some(start) = start {
            assert!(out.iter().map(|id| id.0).eq(start..start + out.len() as u32), "not the best run: {out:?}");
        }
        if exactly {
            return;
        }
        let clean = model.count(Is::Clean);
        if self.free.placement() != "bitmap" {
            assert_eq!(lost.len(), out.len().saturating_sub(clean), "evicted without need");
        }
        let ids: Vec<u32> = out.iter().map(|id| id.0).collect();
        let mut victims = model.order_of_victims();
        victims.truncate(lost.len());
        if self.is_queue() && self.knows_victims() {
            assert!(ids.iter().eq(model.clean.iter().chain(&victims).take(ids.len())), "order: {ids:?}");
        } else if self.is_queue() {
            assert!(ids.iter().take(clean).eq(model.clean.iter().take(ids.len())), "order of clean blocks: {ids:?}");
        } else if self.knows_victims() {
            let lost: BTreeSet<u32> = lost.iter().map(|id| id.0).collect();
            assert_eq!(lost, victims.into_iter().collect(), "other victims");
        }
        if self.free.placement() == "sorted" {
            assert!(ids.is_sorted(), "sorted: {ids:?}");
            if lost.is_empty() {
                let lowest = (0..model.is.len() as u32).filter(|&id| model.is(id) == Some(Is::Clean)).take(ids.len());
                assert!(ids.iter().copied().eq(lowest), "not the lowest ids: {ids:?}");
            }
        }
    }

    fn give(&mut self, at: u8, n: u8, cached: bool, tail_first: bool, wrong: Wrong) {
        let bound = self.model.is.len() as u32;
        let mut out: Vec<u32> = (0..bound).filter(|&id| self.model.is(id) == Some(Is::Out)).collect();
        if !out.is_empty() {
            let mid = usize::from(at) % out.len();
            out.rotate_left(mid);
        }
        let mut ids: Vec<u32> = out.iter().copied().take(usize::from(n)).collect();
        if tail_first {
            ids.reverse();
        }
        let place = usize::from(at / 7) % (ids.len() + 1);
        match wrong {
            Wrong::Nothing => {}
            Wrong::OneTwice => ids.extend(ids.first().copied()),
            Wrong::OneNotOut => {
                let there = (0..bound).find(|&id| self.model.is(id) != Some(Is::Out));
                there.into_iter().for_each(|id| ids.insert(place, id));
            }
            Wrong::OneOutOfRange => ids.insert(place, bound + u32::from(at)),
        }
        let first_bad = ids.iter().enumerate().find_map(|(i, &id)| match self.model.is(id) {
            None => Some(Refusal::Invalid("block")),
            Some(Is::Out) if !ids[..i].contains(&id) => None,
            Some(_) => Some(Refusal::DoubleFree(id)),
        });
        let predicted = first_bad.map_or(Ok(()), Err);
        let blocks: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
        let given = if cached { self.free.give_cached(&blocks) } else { self.free.give_clean(&blocks) };
        if !self.agree(predicted, given) {
            return;
        }
        if cached {
            for &id in &ids {
                self.model.is[id as usize] = Is::Cached;
                self.model.push(id);
            }
        } else {
            // The first is the first to go again.
            ids.iter().rev().for_each(|&id| self.model.become_clean(id));
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Take { n, after, contiguous } => self.take(usize::from(n), after.map(u32::from), contiguous),
            Op::Give { at, n, cached, tail_first, wrong } => self.give(at, n, cached, tail_first, wrong),
            Op::Remove { id } | Op::Extract { id } => {
                let id = u32::from(id);
                let there = self.model.is(id).is_some_and(|is| is != Is::Out);
                let predicted = if there { Ok(()) } else { Err(Refusal::Invalid("block")) };
                let hit = matches!(op, Op::Remove { .. });
                let removed = if hit { self.free.remove(BlockId(id)) } else { self.free.extract(BlockId(id)) };
                if self.agree(predicted, removed) {
                    self.model.leave(id, false);
                }
            }
            Op::Touch { id } => {
                let known = self.model.is(u32::from(id)).map(|_| ()).ok_or(Refusal::Invalid("block"));
                let touched = self.free.touch(BlockId(u32::from(id)));
                self.agree(known, touched);
            }
            Op::MakeClean { id } => {
                let id = u32::from(id);
                let cached = self.model.is(id) == Some(Is::Cached);
                let predicted = if cached { Ok(()) } else { Err(Refusal::Invalid("block")) };
                let made = self.free.make_clean(BlockId(id));
                if self.agree(predicted, made) {
                    self.model.become_clean(id);
                }
            }
            Op::Relocate { from, to } => self.relocate(u32::from(from), u32::from(to)),
            Op::Retain { id, priority, ttl } => {
                let until = ttl.map_or(u64::MAX, |ttl| self.model.now + u64::from(ttl));
                self.retain(u32::from(id), priority, until);
            }
            Op::Clock { forward } => {
                // Never backwards.
                self.free.set_now(self.model.now / 2);
                self.model.now += u64::from(forward);
                self.free.set_now(self.model.now);
                assert_eq!(self.free.now(), self.model.now);
                let (known, now) = (&mut self.model.known, self.model.now);
                for (id, known) in known.iter_mut().enumerate() {
                    if known.priority > 0 && known.until <= now {
                        known.priority = 0;
                        let waiting = self.model.victims.iter_mut().find(|victim| victim.id as usize == id);
                        waiting.into_iter().for_each(|victim| victim.group = Group::Expired);
                    }
                }
            }
            Op::NextUse { id, when } => {
                let (id, when) = (u32::from(id), u64::from(when));
                if self.model.is(id) == Some(Is::Clean) {
                    return; // nothing that could be needed again
                }
                match self.free.set_next_use(BlockId(id), when) {
                    Ok(used) => {
                        assert_eq!(used, self.model.clairvoyant);
                        self.model.known[id as usize].next_use = when;
                    }
                    Err(error) => {
                        assert_eq!((Refusal::from(error), self.model.is(id)), (Refusal::Invalid("block"), None));
                    }
                }
            }
            Op::Evict { n } => self.evict(usize::from(n)),
            Op::FindRun { n, after, ref excluded } => {
                let mut set = BitSet::new(self.model.is.len());
                let excluded: BTreeSet<u32> =
                    excluded.iter().map(|&id| u32::from(id) % self.model.is.len() as u32).collect();
                excluded.iter().for_each(|&id| assert!(set.insert(id)));
                let (n, after) = (usize::from(n), after.map(u32::from));
                let found = self.free.find_run(n, after.map(BlockId), &set);
                assert_eq!(found.map(|id| id.0), self.model.find_run(n, after, &excluded));
            }
            Op::TakeExactly { start, n } => {
                let (start, n) = (u32::from(start), usize::from(n));
                let there = |id: u32| self.model.is(id).is_some_and(|is| is != Is::Out);
                let all = (start..start + n as u32).all(there);
                let (mut out, mut evicted) = (Vec::new(), Vec::new());
                let taken = self.free.take_exactly(BlockId(start), n, &mut out, &mut evicted);
                let served = self.agree(if all { Ok(()) } else { Err(Refusal::Invalid("block")) }, taken);
                assert_eq!(out.len(), if served { n } else { 0 });
                self.check_taken(&out, &evicted, served.then_some(start), true);
                for id in out {
                    self.model.evictions += u64::from(self.model.is(id.0) == Some(Is::Cached));
                    self.model.leave(id.0, true);
                }
            }
        }
    }

    fn relocate(&mut self, from: u32, to: u32) {
        let predicted = match (self.model.is(to), self.model.is(from)) {
            (None, _) => Err(Refusal::Invalid("block")),
            (Some(Is::Out | Is::Cached), _) => Err(Refusal::Invalid("destination")),
            (_, None) => Err(Refusal::Invalid("block")),
            (_, Some(Is::Clean)) => Err(Refusal::Invalid("source")),
            _ => Ok(()),
        };
        let moved = self.free.relocate(BlockId(from), BlockId(to));
        if !self.agree(predicted, moved) {
            return;
        }
        let (is, known) = (self.model.is[from as usize], self.model.known[from as usize]);
        let victim = self.model.victims.iter().copied().find(|victim| victim.id == from);
        self.model.leave(to, true);
        self.model.become_clean(from);
        self.model.is[to as usize] = is;
        self.model.known[to as usize] = known;
        // In the same place of the order.
        self.model.victims.extend(victim.map(|victim| Victim { id: to, ..victim }));
    }

    fn retain(&mut self, id: u32, priority: u8, until: u64) {
        let predicted = match self.model.is(id) {
            None | Some(Is::Clean) => Err(Refusal::Invalid("block")),
            Some(Is::Out | Is::Cached) => Ok(()),
        };
        let retained = self.free.retain(BlockId(id), priority, until);
        if !self.agree(predicted, retained) {
            return;
        }
        let known = &mut self.model.known[id as usize];
        known.priority = if until > self.model.now { priority } else { 0 };
        known.until = until;
        if self.model.is(id) == Some(Is::Cached) {
            self.model.victims.retain(|victim| victim.id != id);
            self.model.push(id);
        }
    }

    fn evict(&mut self, n: usize) {
        let expected = n.min(self.model.count(Is::Cached));
        let mut evicted = vec![BlockId(3)];
        self.free.evict(n, &mut evicted);
        assert_eq!(evicted.remove(0), BlockId(3));
        let ids: Vec<u32> = evicted.iter().map(|id| id.0).collect();
        assert_eq!(ids.len(), expected, "{ids:?}");
        if self.knows_victims() {
            let mut victims = self.model.order_of_victims();
            victims.truncate(n);
            assert_eq!(ids, victims, "other victims");
        }
        for id in ids {
            assert_eq!(self.model.is(id), Some(Is::Cached), "block {id} is no victim");
            self.model.become_clean(id);
            self.model.evictions += 1;
        }
    }

    fn check(&self) {
        let (free, model) = (&self.free, &self.model);
        free.validate().unwrap();
        assert_eq!(free.num_clean(), model.count(Is::Clean));
        assert_eq!(free.num_cached(), model.count(Is::Cached));
        assert_eq!(free.len(), free.num_clean() + free.num_cached());
        assert_eq!(free.is_empty(), model.count(Is::Out) == model.is.len());
        assert_eq!(free.num_evictions(), model.evictions);
        assert_eq!(free.largest_run(), model.longest(|is| is != Is::Out));
        assert_eq!(free.largest_clean_run(), model.longest(|is| is == Is::Clean));
        for (id, is) in model.is.iter().enumerate() {
            let id = BlockId(id as u32);
            let place = free.place_of(id).unwrap();
            let same = match is {
                Is::Out => place == Place::Out,
                Is::Clean => place == Place::Clean,
                Is::Cached => matches!(place, Place::Cached | Place::Candidate),
            };
            assert!(same, "block {id} is {is:?} and in {place:?}");
            assert_eq!(free.is_cached(id), *is == Is::Cached);
        }
        let order: Vec<u32> = free.order().iter().map(|id| id.0).collect();
        let there: BTreeSet<u32> = (0..model.is.len() as u32).filter(|&id| model.is(id) != Some(Is::Out)).collect();
        assert_eq!(order.len(), there.len());
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), there);
        let (clean, cached) = order.split_at(model.clean.len());
        assert!(clean.iter().all(|&id| model.is(id) == Some(Is::Clean)), "clean blocks are not first");
        if self.is_queue() {
            assert!(clean.iter().eq(&model.clean), "order of clean blocks");
        }
        if self.knows_victims() {
            assert_eq!(cached, model.order_of_victims(), "order of victims");
        }
    }
}

fn against_the_model(placement: &str, eviction: &str, n: usize, seed: u64, ops: &[Op]) {
    let mut machine = Machine::new(n, placement, eviction, seed);
    machine.check();
    for op in ops {
        let before = machine.dump();
        machine.refused.set(matches!(op, Op::FindRun { .. }));
        machine.run(op);
        machine.check();
        if machine.refused.get() {
            assert_eq!(machine.dump(), before, "{op:?} changed something");
        }
    }
    // Everything comes back and everything can be taken.
    let out: Vec<BlockId> = (0..n as u32).map(BlockId).filter(|id| machine.model.is(id.0) == Some(Is::Out)).collect();
    machine.free.give_cached(&out).unwrap();
    let (mut all, mut evicted) = (Vec::new(), Vec::new());
    machine.free.take(n, Request::default(), &mut all, &mut evicted).unwrap();
    machine.free.validate().unwrap();
    all.sort_unstable();
    assert!(all.iter().map(|id| id.0).eq(0..n as u32));
}

proptest! {
    #![proptest_config(config(350))]

    #[test]
    fn every_placement_and_eviction_against_the_model(
        placement in prop::sample::select(placement::NAMES.to_vec()),
        eviction in prop::sample::select(eviction::NAMES.to_vec()),
        n in 1..=40usize,
        seed in any::<u64>(),
        ops in prop::collection::vec(op(), 1..160),
    ) {
        against_the_model(placement, eviction, n, seed, &ops);
    }

    /// The baseline gets as many cases as all others together.
    #[test]
    fn queue_and_lru_against_the_model(n in 1..=40usize, ops in prop::collection::vec(op(), 1..160)) {
        against_the_model("queue", "lru", n, 0, &ops);
    }
}

// -------------------------------------------------------------------------------------------------- vLLM

/// vLLM 0.32, `v1/core/kv_cache_utils.py`: `FreeKVCacheBlockQueue`, one list of clean and cached blocks.
struct VllmQueue(VecDeque<u32>);

impl VllmQueue {
    fn popleft_n(&mut self, n: usize) -> Vec<u32> {
        self.0.drain(..n).collect()
    }

    fn remove(&mut self, id: u32) {
        let at = self.0.iter().position(|&other| other == id).unwrap();
        self.0.remove(at);
    }

    fn prepend_n(&mut self, ids: &[u32]) {
        ids.iter().rev().for_each(|&id| self.0.push_front(id));
    }

    fn append_n(&mut self, ids: &[u32]) {
        self.0.extend(ids);
    }
}

#[derive(Clone, Debug)]
enum VllmOp {
    /// A request takes new blocks, and touches cached ones first.
    Allocate { n: u8, hits: Vec<u8> },
    /// A request is freed, tail first; `hashed` of its first blocks are cached.
    Free { request: u8, hashed: u8 },
}

fn vllm_op() -> impl Strategy<Value = VllmOp> {
    prop_oneof![
        (0..12u8, prop::collection::vec(any::<u8>(), 0..4)).prop_map(|(n, hits)| VllmOp::Allocate { n, hits }),
        (any::<u8>(), 0..12u8).prop_map(|(request, hashed)| VllmOp::Free { request, hashed }),
    ]
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn queue_and_lru_are_vllms_free_queue(blocks in 1..=64u32, ops in prop::collection::vec(vllm_op(), 1..150)) {
        let mut vllm = VllmQueue((0..blocks).collect());
        let mut free = FreeBlocks::new(blocks as usize, "queue", "lru", 0).unwrap();
        let mut requests: Vec<Vec<u32>> = Vec::new();
        let mut cached: BTreeSet<u32> = BTreeSet::new();
        for op in ops {
            match op {
                VllmOp::Allocate { n, hits } => {
                    let mut table = Vec::new();
                    for hit in hits {
                        let findable: Vec<u32> = cached.iter().copied().collect();
                        if !findable.is_empty() {
                            let id = findable[usize::from(hit) % findable.len()];
                            vllm.remove(id);
                            free.remove(BlockId(id)).unwrap();
                            cached.remove(&id);
                            table.push(id);
                        }
                    }
                    let n = usize::from(n).min(vllm.0.len());
                    let ids = vllm.popleft_n(n);
                    let after = table.last().copied().map(BlockId);
                    let (mut out, mut evicted) = (Vec::new(), Vec::new());
                    free.take(n, Request { after, ..Request::default() }, &mut out, &mut evicted).unwrap();
                    prop_assert_eq!(out.iter().map(|id| id.0).collect::<Vec<_>>(), ids.clone());
                    let lost: Vec<u32> = ids.iter().copied().filter(|id| cached.remove(id)).collect();
                    prop_assert_eq!(evicted.iter().map(|id| id.0).collect::<Vec<_>>(), lost);
                    table.extend(ids);
                    requests.push(table);
                }
                VllmOp::Free { request, hashed } => {
                    if requests.is_empty() {
                        continue;
                    }
                    let table = requests.swap_remove(usize::from(request) % requests.len());
                    let split = usize::from(hashed).min(table.len());
                    let first: Vec<u32> = table[split..].iter().rev().copied().collect();
                    let last: Vec<u32> = table[..split].iter().rev().copied().collect();
                    vllm.prepend_n(&first);
                    vllm.append_n(&last);
                    free.give_clean(&first.into_iter().map(BlockId).collect::<Vec<_>>()).unwrap();
                    free.give_cached(&last.iter().copied().map(BlockId).collect::<Vec<_>>()).unwrap();
                    cached.extend(last);
                }
            }
            free.validate().unwrap();
            let order: Vec<u32> = free.order().iter().map(|id| id.0).collect();
            prop_assert_eq!(order, vllm.0.iter().copied().collect::<Vec<_>>());
        }
    }
}

// ------------------------------------------------------------------------------------------- fixed cases

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

#[test]
fn impossible_pools_are_refused() {
    for (n, placement, eviction) in [(0, "queue", "lru"), (8, "stack", "lru"), (8, "queue", "fifo")] {
        let error = FreeBlocks::new(n, placement, eviction, 0).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    assert!(FreeBlocks::new((1 << 31) + 1, "queue", "lru", 0).is_err());
}

#[test]
fn a_double_free_changes_nothing() {
    for placement in placement::NAMES {
        for eviction in eviction::NAMES {
            let mut free = FreeBlocks::new(8, placement, eviction, 0).unwrap();
            let mut out = Vec::new();
            free.take(8, Request::default(), &mut out, &mut Vec::new()).unwrap();
            free.give_cached(&ids(&[3, 2])).unwrap();
            let before = format!("{free:?}");
            for (wrong, block) in [(&[5, 4, 5][..], 5), (&[5, 3][..], 3), (&[2, 5][..], 2)] {
                let error = Error::DoubleFree { block: BlockId(block) };
                assert_eq!(free.give_clean(&ids(wrong)), Err(error.clone()), "{placement} {eviction}");
                assert_eq!(free.give_cached(&ids(wrong)), Err(error), "{placement} {eviction}");
            }
            assert!(matches!(free.give_clean(&ids(&[5, 8])), Err(Error::InvalidArgument { .. })));
            assert_eq!(format!("{free:?}"), before, "{placement} {eviction}");
            free.give_clean(&ids(&[5, 4])).unwrap();
            free.validate().unwrap();
        }
    }
}

#[test]
fn evicts_only_when_clean_blocks_run_out() {
    for placement in ["queue", "sorted", "buddy"] {
        let mut free = FreeBlocks::new(16, placement, "lru", 0).unwrap();
        let (mut out, mut evicted) = (Vec::new(), Vec::new());
        free.take(16, Request::default(), &mut out, &mut evicted).unwrap();
        free.give_cached(&ids(&[7, 6, 5, 4])).unwrap();
        free.give_clean(&ids(&[11, 10, 9, 8])).unwrap();
        out.clear();
        free.take(4, Request::default(), &mut out, &mut evicted).unwrap();
        assert!(evicted.is_empty() && out.iter().all(|id| (8..12).contains(&id.0)), "{placement}: {out:?}");
        out.clear();
        free.take(2, Request::default(), &mut out, &mut evicted).unwrap();
        evicted.sort_unstable();
        assert_eq!(evicted, ids(&[6, 7]), "{placement}: least recently used first");
    }
}
