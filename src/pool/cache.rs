//! The prefix cache of a pool: lookups, retention, eviction on request.

use super::BlockPool;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::prefix::{Miss, Prefix};

impl BlockPool {
    /// Hit tokens of this prompt now, all full blocks counted. Takes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a prefix of another block size or hash.
    pub fn lookup(&mut self, prefix: &Prefix) -> Result<usize> {
        self.check_prefix(prefix)?;
        let mut found = std::mem::take(&mut self.scratch.found);
        found.clear();
        self.index.longest_prefix(prefix.tokens(), prefix.hashes(), usize::MAX, &mut found);
        let hit = found.len() * self.config.block_size;
        self.scratch.found = found;
        Ok(hit)
    }

    /// What [`BlockPool::create`](Self::create) would share of this prompt now: hit tokens, and of those the ones in active
    /// blocks, which cost the pool nothing. Takes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a prefix of another block size or hash.
    pub fn hits(&mut self, prefix: &Prefix) -> Result<(usize, usize)> {
        self.check_prefix(prefix)?;
        let size = self.config.block_size;
        let most = prefix.tokens().len().saturating_sub(1) / size;
        let mut found = std::mem::take(&mut self.scratch.found);
        found.clear();
        self.index.longest_prefix(prefix.tokens(), prefix.hashes(), most, &mut found);
        let active = found.iter().filter(|id| self.refs[id.index()] > 0).count();
        let hits = (found.len() * size, active * size);
        self.scratch.found = found;
        Ok(hits)
    }

    /// [`BlockPool::lookup`] for a prompt that is not hashed yet; stops hashing at the first block not found.
    #[must_use]
    pub fn lookup_tokens(&self, tokens: &[u32], salt: &[u8]) -> usize {
        let root = self.config.hash.root(self.config.block_size, salt);
        self.index.probe(self.config.hash, root, tokens) * self.config.block_size
    }

    /// Where and why a lookup of this prompt stops.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a prefix of another block size or hash.
    pub fn explain(&self, prefix: &Prefix) -> Result<Miss> {
        self.check_prefix(prefix)?;
        Ok(self.index.explain(prefix))
    }

    /// Retains the cached prefix of a prompt: higher priority is evicted later; 0 ends it. `ttl` in milliseconds.
    /// Returns the number of blocks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a priority above 100 or a foreign prefix.
    pub fn retain(&mut self, prefix: &Prefix, priority: u8, ttl: Option<u64>) -> Result<usize> {
        self.check_prefix(prefix)?;
        if priority > 100 {
            return Err(Error::invalid("priority", priority, "must be between 0 and 100"));
        }
        let until = ttl.map_or(u64::MAX, |ttl| self.free.now().saturating_add(ttl));
        let mut found = Vec::new();
        self.index.longest_prefix(prefix.tokens(), prefix.hashes(), usize::MAX, &mut found);
        // Tail first, so that the tail is also the first of them to be given up.
        for &id in found.iter().rev() {
            self.free.retain(id, priority, until)?;
        }
        Ok(found.len())
    }

    /// Tells a clairvoyant eviction when each of the sequence's first blocks is needed next.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] under any other policy or with more values than blocks.
    pub fn set_next_use(&mut self, raw: i64, next_use: &[i64]) -> Result<()> {
        if self.config.eviction != "clairvoyant" {
            return Err(Error::invalid("eviction", &self.config.eviction, "set_next_use needs clairvoyant"));
        }
        let blocks = &self.sequences.get(raw)?.blocks;
        if next_use.len() > blocks.len() {
            let reason = format!("the sequence has {} blocks", blocks.len());
            return Err(Error::invalid("next_use length", next_use.len(), reason));
        }
        for (&id, &when) in blocks.iter().zip(next_use) {
            self.free.set_next_use(id, u64::try_from(when).unwrap_or(u64::MAX))?;
        }
        Ok(())
    }

    /// Makes up to `n` cached blocks clean, next victims first; returns how many.
    pub fn evict(&mut self, n: usize) -> usize {
        let mut evicted = std::mem::take(&mut self.scratch.evicted);
        evicted.clear();
        self.free.evict(n, &mut evicted);
        for &id in &evicted {
            self.index.remove(id, true);
            self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
        }
        let count = evicted.len();
        self.scratch.evicted = evicted;
        count
    }

    /// Forgets every committed block; those in use stay with their sequences. Returns how many were forgotten.
    ///
    /// # Errors
    /// [`Error::Corrupt`] only.
    pub fn reset_prefix_cache(&mut self) -> Result<usize> {
        let count = self.index.len();
        self.evict(usize::MAX);
        for i in 0..self.config.num_blocks as u32 {
            let id = BlockId(i);
            if !self.index.contains(id) {
                continue;
            }
            self.index.remove(id, false);
            if self.refs[id.index()] == 0 {
                // Pinned and referenced by nobody: held by its pin alone from now on.
                self.pinned_cached -= 1;
            }
        }
        for sequence in self.sequences.iter_mut() {
            sequence.tail_unsure = true;
        }
        Ok(count)
    }
}
