//! Retention: priorities and time to live over any eviction policy.
//!
//! A block with a priority is given up only after every block of lower priority; among equals the one that became
//! evictable first. When its time to live is over it is next to go. Pools that never retain pay one branch.

use std::collections::{BTreeSet, BinaryHeap};

use super::Eviction;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::placement::BitSet;

/// What is kept of a retained block.
#[derive(Copy, Clone, Debug, Default)]
struct Kept {
    /// 0: not retained.
    priority: u8,
    /// Clock value from which it is an ordinary victim again; `u64::MAX` never.
    until: u64,
    /// Push number, when evictable.
    order: u64,
}

/// A policy with retained blocks on top.
#[derive(Debug)]
pub struct Retention {
    inner: Box<dyn Eviction>,
    kept: Vec<Kept>,
    /// Retained blocks that are evictable: `(priority, push number, id)`.
    waiting: BTreeSet<(u8, u64, u32)>,
    /// Evictable blocks whose time is over, first to go.
    expired: BTreeSet<(u64, u32)>,
    /// When retained blocks expire, soonest first; may hold entries that are out of date.
    deadlines: BinaryHeap<std::cmp::Reverse<(u64, u32)>>,
    clock: u64,
    now: u64,
    in_use: bool,
    /// Evictable blocks that somebody still wants: no early victims.
    watched: BitSet,
}

impl Retention {
    /// Retention over `inner`, which must be empty.
    #[must_use]
    pub fn new(inner: Box<dyn Eviction>, num_blocks: usize) -> Self {
        Self {
            inner,
            kept: vec![Kept::default(); num_blocks],
            waiting: BTreeSet::new(),
            expired: BTreeSet::new(),
            deadlines: BinaryHeap::new(),
            clock: 0,
            now: 0,
            in_use: false,
            watched: BitSet::new(num_blocks),
        }
    }

    /// Whether any block has an end of its time to live ahead, so that the clock matters.
    #[must_use]
    pub fn needs_clock(&self) -> bool {
        !self.deadlines.is_empty()
    }

    /// Sets the clock (milliseconds, never backwards) and lets what is over expire.
    pub fn set_now(&mut self, now: u64) {
        self.now = self.now.max(now);
        while let Some(&std::cmp::Reverse((until, id))) = self.deadlines.peek() {
            if until > self.now {
                break;
            }
            self.deadlines.pop();
            let kept = self.kept[id as usize];
            if kept.priority > 0 && kept.until == until {
                if self.waiting.remove(&(kept.priority, kept.order, id)) {
                    self.expired.insert((kept.order, id));
                }
                self.kept[id as usize].priority = 0;
            }
        }
    }

    /// The clock, in milliseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Retains a block with content at `priority` (0 ends it) until the clock reaches `until`. `evictable` says
    /// whether the block is in this set now.
    pub fn retain(&mut self, id: BlockId, priority: u8, until: u64, evictable: bool) {
        if evictable {
            self.remove(id);
        }
        let kept = &mut self.kept[id.index()];
        kept.priority = if until > self.now { priority } else { 0 };
        kept.until = until;
        self.in_use = true;
        if kept.priority > 0 && until != u64::MAX {
            self.deadlines.push(std::cmp::Reverse((until, id.0)));
        }
        if evictable {
            self.push(&[id]);
        }
    }

    /// From now on the block, which must be evictable, is not given up early.
    pub fn watch(&mut self, id: BlockId) {
        self.watched.insert(id.0);
    }

    fn unwatch(&mut self, id: BlockId) {
        if !self.watched.is_empty() {
            self.watched.remove(id.0);
        }
    }

    /// The next victim, if it may go before its block is needed: nothing retained, and nothing from the first watched
    /// block on.
    pub fn pop_early(&mut self) -> Option<BlockId> {
        if !self.watched.is_empty() {
            let expired = self.expired.first().map(|&(_, id)| BlockId(id));
            if expired.or_else(|| self.inner.next()).is_some_and(|id| self.watched.contains(id.0)) {
                return None;
            }
        }
        if self.in_use
            && let Some((_, id)) = self.expired.pop_first()
        {
            return Some(BlockId(id));
        }
        self.inner.pop()
    }

    fn push_kept(&mut self, id: BlockId) -> bool {
        let kept = &mut self.kept[id.index()];
        if kept.priority == 0 {
            return false;
        }
        self.clock += 1;
        kept.order = self.clock;
        self.waiting.insert((kept.priority, kept.order, id.0))
    }

    fn take_kept(&mut self, id: BlockId) -> bool {
        let kept = self.kept[id.index()];
        self.waiting.remove(&(kept.priority, kept.order, id.0)) || self.expired.remove(&(kept.order, id.0))
    }
}

impl Eviction for Retention {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn len(&self) -> usize {
        self.inner.len() + self.waiting.len() + self.expired.len()
    }

    fn push(&mut self, ids: &[BlockId]) {
        if !self.in_use {
            self.inner.push(ids);
            return;
        }
        let ordinary: Vec<BlockId> = ids.iter().copied().filter(|&id| !self.push_kept(id)).collect();
        self.inner.push(&ordinary);
    }

    fn pop(&mut self) -> Option<BlockId> {
        if self.in_use
            && let Some((_, id)) = self.expired.pop_first()
        {
            return Some(BlockId(id));
        }
        self.inner.pop().or_else(|| self.waiting.pop_first().map(|(_, _, id)| BlockId(id)))
    }

    fn remove(&mut self, id: BlockId) {
        self.unwatch(id);
        if !(self.in_use && self.take_kept(id)) {
            self.inner.remove(id);
        }
    }

    fn hit(&mut self, id: BlockId) {
        self.inner.hit(id);
    }

    fn forget(&mut self, id: BlockId) {
        self.unwatch(id);
        if self.in_use {
            self.kept[id.index()] = Kept::default();
        }
        self.inner.forget(id);
    }

    fn forget_all(&mut self, ids: &[BlockId]) {
        if !self.watched.is_empty() {
            for &id in ids {
                self.unwatch(id);
            }
        }
        if self.in_use {
            for id in ids {
                self.kept[id.index()] = Kept::default();
            }
        }
        self.inner.forget_all(ids);
    }

    fn remap(&mut self, from: BlockId, to: BlockId) {
        if self.in_use {
            let kept = std::mem::take(&mut self.kept[from.index()]);
            self.kept[to.index()] = kept;
            if kept.priority > 0 && kept.until != u64::MAX {
                self.deadlines.push(std::cmp::Reverse((kept.until, to.0)));
            }
            if self.waiting.remove(&(kept.priority, kept.order, from.0)) {
                self.waiting.insert((kept.priority, kept.order, to.0));
            }
            if self.expired.remove(&(kept.order, from.0)) {
                self.expired.insert((kept.order, to.0));
            }
        }
        if self.watched.contains(from.0) {
            self.watched.remove(from.0);
            self.watched.insert(to.0);
        }
        self.inner.remap(from, to);
    }

    fn set_next_use(&mut self, id: BlockId, next_use: u64) -> bool {
        self.inner.set_next_use(id, next_use)
    }

    fn order(&self) -> Vec<BlockId> {
        let expired = self.expired.iter().map(|&(_, id)| BlockId(id));
        let kept = self.waiting.iter().map(|&(_, _, id)| BlockId(id));
        expired.chain(self.inner.order()).chain(kept).collect()
    }

    fn validate(&self) -> Result<()> {
        for &(priority, order, id) in &self.waiting {
            let kept = self.kept[id as usize];
            if (kept.priority, kept.order) != (priority, order) {
                return Err(Error::corrupt(format!("retention: block {id} is filed under an old priority")));
            }
        }
        self.inner.validate()
    }
}
