//! Eviction: which cached block is given up when clean ones run out.
//!
//! A policy sees what any engine can tell it: batches of blocks of one sequence becoming evictable, hits, and blocks
//! whose content is gone. It knows neither hashes nor tokens, so that an engine which owns those can use it as it is.
//!
//! | name          | rule                                                                                   |
//! |---------------|----------------------------------------------------------------------------------------|
//! | `lru`         | least recently used first, a sequence's tail before its head: what vLLM does            |
//! | `slru`        | scan-resistant: sequences that were hit are kept over those seen once                   |
//! | `clairvoyant` | farthest next use first (Belady 1966), told by the bench: the ceiling, not a policy     |

use crate::error::{Error, Result};
use crate::ids::BlockId;

mod clairvoyant;
mod lru;
mod retention;
mod slru;

pub use clairvoyant::Clairvoyant;
pub use lru::Lru;
pub use retention::Retention;
pub use slru::Slru;

/// Order in which cached blocks are given up.
///
/// Ids not in the set (or already in it, for `push`) are the caller's bug: [`crate::free::FreeBlocks`] checks first.
pub trait Eviction: Send + std::fmt::Debug {
    /// The name users choose it by.
    fn name(&self) -> &'static str;

    /// Number of blocks that can be given up.
    fn len(&self) -> usize;

    /// Whether no block can be given up.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks of one sequence become evictable together, evict-first order (its tail first).
    fn push(&mut self, ids: &[BlockId]);

    /// The next victim. Its content counts as alive until [`Eviction::forget`].
    fn pop(&mut self) -> Option<BlockId>;

    /// What [`Eviction::pop`] would give up.
    fn next(&self) -> Option<BlockId> {
        self.order().first().copied()
    }

    /// The block leaves without being a victim: it was hit, pinned or moved.
    fn remove(&mut self, id: BlockId);

    /// A block with content was hit, whether evictable at the moment or in use.
    fn hit(&mut self, _id: BlockId) {}

    /// The block's content is gone: what was learned about it is void.
    fn forget(&mut self, _id: BlockId) {}

    /// [`Eviction::forget`] for many.
    fn forget_all(&mut self, ids: &[BlockId]) {
        for &id in ids {
            self.forget(id);
        }
    }

    /// The content of `from` lies in `to` now; `from` keeps nothing.
    fn remap(&mut self, from: BlockId, to: BlockId);

    /// When the block's content is needed next (any increasing clock; `u64::MAX` never).
    /// Returns `false` when the policy does not use it.
    fn set_next_use(&mut self, _id: BlockId, _next_use: u64) -> bool {
        false
    }

    /// All evictable blocks, next victim first, as things stand.
    fn order(&self) -> Vec<BlockId>;

    /// Checks every invariant of the structure.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first broken one.
    fn validate(&self) -> Result<()>;
}

/// Names of all policies, in the order they are documented.
pub const NAMES: [&str; 3] = ["lru", "slru", "clairvoyant"];

/// A policy over ids `0..num_blocks`. `seed` feeds the policies that draw lots.
///
/// # Errors
/// [`Error::InvalidArgument`] for an unknown name.
pub fn by_name(name: &str, num_blocks: usize, seed: u64) -> Result<Box<dyn Eviction>> {
    Ok(match name {
        "lru" => Box::new(Lru::new(num_blocks)),
        "slru" => {
            let _ = seed;
            Box::new(Slru::new(num_blocks))
        }
        "clairvoyant" => Box::new(Clairvoyant::new(num_blocks)),
        _ => {
            return Err(Error::invalid(
                "eviction",
                format_args!("{name:?}"),
                format!("must be one of {}", NAMES.join(", ")),
            ));
        }
    })
}
