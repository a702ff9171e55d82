//! `sorted`: lowest free ids first, the rule of SGLang's paged allocator with its sorted free list.

use super::{BitSet, Hint, Placement, longest_stretch};
use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Free blocks by ascending id.
#[derive(Debug)]
pub struct Sorted {
    free: BitSet,
    bound: u32,
}

impl Sorted {
    /// An empty list over ids `0..num_blocks`.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self { free: BitSet::new(num_blocks), bound: num_blocks as u32 }
    }
}

impl Placement for Sorted {
    fn name(&self) -> &'static str {
        "sorted"
    }

    fn len(&self) -> usize {
        self.free.len()
    }

    fn insert(&mut self, ids: &[BlockId]) {
        for id in ids {
            self.free.insert(id.0);
        }
    }

    fn remove(&mut self, id: BlockId) {
        self.free.remove(id.0);
    }

    fn take(&mut self, n: usize, _hint: Hint, out: &mut Vec<BlockId>) {
        let mut from = 0;
        for _ in 0..n {
            let Some(id) = self.free.next(from) else { return };
            self.free.remove(id);
            out.push(BlockId(id));
            from = id;
        }
    }

    fn largest_run(&self) -> usize {
        longest_stretch(|id| self.free.contains(id), self.bound)
    }

    fn order(&self) -> Vec<BlockId> {
        self.free.iter().map(BlockId).collect()
    }

    fn validate(&self) -> Result<()> {
        if self.free.iter().count() == self.free.len() {
            Ok(())
        } else {
            Err(Error::corrupt("sorted: the count of free ids is off"))
        }
    }
}
