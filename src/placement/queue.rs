//! `queue`: vLLM's free queue (0.32 `v1/core/kv_cache_utils.py`, `FreeKVCacheBlockQueue`) for its clean blocks.
//!
//! vLLM keeps clean and cached blocks in one list: clean ones are prepended, cached ones appended, the head is handed
//! out. Seen from here that is a stack of clean blocks; what eviction gives up follows in its own order.

use super::{Hint, Placement, longest_stretch};
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::links::Links;

/// Clean blocks, last freed first. The baseline.
#[derive(Debug)]
pub struct Queue {
    links: Links,
}

impl Queue {
    /// An empty queue over ids `0..num_blocks`.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self { links: Links::new(num_blocks) }
    }
}

impl Placement for Queue {
    fn name(&self) -> &'static str {
        "queue"
    }

    fn len(&self) -> usize {
        self.links.len()
    }

    fn insert(&mut self, ids: &[BlockId]) {
        for id in ids.iter().rev() {
            self.links.push_front(id.0);
        }
    }

    fn remove(&mut self, id: BlockId) {
        self.links.remove(id.0);
    }

    fn take(&mut self, n: usize, _hint: Hint, out: &mut Vec<BlockId>) {
        for _ in 0..n {
            out.extend(self.links.pop_front().map(BlockId));
        }
    }

    fn largest_run(&self) -> usize {
        longest_stretch(|id| self.links.contains(id), self.links.bound())
    }

    fn order(&self) -> Vec<BlockId> {
        self.links.iter().map(BlockId).collect()
    }

    fn mixes_victims(&self) -> bool {
        false
    }

    fn validate(&self) -> Result<()> {
        self.links.validate().map_err(|what| Error::corrupt(format!("queue: {what}")))
    }
}
