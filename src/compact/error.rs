//! Why no plan can be made, with the arithmetic.

use std::fmt;

/// Why a planner refused; the message states the numbers that rule the plan out.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// `blocks_per_page` is 0.
    EmptyPageSize,
    /// More blocks than a planner handles.
    PoolTooLarge {
        /// Blocks in the pool.
        blocks: usize,
        /// Most that are accepted.
        limit: usize,
    },
    /// A table lists a block that the pool does not have.
    OutOfRange {
        /// Index of the sequence.
        sequence: usize,
        /// Index in its table.
        index: usize,
        /// The block id found there.
        block: u32,
        /// Blocks in the pool.
        num_blocks: usize,
    },
    /// A table lists a block that is free: the picture of the pool and the tables disagree.
    ListedFree {
        /// Index of the sequence.
        sequence: usize,
        /// Index in its table.
        index: usize,
        /// The free block.
        block: u32,
    },
    /// Moving never makes a block free: fewer are free than the run needs.
    TooFewFree {
        /// Blocks wanted in one run.
        n: u32,
        /// Free blocks in the pool.
        free: u32,
    },
    /// Every window of `n` blocks has a fixed one in it.
    FixedInTheWay {
        /// Blocks wanted in one run.
        n: u32,
        /// Most neighbouring blocks without a fixed one.
        longest_without_fixed: u32,
        /// Fixed blocks in the pool.
        fixed: u32,
    },
    /// The cheapest window takes more moves than allowed.
    MaxMoves {
        /// Blocks wanted in one run.
        n: u32,
        /// Fewest moves that make it.
        needed: u32,
        /// First block of the window that takes them.
        start: u32,
        /// Moves allowed.
        max_moves: usize,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyPageSize => write!(f, "blocks_per_page is 0, expected at least 1"),
            Self::PoolTooLarge { blocks, limit } => {
                write!(f, "the pool has {blocks} blocks, a plan handles at most {limit}")
            }
            Self::OutOfRange { sequence, index, block, num_blocks } => {
                write!(f, "sequence {sequence} lists block {block} at index {index}, the pool has {num_blocks} blocks")
            }
            Self::ListedFree { sequence, index, block } => {
                write!(f, "sequence {sequence} lists block {block} at index {index}, but that block is free")
            }
            Self::TooFewFree { n, free } => {
                write!(f, "a run of {n} free blocks needs {n} free blocks, only {free} are free: no move makes more")
            }
            Self::FixedInTheWay { n, longest_without_fixed, fixed } => write!(
                f,
                "no {n} neighbouring blocks are without a fixed one: {fixed} fixed blocks leave at most {longest_without_fixed} in a row"
            ),
            Self::MaxMoves { n, needed, start, max_moves } => write!(
                f,
                "a run of {n} free blocks takes at least {needed} moves (from block {start}), max_moves is {max_moves}"
            ),
        }
    }
}

impl std::error::Error for PlanError {}
