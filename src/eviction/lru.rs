//! `lru`: least recently used first, a sequence's tail before its head. vLLM's order.

use super::Eviction;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::links::Links;

/// One list, oldest first.
#[derive(Debug)]
pub struct Lru {
    links: Links,
}

impl Lru {
    /// An empty list over ids `0..num_blocks`.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self { links: Links::new(num_blocks) }
    }
}

impl Eviction for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn len(&self) -> usize {
        self.links.len()
    }

    fn push(&mut self, ids: &[BlockId]) {
        for id in ids {
            self.links.push_back(id.0);
        }
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.links.pop_front().map(BlockId)
    }

    fn next(&self) -> Option<BlockId> {
        self.links.front().map(BlockId)
    }

    fn remove(&mut self, id: BlockId) {
        self.links.remove(id.0);
    }

    fn forget_all(&mut self, _ids: &[BlockId]) {}

    fn remap(&mut self, from: BlockId, to: BlockId) {
        if self.links.contains(from.0) {
            self.links.replace(from.0, to.0);
        }
    }

    fn order(&self) -> Vec<BlockId> {
        self.links.iter().map(BlockId).collect()
    }

    fn validate(&self) -> Result<()> {
        self.links.validate().map_err(|what| Error::corrupt(format!("lru: {what}")))
    }
}
