//! Ids that cannot be mixed up: a block is not a sequence.

use std::fmt;

/// A physical block of the pool, `0..num_blocks`.
#[repr(transparent)]
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index into per-block arrays.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A handle that outlives what it names: slot number and generation.
///
/// The generation of a slot changes when its content is freed, so that a stale handle is an error and
/// never somebody else's sequence. Fits a non-negative `i64` (31 bits of generation, 32 of slot).
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(u64);

impl Handle {
    const GENERATION_MASK: u32 = 0x7fff_ffff;

    /// Joins a slot and its generation (taken modulo 2^31).
    #[must_use]
    pub const fn new(slot: u32, generation: u32) -> Self {
        Self((((generation & Self::GENERATION_MASK) as u64) << 32) | slot as u64)
    }

    /// The handle a caller kept as an integer; `None` when no pool ever gives out such a number.
    #[must_use]
    pub const fn from_raw(raw: i64) -> Option<Self> {
        if raw < 0 { None } else { Some(Self(raw as u64)) }
    }

    /// The handle as an integer, for arrays of handles.
    #[must_use]
    pub const fn raw(self) -> i64 {
        self.0 as i64
    }

    /// The slot this handle names.
    #[inline]
    #[must_use]
    pub const fn slot(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// Whether the slot's present generation is the one this handle was made with.
    #[inline]
    #[must_use]
    pub const fn is_of_generation(self, generation: u32) -> bool {
        (self.0 >> 32) as u32 == generation & Self::GENERATION_MASK
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
