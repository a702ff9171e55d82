//! Pins: blocks that a transfer reads, neither moved nor evicted until it is done.

use super::BlockPool;
use crate::error::{Error, Result};
use crate::free::Place;
use crate::ids::{BlockId, Handle};

/// One pin.
#[derive(Clone, Debug)]
pub struct Pin {
    /// The blocks.
    pub blocks: Vec<BlockId>,
    /// Who holds it.
    pub owner: Option<String>,
    /// When it should be over, in milliseconds of the caller's clock.
    pub deadline: Option<u64>,
}

impl BlockPool {
    /// Pins blocks that are active or cached.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a block that is clean, the null block, out of range or given twice.
    pub fn pin(&mut self, blocks: Vec<BlockId>, owner: Option<String>, deadline: Option<u64>) -> Result<Handle> {
        let mut sorted = blocks.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::invalid("block", pair[0], "is given twice"));
        }
        if blocks.is_empty() {
            return Err(Error::invalid("blocks", "[]", "a pin needs at least one block"));
        }
        for &id in &blocks {
            if self.free.place_of(id)? == Place::Clean || (self.config.null_block && id == super::NULL) {
                return Err(Error::invalid("block", id, "is neither active nor cached: nothing to pin"));
            }
        }
        // A promise made to others must still be kept with the pinned cached blocks out of reach.
        let leaving = blocks.iter().filter(|id| self.free.is_cached(**id)).count();
        if leaving > self.available() {
            return Err(self.refuse(format!("a pin on {leaving} cached blocks"), leaving));
        }
        for &id in &blocks {
            if self.free.is_cached(id) {
                self.free.extract(id)?;
                self.pinned_cached += 1;
            }
            self.pin_counts[id.index()] += 1;
            self.pinned += usize::from(self.pin_counts[id.index()] == 1);
        }
        Ok(self.pins.insert(Pin { blocks, owner, deadline }))
    }

    /// Ends a pin; blocks that nobody else holds become cached or free.
    ///
    /// # Errors
    /// [`Error::StaleHandle`].
    pub fn unpin(&mut self, raw: i64) -> Result<()> {
        let pin = self.pins.remove(raw)?;
        let (mut clean, mut cached) = (Vec::new(), Vec::new());
        for &id in pin.blocks.iter().rev() {
            self.pin_counts[id.index()] -= 1;
            if self.pin_counts[id.index()] > 0 {
                continue;
            }
            self.pinned -= 1;
            if self.refs[id.index()] > 0 {
                continue;
            }
            if self.index.contains(id) {
                self.pinned_cached -= 1;
                cached.push(id);
            } else {
                self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
                clean.push(id);
            }
        }
        self.free.give_clean(&clean)?;
        self.free.give_cached(&cached)
    }
}
