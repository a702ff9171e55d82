//! Growth of sequences: make room, say what was written, take back.

use super::BlockPool;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::table::Sequence;

/// A copy to make before anything is written: source and destination block.
type CopyOnWrite = (BlockId, BlockId);

/// What one sequence of a batch needs.
struct Need {
    raw: i64,
    /// Blocks behind the table.
    blocks: usize,
    /// The last block is shared: a private copy takes its place.
    copy: bool,
    /// The last block is this sequence's alone and may be committed: it is about to be overwritten.
    overwrite: bool,
    /// Where its blocks begin when they must form one run.
    run: Option<BlockId>,
}

impl BlockPool {
    /// Makes room for `counts[i]` more tokens in every sequence, all or nothing.
    ///
    /// Returns the copies to make before anything is written.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::StaleHandle`], [`Error::InvalidArgument`]; nothing is changed then.
    pub fn append(&mut self, raws: &[i64], count: impl Fn(usize) -> usize) -> Result<Vec<(BlockId, BlockId)>> {
        let needs = self.needs(raws, &count)?;
        let mut copies = Vec::new();
        for need in &needs {
            copies.extend(self.serve(need)?);
        }
        for (i, &raw) in raws.iter().enumerate() {
            let sequence = self.sequences.get_mut(raw)?;
            sequence.num_tokens += count(i);
        }
        Ok(copies)
    }

    /// What every sequence needs, checked to be there.
    fn needs(&mut self, raws: &[i64], count: &impl Fn(usize) -> usize) -> Result<Vec<Need>> {
        self.mark += 1;
        let (mark, block_size) = (self.mark, self.config.block_size);
        let mut needs: Vec<Need> = Vec::new();
        // Blocks whose sharers in this batch take copies, so that the last of them need not.
        let mut leaving: Vec<BlockId> = Vec::new();
        let (mut required, mut promised) = (0usize, 0usize);
        for (i, &raw) in raws.iter().enumerate() {
            let tokens = count(i);
            let sequence = self.sequences.get_mut(raw)?;
            if std::mem::replace(&mut sequence.mark, mark) == mark {
                return Err(Error::invalid("sequences", raw, "is given twice in one call"));
            }
            let total = sequence.num_tokens.checked_add(tokens).filter(|&total| total <= 1 << 40);
            let Some(total) = total else {
                return Err(Error::invalid("n_tokens", tokens, "is beyond any pool"));
            };
            let blocks = total.div_ceil(block_size) - sequence.blocks.len();
            let partial = tokens > 0 && sequence.num_tokens % block_size != 0;
            if blocks == 0 && !(partial && sequence.tail_unsure) {
                continue;
            }
            let (mut copy, overwrite) = (false, partial && sequence.tail_unsure);
            if overwrite && let Some(&last) = sequence.blocks.last() {
                let gone = leaving.iter().filter(|&&id| id == last).count() as u32;
                copy = self.refs[last.index()] - gone > 1 || self.pin_counts[last.index()] > 0;
                if copy {
                    leaving.push(last);
                }
            }
            let fresh = blocks + usize::from(copy);
            required += fresh;
            // The copy is nobody's growth: a promise is for new tokens.
            promised += sequence.reserved.min(blocks);
            needs.push(Need { raw, blocks, copy, overwrite, run: None });
        }
        if required - promised > self.available() {
            let what = format!("room for more tokens in {} sequences", raws.len());
            return Err(self.refuse(what, required - promised));
        }
        if self.config.contiguous {
            self.find_runs(&mut needs, required)?;
        }
        Ok(needs)
    }

    /// Under strict contiguity: a place for every need, before anything is taken.
    fn find_runs(&mut self, needs: &mut [Need], required: usize) -> Result<()> {
        let mut kept = self.kept_runs(&[]);
        for need in needs {
            let fresh = need.blocks + usize::from(need.copy);
            if fresh == 0 {
                continue;
            }
            let sequence = self.sequences.get(need.raw)?;
            let last = sequence.blocks.last().copied();
            // What was promised to this very sequence is its own.
            for id in self.promised_run(last, sequence.reserved) {
                kept.remove(id);
            }
            // What is still promised stays promised, behind the new last block; a new run (a copy, the first block after
            // everything was cut off) starts where there is room for it.
            let promised = sequence.reserved - sequence.reserved.min(need.blocks);
            let after = if need.copy { None } else { last };
            let wanted = if after.is_none() { fresh + promised } else { fresh };
            let Some(start) = self.free.find_run(wanted, after, &kept) else {
                let what = match after {
                    Some(after) => format!("growth by {fresh} blocks right behind block {after}"),
                    None => format!("one run of {wanted} blocks"),
                };
                return Err(self.refuse(what, required));
            };
            for id in start.0..(start.index() + fresh + promised).min(self.config.num_blocks) as u32 {
                kept.insert(id);
            }
            need.run = Some(start);
        }
        Ok(())
    }

    fn serve(&mut self, need: &Need) -> Result<Option<CopyOnWrite>> {
        let sequence = self.sequences.get_mut(need.raw)?;
        let mut blocks = std::mem::take(&mut sequence.blocks);
        sequence.tail_unsure = false;
        let fresh = need.blocks + usize::from(need.copy);
        let promised = sequence.reserved.min(need.blocks);
        sequence.reserved -= promised;
        self.reserved -= promised;
        let last = blocks.last().copied();
        let shared = if need.copy { blocks.pop() } else { None };
        let at = blocks.len();
        match need.run {
            Some(start) => self.hand_out_exactly(start, fresh, &mut blocks)?,
            None if fresh > 0 => self.hand_out(fresh, blocks.last().copied(), &mut blocks)?,
            None => {}
        }
        let mut copied = None;
        if let Some(shared) = shared {
            self.counters.copies_on_write += 1;
            self.let_go(&[shared])?;
            copied = Some((shared, blocks[at]));
        } else if let (Some(last), true) = (last, need.overwrite) {
            // Private, but committed while it was full: what others could find is overwritten now.
            self.unshare_content(last);
        }
        let last = blocks.last().copied();
        let sequence = self.sequences.get_mut(need.raw)?;
        sequence.blocks = blocks;
        let reserved = sequence.reserved;
        if need.run.is_some() {
            self.clear_promise(last, reserved)?;
        }
        Ok(copied)
    }

    /// A block in use that is about to be written again must not be found any more.
    fn unshare_content(&mut self, id: BlockId) {
        if self.refs[id.index()] == 1 {
            self.index.remove(id, false);
        }
    }

    /// Says which tokens were written. `tokens` holds the ids of generated tokens, all sequences' end to end,
    /// `count(i)` each; without it the next `count(i)` tokens known from creation (`None` for all of them).
    /// Returns how many blocks were replaced by an equal cached one.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::InvalidArgument`]; nothing is changed then.
    pub fn commit(
        &mut self,
        raws: &[i64],
        tokens: Option<&[u32]>,
        count: impl Fn(usize) -> Option<usize>,
        deduplicate: bool,
    ) -> Result<usize> {
        self.check_commit(raws, tokens, &count)?;
        let mut rest = tokens.unwrap_or(&[]);
        let mut replaced = 0;
        for (i, &raw) in raws.iter().enumerate() {
            let block_size = self.config.block_size;
            let sequence = self.sequences.get_mut(raw)?;
            let mut known = sequence.tokens.len().min(sequence.num_tokens);
            if tokens.is_some() {
                let (now, later) = rest.split_at(count(i).unwrap_or(0).min(rest.len()));
                sequence.tokens.extend_from_slice(now);
                rest = later;
                known = sequence.tokens.len();
            } else if let Some(count) = count(i) {
                known = sequence.committed + count;
            }
            if sequence.committed / block_size == known / block_size {
                sequence.committed = known;
                continue;
            }
            let mut sequence = std::mem::take(sequence);
            let first = sequence.committed / block_size;
            self.commit_to(&mut sequence, known);
            // Under strict contiguity never: a block from elsewhere would split the sequence, and part it from its promise.
            if deduplicate && !self.config.contiguous {
                replaced += self.deduplicate(&mut sequence, first)?;
            }
            *self.sequences.get_mut(raw)? = sequence;
        }
        Ok(replaced)
    }

    fn check_commit(
        &mut self,
        raws: &[i64],
        tokens: Option<&[u32]>,
        count: &impl Fn(usize) -> Option<usize>,
    ) -> Result<()> {
        self.mark += 1;
        let mark = self.mark;
        let mut given = 0usize;
        for (i, &raw) in raws.iter().enumerate() {
            let sequence = self.sequences.get_mut(raw)?;
            if std::mem::replace(&mut sequence.mark, mark) == mark {
                return Err(Error::invalid("sequences", raw, "is given twice in one call"));
            }
            let wanted = count(i);
            if tokens.is_some() {
                let n = wanted.unwrap_or(0);
                given = given.saturating_add(n);
                if sequence.committed != sequence.tokens.len() {
                    let reason = format!(
                        "has {} known tokens not committed: commit those first (without token ids)",
                        sequence.tokens.len() - sequence.committed
                    );
                    return Err(Error::invalid("sequence", raw, reason));
                }
                if n > sequence.num_tokens - sequence.committed {
                    let reason =
                        format!("there is room for {} more: append first", sequence.num_tokens - sequence.committed);
                    return Err(Error::invalid("counts", n, reason));
                }
            } else if let Some(n) = wanted {
                let known = sequence.tokens.len().min(sequence.num_tokens) - sequence.committed;
                if n > known {
                    return Err(Error::invalid(
                        "counts",
                        n,
                        format!("only {known} known tokens have room and are not committed"),
                    ));
                }
            }
        }
        match tokens {
            Some(tokens) if tokens.len() != given => {
                Err(Error::invalid("tokens length", tokens.len(), format!("counts add up to {given}")))
            }
            _ => Ok(()),
        }
    }

    /// The first `known` tokens are written: blocks that became full are findable from now on.
    pub(super) fn commit_to(&mut self, sequence: &mut Sequence, known: usize) {
        let block_size = self.config.block_size;
        let full = known / block_size;
        if sequence.hashes.len() < full {
            let start = sequence.hashes.len() * block_size;
            let parent = sequence.hashes.last().copied().unwrap_or(sequence.root);
            let tokens = &sequence.tokens[start..full * block_size];
            self.config.hash.chain(parent, tokens, block_size, &mut sequence.hashes);
        }
        for block in sequence.committed / block_size..full {
            let id = sequence.blocks[block];
            if self.index.contains(id) {
                continue;
            }
            let parent = block.checked_sub(1).map_or(sequence.root, |before| sequence.hashes[before]);
            let tokens = &sequence.tokens[block * block_size..(block + 1) * block_size];
            self.index.insert(id, sequence.hashes[block], parent, tokens);
            self.counters.blocks_committed += 1;
        }
        sequence.committed = known;
    }

    /// Blocks from `first` on that equal another committed block are replaced by it.
    fn deduplicate(&mut self, sequence: &mut Sequence, first: usize) -> Result<usize> {
        let block_size = self.config.block_size;
        let mut replaced = 0;
        for block in first..sequence.committed / block_size {
            let id = sequence.blocks[block];
            let tokens = &sequence.tokens[block * block_size..(block + 1) * block_size];
            let Some(twin) = self.index.find(sequence.hashes[block], tokens) else { continue };
            if twin == id || self.refs[id.index()] > 1 || self.pin_counts[id.index()] > 0 {
                continue;
            }
            self.share(twin)?;
            self.index.remove(id, false);
            self.let_go(&[id])?;
            sequence.blocks[block] = twin;
            replaced += 1;
        }
        if replaced > 0 {
            sequence.tail_unsure = true;
        }
        self.counters.blocks_deduplicated += replaced as u64;
        Ok(replaced)
    }

    /// Takes back room (and tokens) beyond the first `num_tokens`. Under strict contiguity a promise ends with it.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::InvalidArgument`] when the sequence is shorter.
    pub fn truncate(&mut self, raw: i64, num_tokens: usize) -> Result<()> {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(raw)?;
        if num_tokens > sequence.num_tokens {
            let reason = format!("the sequence has {} tokens", sequence.num_tokens);
            return Err(Error::invalid("num_tokens", num_tokens, reason));
        }
        // A prompt may be known further than there is room for it.
        sequence.tokens.truncate(num_tokens);
        sequence.hashes.truncate(num_tokens / block_size);
        if num_tokens == sequence.num_tokens {
            return Ok(());
        }
        sequence.num_tokens = num_tokens;
        sequence.committed = sequence.committed.min(num_tokens);
        sequence.tail_unsure = true;
        if self.config.contiguous {
            // The promise was for the run behind the last block, which is another one now.
            self.reserved -= std::mem::take(&mut sequence.reserved);
        }
        let dropped = sequence.blocks.split_off(num_tokens.div_ceil(block_size));
        self.let_go(&dropped)
    }

    /// Promises room for `num_tokens` tokens beyond those appended; replaces an earlier promise, 0 ends it.
    ///
    /// # Errors
    /// [`Error::StaleHandle`], [`Error::OutOfBlocks`]; nothing is changed then.
    pub fn reserve(&mut self, raw: i64, num_tokens: usize) -> Result<()> {
        let sequence = self.sequences.get(raw)?;
        let total = sequence.num_tokens.checked_add(num_tokens).filter(|&total| total <= 1 << 40);
        let Some(total) = total else {
            return Err(Error::invalid("num_tokens", num_tokens, "is beyond any pool"));
        };
        let (before, blocks) = (sequence.reserved, total.div_ceil(self.config.block_size) - sequence.blocks.len());
        if blocks > before {
            let more = blocks - before;
            if more > self.available() {
                return Err(self.refuse(format!("a promise of {num_tokens} more tokens"), more));
            }
            let last = sequence.blocks.last().copied();
            if self.config.contiguous && !self.can_promise_run(raw, last, blocks)? {
                return Err(self.refuse(format!("a promise of {blocks} blocks right behind the sequence"), more));
            }
        }
        self.reserved = self.reserved - before + blocks;
        let sequence = self.sequences.get_mut(raw)?;
        sequence.reserved = blocks;
        let last = sequence.blocks.last().copied();
        self.clear_promise(last, blocks)
    }

    fn can_promise_run(&self, raw: i64, last: Option<BlockId>, blocks: usize) -> Result<bool> {
        let Some(last) = last else { return Ok(true) };
        let mut kept = self.kept_runs(&[]);
        for id in self.promised_run(Some(last), self.sequences.get(raw)?.reserved) {
            kept.remove(id);
        }
        Ok(self.free.find_run(blocks, Some(last), &kept).is_some())
    }
}
