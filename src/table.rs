//! Sequences: the block table of each (logical to physical), and the tokens known of it.
//!
//! Nothing here changes the state of a block; [`crate::pool`] does, and keeps these tables in step.

use crate::error::{Error, Result};
use crate::ids::{BlockId, Handle};

/// One sequence.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Physical blocks in logical order.
    pub blocks: Vec<BlockId>,
    /// Tokens there is room for: prompt and appended.
    pub num_tokens: usize,
    /// Tokens whose KV is written.
    pub committed: usize,
    /// Blocks promised beyond those held.
    pub reserved: usize,
    /// The last block may be shared or committed: look before writing into it.
    pub(crate) tail_unsure: bool,
    pub(crate) mark: u64,
    /// Token ids known, from position 0.
    pub tokens: Vec<u32>,
    /// Hashes of the full blocks of `tokens`.
    pub hashes: Vec<u128>,
    /// What the first block's hash is chained to.
    pub root: u128,
    /// Prompt tokens found in the cache at creation.
    pub hit_tokens: usize,
    /// Who it belongs to.
    pub owner: Option<String>,
    /// Free-form labels, sorted by key.
    pub tags: Vec<(String, String)>,
}

/// Number of runs of consecutive ids in table order.
#[must_use]
pub fn count_runs(blocks: &[BlockId]) -> usize {
    let breaks = blocks.windows(2).filter(|pair| pair[1].0 != pair[0].0.wrapping_add(1)).count();
    if blocks.is_empty() { 0 } else { breaks + 1 }
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    content: Option<T>,
}

/// Things named by [`Handle`]s: a slot is used again with another generation.
#[derive(Debug)]
pub struct Slab<T> {
    kind: &'static str,
    first_generation: u32,
    slots: Vec<Slot<T>>,
    vacant: Vec<u32>,
}

impl<T> Slab<T> {
    /// An empty slab; `kind` names its things in errors. Generations start at a number made from `origin` and the
    /// kind, so that a handle of another pool, or of another kind, is stale here and never somebody's.
    #[must_use]
    pub fn new(kind: &'static str, origin: u64) -> Self {
        let seed = kind.bytes().fold(origin, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        // Fibonacci hashing spreads pools made one after the other over all generations.
        let first_generation = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32;
        Self { kind, first_generation, slots: Vec::new(), vacant: Vec::new() }
    }

    /// Number of live things.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Whether nothing is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a thing.
    pub fn insert(&mut self, content: T) -> Handle {
        if let Some(slot) = self.vacant.pop() {
            let place = &mut self.slots[slot as usize];
            place.content = Some(content);
            return Handle::new(slot, place.generation);
        }
        let generation = self.first_generation;
        self.slots.push(Slot { generation, content: Some(content) });
        Handle::new(self.slots.len() as u32 - 1, generation)
    }

    /// The error for a handle that is not live.
    #[must_use]
    pub fn stale(&self, raw: i64) -> Error {
        Error::StaleHandle { kind: self.kind, handle: raw }
    }

    /// The slot of a live handle kept as an integer.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when it is not live.
    #[inline]
    pub fn slot_of(&self, raw: i64) -> Result<usize> {
        let handle = Handle::from_raw(raw).ok_or_else(|| self.stale(raw))?;
        match self.slots.get(handle.slot()) {
            Some(slot) if slot.content.is_some() && handle.is_of_generation(slot.generation) => Ok(handle.slot()),
            _ => Err(self.stale(raw)),
        }
    }

    /// The thing of a live handle.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when it is not live.
    #[inline]
    pub fn get(&self, raw: i64) -> Result<&T> {
        let handle = Handle::from_raw(raw).ok_or_else(|| self.stale(raw))?;
        match self.slots.get(handle.slot()) {
            Some(Slot { generation, content: Some(content) }) if handle.is_of_generation(*generation) => Ok(content),
            _ => Err(self.stale(raw)),
        }
    }

    /// The thing of a live handle, to change.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when it is not live.
    #[inline]
    pub fn get_mut(&mut self, raw: i64) -> Result<&mut T> {
        let kind = self.kind;
        if let Some(handle) = Handle::from_raw(raw)
            && let Some(Slot { generation, content: Some(content) }) = self.slots.get_mut(handle.slot())
            && handle.is_of_generation(*generation)
        {
            return Ok(content);
        }
        Err(Error::StaleHandle { kind, handle: raw })
    }

    /// Takes a thing out; its handle is stale from now on.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] when it is not live.
    pub fn remove(&mut self, raw: i64) -> Result<T> {
        let index = self.slot_of(raw)?;
        let slot = &mut self.slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        let content = slot.content.take().ok_or(Error::StaleHandle { kind: self.kind, handle: raw })?;
        self.vacant.push(index as u32);
        Ok(content)
    }

    /// All live things with their handles, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, slot)| {
            slot.content.as_ref().map(|content| (Handle::new(i as u32, slot.generation), content))
        })
    }

    /// All live things, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.content.as_mut())
    }
}

impl Sequence {
    /// Writes the block table into `row`, filling the rest with `pad`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the row is too narrow.
    pub fn write_row(&self, row: &mut [i32], pad: i32) -> Result<()> {
        if self.blocks.len() > row.len() {
            let reason = format!("a row is too narrow for a sequence of {} blocks", self.blocks.len());
            return Err(Error::invalid("out width", row.len(), reason));
        }
        let (ids, rest) = row.split_at_mut(self.blocks.len());
        for (to, id) in ids.iter_mut().zip(&self.blocks) {
            *to = id.0 as i32;
        }
        rest.fill(pad);
        Ok(())
    }

    /// Writes the slots of tokens `start..start + out.len()`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the sequence has no room for that many tokens.
    pub fn write_slots(&self, start: usize, block_size: usize, out: &mut [i64]) -> Result<()> {
        let end = start.checked_add(out.len()).filter(|&end| end <= self.num_tokens);
        if end.is_none() {
            let reason = format!("with {} tokens to map, the sequence has room for {}", out.len(), self.num_tokens);
            return Err(Error::invalid("start", start, reason));
        }
        let (mut block, mut offset) = (start / block_size, start % block_size);
        let mut rest = out;
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut((block_size - offset).min(rest.len()));
            let first = i64::from(self.blocks[block].0) * block_size as i64 + offset as i64;
            for (to, slot) in now.iter_mut().zip(first..) {
                *to = slot;
            }
            (block, offset, rest) = (block + 1, 0, later);
        }
        Ok(())
    }
}
