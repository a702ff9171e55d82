//! `clairvoyant`: the block needed farthest in the future goes first (L. A. Belady, IBM Systems Journal 5(2), 1966).
//!
//! Only a replay knows the future. The policy shows what any other leaves on the table.

use std::collections::BTreeSet;

use super::Eviction;
use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Victims by next use, farthest first; among equals the one pushed first.
#[derive(Debug)]
pub struct Clairvoyant {
    next_use: Vec<u64>,
    pushed: Vec<u64>,
    /// `(not next_use, push number, id)`: the smallest is the next victim.
    victims: BTreeSet<(u64, u64, u32)>,
    clock: u64,
}

impl Clairvoyant {
    /// An empty set over ids `0..num_blocks`; every block's next use is "never" until told.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self { next_use: vec![u64::MAX; num_blocks], pushed: vec![0; num_blocks], victims: BTreeSet::new(), clock: 0 }
    }

    fn key(&self, id: BlockId) -> (u64, u64, u32) {
        (!self.next_use[id.index()], self.pushed[id.index()], id.0)
    }
}

impl Eviction for Clairvoyant {
    fn name(&self) -> &'static str {
        "clairvoyant"
    }

    fn len(&self) -> usize {
        self.victims.len()
    }

    fn push(&mut self, ids: &[BlockId]) {
        for &id in ids {
            self.clock += 1;
            self.pushed[id.index()] = self.clock;
            self.victims.insert(self.key(id));
        }
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.victims.pop_first().map(|(_, _, id)| BlockId(id))
    }

    fn remove(&mut self, id: BlockId) {
        let key = self.key(id);
        self.victims.remove(&key);
    }

    fn forget(&mut self, id: BlockId) {
        self.next_use[id.index()] = u64::MAX;
    }

    fn remap(&mut self, from: BlockId, to: BlockId) {
        let key = self.key(from);
        let was_in = self.victims.remove(&key);
        self.next_use[to.index()] = self.next_use[from.index()];
        self.pushed[to.index()] = self.pushed[from.index()];
        self.next_use[from.index()] = u64::MAX;
        if was_in {
            let key = self.key(to);
            self.victims.insert(key);
        }
    }

    fn set_next_use(&mut self, id: BlockId, next_use: u64) -> bool {
        let key = self.key(id);
        let was_in = self.victims.remove(&key);
        self.next_use[id.index()] = next_use;
        if was_in {
            let key = self.key(id);
            self.victims.insert(key);
        }
        true
    }

    fn order(&self) -> Vec<BlockId> {
        self.victims.iter().map(|&(_, _, id)| BlockId(id)).collect()
    }

    fn validate(&self) -> Result<()> {
        match self.victims.iter().find(|&&key| key != self.key(BlockId(key.2))) {
            None => Ok(()),
            Some(key) => Err(Error::corrupt(format!("clairvoyant: block {} is filed under an old key", key.2))),
        }
    }
}
