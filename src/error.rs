//! What can go wrong, once. A call that returns an error has changed nothing.

use crate::ids::BlockId;

/// Result of a core call.
pub type Result<T> = std::result::Result<T, Error>;

/// The numbers behind a refusal, in blocks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Blocks the call needs beyond what it already holds (cached blocks it would hit included).
    pub required: usize,
    /// Clean blocks.
    pub free: usize,
    /// Evictable cached blocks (not pinned).
    pub cached: usize,
    /// Blocks promised to admitted sequences.
    pub reserved: usize,
    /// Longest run of blocks that may be handed out. Decides only where contiguity is required.
    pub largest_run: usize,
}

/// Every error of the core.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Not enough blocks, or no run long enough where contiguity is required.
    #[error(
        "out of blocks: {what} needs {} but {} are available \
         ({} free + {} cached - {} reserved; largest run {})",
        .shortage.required,
        (.shortage.free + .shortage.cached).saturating_sub(.shortage.reserved),
        .shortage.free, .shortage.cached, .shortage.reserved, .shortage.largest_run
    )]
    OutOfBlocks {
        /// Which call was refused and why, in words.
        what: String,
        /// The arithmetic.
        shortage: Shortage,
    },
    /// An argument has an impossible value.
    #[error("{name} = {value}: {reason}")]
    InvalidArgument {
        /// Name of the argument.
        name: &'static str,
        /// The value given.
        value: String,
        /// What it must be.
        reason: String,
    },
    /// A handle that was freed, or that this pool never gave out.
    #[error("{kind} {handle} is not live in this pool (freed already, or of another pool)")]
    StaleHandle {
        /// "sequence" or "pin".
        kind: &'static str,
        /// The handle as an integer.
        handle: i64,
    },
    /// A block was given back that is not handed out.
    #[error("block {block} is given back but is not handed out (double free, or given twice in one call)")]
    DoubleFree {
        /// The block.
        block: BlockId,
    },
    /// A compaction plan does not fit the pool any more.
    #[error("stale compaction plan: {reason}; make a new plan")]
    StalePlan {
        /// What changed.
        reason: String,
    },
    /// An invariant is broken: a bug in kvcatch.
    #[error("corrupt pool: {0}")]
    Corrupt(String),
}

impl Error {
    /// Shorthand for [`Error::InvalidArgument`].
    pub fn invalid(name: &'static str, value: impl std::fmt::Display, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { name, value: value.to_string(), reason: reason.into() }
    }

    /// Shorthand for [`Error::Corrupt`].
    pub(crate) fn corrupt(what: impl Into<String>) -> Self {
        Self::Corrupt(what.into())
    }
}
