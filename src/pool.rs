//! `BlockPool`: who holds which block. The only file (with its parts in `pool/`) that changes a block's state.
//!
//! A block is **free** (clean), **cached** (committed and referenced by nobody) or **active** (referenced by a block
//! table, or held by a pin alone while it is not committed). After every operation
//! `num_blocks = free + cached + active (+ the null block)`.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::free::{FreeBlocks, Request};
use crate::ids::{BlockId, Handle};
use crate::placement::BitSet;
use crate::prefix::{HashKind, Prefix, PrefixIndex};
use crate::table::{Sequence, Slab};

mod audit;
mod cache;
mod grow;
mod pins;
mod relocate;

pub use audit::{Audit, Holding};
pub use pins::Pin;
pub use relocate::CompactionPlan;

/// What a pool is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// Blocks in the pool, the null block included.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Name of the placement.
    pub placement: String,
    /// Name of the eviction policy.
    pub eviction: String,
    /// Every sequence's own blocks must form one run.
    pub contiguous: bool,
    /// Neighbouring blocks that are given back or moved as one.
    pub blocks_per_page: usize,
    /// Block 0 is never handed out (padding slots write there, as in vLLM).
    pub null_block: bool,
    /// Hash of prefix blocks.
    pub hash: HashKind,
    /// Seed of the policies that draw lots.
    pub seed: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_blocks: 1,
            block_size: 16,
            placement: "bitmap".into(),
            eviction: "lru".into(),
            contiguous: false,
            blocks_per_page: 128,
            null_block: false,
            hash: HashKind::Xxh3,
            seed: 0,
        }
    }
}

/// How a sequence is created.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Room for only so many tokens now; `None` for the whole prompt.
    pub num_tokens: Option<usize>,
    /// Room promised beyond the prompt, in tokens.
    pub reserve_tokens: usize,
    /// Do not look the prompt up.
    pub ignore_cache: bool,
    /// The full blocks are findable at once.
    pub commit: bool,
    /// Who it belongs to.
    pub owner: Option<String>,
    /// Free-form labels.
    pub tags: Vec<(String, String)>,
}

/// Running totals since the pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Counters {
    /// Sequences created (forks not counted).
    pub created: u64,
    /// Sequences freed.
    pub freed: u64,
    /// Forks.
    pub forked: u64,
    /// Prompt tokens of all sequences created.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the cache.
    pub hit_tokens: u64,
    /// Blocks handed out.
    pub blocks_allocated: u64,
    /// Cached blocks whose content was given up.
    pub blocks_evicted: u64,
    /// Blocks made findable.
    pub blocks_committed: u64,
    /// Blocks replaced by an equal cached one.
    pub blocks_deduplicated: u64,
    /// Blocks copied because they were shared.
    pub copies_on_write: u64,
    /// Calls refused for want of blocks.
    pub refused: u64,
    /// Blocks moved by compaction.
    pub blocks_moved: u64,
}

/// Refuses a pool whose bookkeeping the allocator cannot give: `bytes_per_block` for each block.
pub(crate) fn check_memory(num_blocks: usize, bytes_per_block: usize) -> Result<()> {
    let bytes = num_blocks.saturating_mul(bytes_per_block);
    if Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        let reason = format!("its bookkeeping takes about {} MiB, more than there is", bytes >> 20);
        return Err(Error::invalid("num_blocks", num_blocks, reason));
    }
    Ok(())
}

/// The null block.
const NULL: BlockId = BlockId(0);

/// A pool of KV-cache blocks.
#[derive(Debug)]
pub struct BlockPool {
    config: Config,
    /// Tells one pool's plans from another's.
    identity: u64,
    free: FreeBlocks,
    index: PrefixIndex,
    sequences: Slab<Sequence>,
    pins: Slab<Pin>,
    /// Block tables that hold the block.
    refs: Vec<u32>,
    pin_counts: Vec<u32>,
    /// Changes whenever the block is handed out or becomes free: content before and after is not the same.
    generations: Vec<u32>,
    reserved: usize,
    /// Committed blocks referenced by nobody and pinned: cached, but not to be handed out.
    pinned_cached: usize,
    /// Blocks with at least one pin.
    pinned: usize,
    counters: Counters,
    mark: u64,
    scratch: Scratch,
}

/// Buffers used again from call to call.
#[derive(Debug, Default)]
struct Scratch {
    found: Vec<BlockId>,
    evicted: Vec<BlockId>,
    clean: Vec<BlockId>,
    cached: Vec<BlockId>,
}

impl BlockPool {
    /// A pool with every block free.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names what cannot be.
    pub fn new(config: Config) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = config.num_blocks;
        if config.null_block && n < 2 {
            return Err(Error::invalid("num_blocks", n, "must be at least 2 with a null block"));
        }
        if config.block_size == 0 || config.block_size > 1 << 16 {
            return Err(Error::invalid("block_size", config.block_size, "must be between 1 and 65536 tokens"));
        }
        if config.blocks_per_page == 0 || config.blocks_per_page > 1 << 31 {
            let reason = "must be between 1 and 2^31 blocks";
            return Err(Error::invalid("blocks_per_page", config.blocks_per_page, reason));
        }
        if n.checked_mul(config.block_size).is_none_or(|slots| slots > 1 << 36) {
            return Err(Error::invalid("num_blocks", n, "times block_size must not exceed 2^36 tokens"));
        }
        // Tables, index and lists: rather an error now than an abort while they are built.
        check_memory(n, 96 + 4 * config.block_size)?;
        let mut free = FreeBlocks::new(n, &config.placement, &config.eviction, config.seed)?;
        if config.null_block {
            free.extract(NULL)?;
        }
        let identity = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            identity,
            free,
            index: PrefixIndex::new(n, config.block_size),
            sequences: Slab::new("sequence", identity),
            pins: Slab::new("pin", identity),
            refs: vec![0; n],
            pin_counts: vec![0; n],
            generations: vec![0; n],
            reserved: 0,
            pinned_cached: 0,
            pinned: 0,
            counters: Counters::default(),
            mark: 0,
            scratch: Scratch::default(),
            config,
        })
    }

    /// What the pool is made of.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Clean blocks.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.free.num_clean()
    }

    /// Committed blocks referenced by nobody, pinned ones included.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.free.num_cached() + self.pinned_cached
    }

    /// Blocks referenced by a table (or held by a pin alone).
    #[must_use]
    pub fn num_active(&self) -> usize {
        self.config.num_blocks - usize::from(self.config.null_block) - self.num_free() - self.num_cached()
    }

    /// Blocks promised and not handed out.
    #[must_use]
    pub fn num_reserved(&self) -> usize {
        self.reserved
    }

    /// Blocks with a pin.
    #[must_use]
    pub fn num_pinned(&self) -> usize {
        self.pinned
    }

    /// free + cached - pinned cached - reserved.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() - self.reserved
    }

    /// Longest run of blocks that may be handed out. O(number of blocks).
    #[must_use]
    pub fn largest_run(&self) -> usize {
        self.free.largest_run()
    }

    /// The set of blocks that may be handed out.
    #[must_use]
    pub fn free_blocks(&self) -> &FreeBlocks {
        &self.free
    }

    /// The index of committed blocks.
    #[must_use]
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// All live sequences.
    #[must_use]
    pub fn sequences(&self) -> &Slab<Sequence> {
        &self.sequences
    }

    /// All live pins.
    #[must_use]
    pub fn pins(&self) -> &Slab<Pin> {
        &self.pins
    }

    /// Running totals.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters { blocks_evicted: self.free.num_evictions(), ..self.counters }
    }

    /// Sets the clock that times to live are measured by (milliseconds, never backwards).
    pub fn set_now(&mut self, now: u64) {
        self.free.set_now(now);
    }

    /// The clock in milliseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.free.now()
    }

    /// Whether the clock matters to anything retained.
    #[must_use]
    pub fn needs_clock(&self) -> bool {
        self.free.needs_clock()
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.block_size)
    }

    fn refuse(&mut self, what: impl Into<String>, required: usize) -> Error {
        self.counters.refused += 1;
        Error::OutOfBlocks { what: what.into(), shortage: self.free.shortage(required, self.reserved) }
    }

    fn check_prefix(&self, prefix: &Prefix) -> Result<()> {
        if prefix.block_size() != self.config.block_size {
            let reason = format!("this pool's block_size is {}", self.config.block_size);
            return Err(Error::invalid("prefix block_size", prefix.block_size(), reason));
        }
        if prefix.kind() != self.config.hash {
            let reason = format!("this pool hashes with {}", self.config.hash.name());
            return Err(Error::invalid("prefix hash", prefix.kind().name(), reason));
        }
        Ok(())
    }

    /// Admits a prompt: shares its committed prefix, allocates the rest, all or nothing.
    ///
    /// At most `len - 1` tokens are hit, so that at least one is computed and yields logits (vLLM's rule).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] when it does not fit, [`Error::InvalidArgument`] for an empty prompt or bad room.
    pub fn create(&mut self, prefix: Prefix, admission: Admission) -> Result<Handle> {
        self.check_prefix(&prefix)?;
        let len = prefix.tokens().len();
        if len == 0 {
            return Err(Error::invalid("tokens", "[]", "a sequence needs at least one token"));
        }
        let room = admission.num_tokens.unwrap_or(len);
        if room == 0 || room > len {
            return Err(Error::invalid("num_tokens", room, format!("must be between 1 and the prompt's {len} tokens")));
        }
        if admission.commit && room < len {
            return Err(Error::invalid("num_tokens", room, "must cover the prompt when it is committed at once"));
        }
        let mut found = std::mem::take(&mut self.scratch.found);
        found.clear();
        if !admission.ignore_cache {
            let limit = (len - 1) / self.config.block_size;
            self.index.longest_prefix(prefix.tokens(), prefix.hashes(), limit, &mut found);
        }
        let created = self.admit(prefix, admission, room, &found);
        self.scratch.found = found;
        created
    }

    fn admit(&mut self, prefix: Prefix, admission: Admission, room: usize, hits: &[BlockId]) -> Result<Handle> {
        let len = prefix.tokens().len();
        let hit_tokens = hits.len() * self.config.block_size;
        let num_tokens = room.max(hit_tokens);
        let fresh = self.blocks_for(num_tokens) - hits.len();
        let total = len.checked_add(admission.reserve_tokens).filter(|&total| total <= 1 << 40);
        let Some(total) = total else {
            return Err(Error::invalid("reserve_tokens", admission.reserve_tokens, "is beyond any pool"));
        };
        let promised = self.blocks_for(total) - self.blocks_for(num_tokens);
        let promised = if admission.reserve_tokens > 0 { promised } else { 0 };
        let evictable = hits.iter().filter(|id| self.free.is_cached(**id)).count();
        let required = fresh + promised + evictable;
        if required > self.available() {
            return Err(self.refuse(format!("a prompt of {len} tokens ({} blocks hit)", hits.len()), required));
        }
        let run = if self.config.contiguous && fresh + promised > 0 {
            // Behind the hits only what is promised: without a block of its own, growth goes on right there.
            let after = if fresh > 0 { None } else { hits.last().copied() };
            let excluded = self.kept_runs(hits);
            let start = self.free.find_run(fresh + promised, after, &excluded);
            Some(start.ok_or_else(|| self.refuse(format!("one run of {} blocks", fresh + promised), required))?)
        } else {
            None
        };
        // From here on nothing fails.
        for &id in hits {
            self.share(id)?;
        }
        let mut blocks = Vec::with_capacity(hits.len() + fresh + 1);
        blocks.extend_from_slice(hits);
        if let Some(start) = run {
            self.hand_out_exactly(start, fresh, &mut blocks)?;
        } else {
            self.hand_out(fresh, hits.last().copied(), &mut blocks)?;
        }
        self.reserved += promised;
        self.clear_promise(blocks.last().copied(), promised)?;
        self.counters.created += 1;
        self.counters.prompt_tokens += len as u64;
        self.counters.hit_tokens += hit_tokens as u64;
        let (tokens, hashes, root) = prefix.into_parts();
        let mut tags = admission.tags;
        tags.sort();
        let mut sequence = Sequence {
            blocks,
            num_tokens,
            committed: hit_tokens,
            reserved: promised,
            tokens,
            hashes,
            root,
            hit_tokens,
            owner: admission.owner,
            tags,
            ..Sequence::default()
        };
        if admission.commit {
            self.commit_to(&mut sequence, len);
        }
        Ok(self.sequences.insert(sequence))
    }

    /// Blocks that a contiguous request must leave alone: hits, and the runs promised to others.
    fn kept_runs(&self, hits: &[BlockId]) -> BitSet {
        let mut kept = BitSet::new(self.config.num_blocks);
        for id in hits {
            kept.insert(id.0);
        }
        for (_, sequence) in self.sequences.iter() {
            for id in self.promised_run(sequence.blocks.last().copied(), sequence.reserved) {
                kept.insert(id);
            }
        }
        kept
    }

    /// Ids right behind a sequence's last block that strict contiguity promises to it.
    fn promised_run(&self, last: Option<BlockId>, reserved: usize) -> std::ops::Range<u32> {
        let first = last.map_or(0, |last| last.0 + 1);
        let end = (first as usize + reserved).min(self.config.num_blocks) as u32;
        if last.is_some() { first..end } else { 0..0 }
    }

    /// Under strict contiguity a promised run must hold nothing: a hit or a pin would take a block out of it.
    fn clear_promise(&mut self, last: Option<BlockId>, reserved: usize) -> Result<()> {
        if !self.config.contiguous {
            return Ok(());
        }
        for id in self.promised_run(last, reserved).map(BlockId) {
            if self.free.is_cached(id) {
                self.free.make_clean(id)?;
                self.index.remove(id, true);
                self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
            }
        }
        Ok(())
    }

    /// One more table holds a committed block.
    fn share(&mut self, id: BlockId) -> Result<()> {
        if self.refs[id.index()] > 0 {
            self.free.touch(id)?;
        } else if self.pin_counts[id.index()] > 0 {
            self.pinned_cached -= 1;
            self.free.touch(id)?;
        } else {
            self.free.remove(id)?;
        }
        self.refs[id.index()] += 1;
        Ok(())
    }

    fn hand_out(&mut self, n: usize, after: Option<BlockId>, blocks: &mut Vec<BlockId>) -> Result<()> {
        let at = blocks.len();
        let mut evicted = std::mem::take(&mut self.scratch.evicted);
        evicted.clear();
        let taken = self.free.take(n, Request { after, ..Request::default() }, blocks, &mut evicted);
        self.after_hand_out(&blocks[at..], evicted);
        taken
    }

    fn hand_out_exactly(&mut self, start: BlockId, n: usize, blocks: &mut Vec<BlockId>) -> Result<()> {
        let at = blocks.len();
        let mut evicted = std::mem::take(&mut self.scratch.evicted);
        evicted.clear();
        let taken = self.free.take_exactly(start, n, blocks, &mut evicted);
        self.after_hand_out(&blocks[at..], evicted);
        taken
    }

    fn after_hand_out(&mut self, taken: &[BlockId], evicted: Vec<BlockId>) {
        for &id in &evicted {
            self.index.remove(id, true);
        }
        for id in taken {
            self.refs[id.index()] = 1;
            self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
        }
        self.counters.blocks_allocated += taken.len() as u64;
        self.scratch.evicted = evicted;
    }

    /// Tables let go of `blocks` (given in table order); those nobody holds any more are given back tail first.
    fn let_go(&mut self, blocks: &[BlockId]) -> Result<()> {
        let mut clean = std::mem::take(&mut self.scratch.clean);
        let mut cached = std::mem::take(&mut self.scratch.cached);
        clean.clear();
        cached.clear();
        for &id in blocks.iter().rev() {
            let refs = &mut self.refs[id.index()];
            *refs -= 1;
            if *refs > 0 {
                continue;
            }
            let committed = self.index.contains(id);
            if self.pin_counts[id.index()] > 0 {
                self.pinned_cached += usize::from(committed);
            } else if committed {
                cached.push(id);
            } else {
                self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
                clean.push(id);
            }
        }
        let given = self.free.give_clean(&clean).and_then(|()| self.free.give_cached(&cached));
        (self.scratch.clean, self.scratch.cached) = (clean, cached);
        given
    }

    /// Frees sequences, in the order given. All handles are checked first.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] or [`Error::InvalidArgument`] (one given twice); nothing is changed then.
    pub fn free(&mut self, raws: &[i64]) -> Result<()> {
        self.check_batch(raws)?;
        for &raw in raws {
            let sequence = self.sequences.remove(raw)?;
            self.reserved -= sequence.reserved;
            self.counters.freed += 1;
            self.let_go(&sequence.blocks)?;
        }
        Ok(())
    }

    /// Every handle is live and none is given twice.
    fn check_batch(&mut self, raws: &[i64]) -> Result<()> {
        self.mark += 1;
        let mark = self.mark;
        for &raw in raws {
            let sequence = self.sequences.get_mut(raw)?;
            if std::mem::replace(&mut sequence.mark, mark) == mark {
                return Err(Error::invalid("sequences", raw, "is given twice in one call"));
            }
        }
        Ok(())
    }

    /// A second sequence on the same blocks. The first of them to write into a shared block copies it.
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::InvalidArgument`] when there is room for tokens not known yet: both would write
    /// them into the same blocks.
    pub fn fork(&mut self, raw: i64, owner: Option<String>, tags: Option<Vec<(String, String)>>) -> Result<Handle> {
        let sequence = self.sequences.get_mut(raw)?;
        if sequence.num_tokens > sequence.tokens.len() {
            let room = sequence.num_tokens - sequence.tokens.len();
            return Err(Error::invalid(
                "sequence",
                raw,
                format!("has room for {room} tokens not committed: commit first"),
            ));
        }
        sequence.tail_unsure = true;
        let mut child = sequence.clone();
        child.reserved = 0;
        child.mark = 0;
        if owner.is_some() {
            child.owner = owner;
        }
        if let Some(mut tags) = tags {
            tags.sort();
            child.tags = tags;
        }
        for id in &child.blocks {
            self.refs[id.index()] += 1;
        }
        self.counters.forked += 1;
        Ok(self.sequences.insert(child))
    }
}
