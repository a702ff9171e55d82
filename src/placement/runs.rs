//! Maximal runs of free blocks, found by length in O(1): the run search behind `bitmap`.
//!
//! The free set is a [`BitSet`]. A run is known by its two ends (`len_at[start]`, `start_of[end]`), so that neighbours
//! merge without a search. Runs are grouped in size classes, exact up to 64 blocks and eighths of a power of two above;
//! each class is a bitmap over the 64-block chunks in which one of its runs starts, so that the lowest such run is a
//! few bit operations away.

use super::BitSet;
use crate::error::{Error, Result};

const EXACT: usize = 64;
/// How many runs of one inexact class are compared for the best fit before the best so far is taken.
const LOOKED_AT: usize = 64;

/// Set of maximal runs over ids `0..bound`.
#[derive(Clone, Debug)]
pub struct RunIndex {
    free: BitSet,
    len_at: Vec<u32>,
    start_of: Vec<u32>,
    /// Chunks in which a run of the class starts.
    chunks: Vec<BitSet>,
    /// How many runs of an exact class start in the chunk; above `EXACT` at most one can.
    counts: Vec<u8>,
    num_chunks: usize,
    present: Vec<u64>,
    runs: usize,
}

/// A maximal run: lowest id and number of blocks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Lowest id.
    pub start: u32,
    /// Number of blocks.
    pub len: u32,
}

fn class_of(len: u32) -> usize {
    if len as usize <= EXACT {
        return len as usize - 1;
    }
    let exponent = len.ilog2() as usize;
    EXACT + (exponent - 6) * 8 + (len >> (exponent - 3) & 7) as usize
}

impl RunIndex {
    /// No runs, over ids `0..bound`.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        let num_chunks = bound.div_ceil(64).max(1);
        let classes = class_of(bound.max(1) as u32) + 1;
        Self {
            free: BitSet::new(bound),
            len_at: vec![0; bound],
            start_of: vec![0; bound],
            chunks: (0..classes).map(|_| BitSet::new(num_chunks)).collect(),
            counts: vec![0; num_chunks * classes.min(EXACT)],
            num_chunks,
            present: vec![0; classes.div_ceil(64)],
            runs: 0,
        }
    }

    /// Number of blocks in all runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.free.len()
    }

    /// Whether there is no run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.free.is_empty()
    }

    /// Number of runs.
    #[must_use]
    pub fn num_runs(&self) -> usize {
        self.runs
    }

    /// Whether this block is part of a run.
    #[inline]
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.free.contains(id)
    }

    /// All blocks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.free.iter()
    }

    /// Length of the run that starts at `id`; 0 when none does.
    #[inline]
    #[must_use]
    pub fn run_at(&self, id: u32) -> u32 {
        if self.free.contains(id) && (id == 0 || !self.free.contains(id - 1)) { self.len_at[id as usize] } else { 0 }
    }

    fn link(&mut self, start: u32, len: u32) {
        if len == 0 {
            return;
        }
        self.len_at[start as usize] = len;
        self.start_of[(start + len - 1) as usize] = start;
        let (class, chunk) = (class_of(len), start as usize >> 6);
        if class < EXACT {
            self.counts[class * self.num_chunks + chunk] += 1;
        }
        if self.chunks[class].insert(chunk as u32) {
            self.present[class >> 6] |= 1 << (class & 63);
        }
        self.runs += 1;
    }

    fn unlink(&mut self, start: u32, len: u32) {
        let (class, chunk) = (class_of(len), start as usize >> 6);
        self.runs -= 1;
        if class < EXACT {
            let count = &mut self.counts[class * self.num_chunks + chunk];
            *count -= 1;
            if *count > 0 {
                return;
            }
        }
        self.chunks[class].remove(chunk as u32);
        if self.chunks[class].is_empty() {
            self.present[class >> 6] &= !(1 << (class & 63));
        }
    }

    /// Adds `start..start + len`, none of which is free yet; merges with the neighbours.
    pub fn insert(&mut self, start: u32, len: u32) {
        if len == 0 {
            return;
        }
        self.free.insert_range(start, len);
        let (mut low, mut total) = (start, len);
        if start > 0 && self.free.contains(start - 1) {
            low = self.start_of[start as usize - 1];
            let before = start - low;
            self.unlink(low, before);
            total += before;
        }
        let end = start + len;
        if self.free.contains(end) {
            let behind = self.len_at[end as usize];
            self.unlink(end, behind);
            total += behind;
        }
        self.link(low, total);
    }

    /// Removes `start..start + len`, all of which lie in one run.
    pub fn remove(&mut self, start: u32, len: u32) {
        if len == 0 {
            return;
        }
        let run = self.run_around(start);
        self.unlink(run.start, run.len);
        self.free.remove_range(start, len);
        self.link(run.start, start - run.start);
        self.link(start + len, run.start + run.len - (start + len));
    }

    /// Removes the first `len` blocks of a run, as found by a search.
    pub fn remove_front(&mut self, run: Run, len: u32) {
        self.unlink(run.start, run.len);
        self.free.remove_range(run.start, len);
        self.link(run.start + len, run.len - len);
    }

    /// The run that holds `id`, which must be free.
    #[must_use]
    pub fn run_around(&self, id: u32) -> Run {
        let mut word = id as usize >> 6;
        let mut holes = !self.free.word(word) & !(u64::MAX << (id & 63));
        let start = loop {
            if holes != 0 {
                break (word as u32) * 64 + 64 - holes.leading_zeros();
            }
            if word == 0 {
                break 0;
            }
            word -= 1;
            holes = !self.free.word(word);
        };
        Run { start, len: self.len_at[start as usize] }
    }

    fn next_class(&self, from: usize) -> Option<usize> {
        let mut word = from >> 6;
        let mut bits = self.present.get(word)? & (u64::MAX << (from & 63));
        while bits == 0 {
            word += 1;
            bits = *self.present.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn last_class(&self) -> Option<usize> {
        let word = self.present.iter().rposition(|&bits| bits != 0)?;
        Some(word * 64 + 63 - self.present[word].leading_zeros() as usize)
    }

    /// The lowest run of `class` that starts in `chunk`.
    #[inline]
    fn start_in_chunk(&self, class: usize, chunk: u32) -> Option<u32> {
        let word = self.free.word(chunk as usize);
        let carry = u64::from(chunk > 0 && self.free.contains(chunk * 64 - 1));
        let mut starts = word & !(word << 1 | carry);
        if class < EXACT {
            let len = class as u32 + 1;
            // Bits with `len` set bits from them on; what runs into the next chunk is looked at as well.
            let mut long = word;
            let mut have = 1;
            while have < len {
                let more = have.min(len - have);
                long &= long >> more | !(u64::MAX >> more);
                have += more;
            }
            starts &= long;
            while starts != 0 {
                let start = chunk * 64 + starts.trailing_zeros();
                if self.len_at[start as usize] == len {
                    return Some(start);
                }
                starts &= starts - 1;
            }
            return None;
        }
        while starts != 0 {
            let start = chunk * 64 + starts.trailing_zeros();
            if class_of(self.len_at[start as usize]) == class {
                return Some(start);
            }
            starts &= starts - 1;
        }
        None
    }

    fn runs_of(&self, class: usize) -> impl Iterator<Item = Run> + '_ {
        self.chunks[class].iter().filter_map(move |chunk| {
            let start = self.start_in_chunk(class, chunk)?;
            Some(Run { start, len: self.len_at[start as usize] })
        })
    }

    fn smallest_in(&self, class: usize, need: u32) -> Option<Run> {
        if class < EXACT {
            let start = self.start_in_chunk(class, self.chunks[class].next(0)?)?;
            return (self.len_at[start as usize] >= need).then_some(Run { start, len: class as u32 + 1 });
        }
        let fitting = self.runs_of(class).filter(|run| run.len >= need).take(LOOKED_AT);
        fitting.min_by_key(|run| (run.len, run.start))
    }

    /// The smallest run of at least `need` blocks, lowest id first among equals (above 64 blocks: the best of the
    /// first 64 candidates of the size class).
    #[must_use]
    pub fn best_fit(&self, need: u32) -> Option<Run> {
        let need = need.max(1);
        let class = class_of(need);
        if class < self.chunks.len()
            && let Some(run) = self.smallest_in(class, need)
        {
            return Some(run);
        }
        self.smallest_in(self.next_class(class + 1)?, need)
    }

    /// A longest run, lowest id first among equals.
    #[must_use]
    pub fn largest(&self) -> Option<Run> {
        let class = self.last_class()?;
        if class < EXACT {
            let start = self.start_in_chunk(class, self.chunks[class].next(0)?)?;
            return Some(Run { start, len: class as u32 + 1 });
        }
        self.runs_of(class).min_by_key(|run| (std::cmp::Reverse(run.len), run.start))
    }

    /// Checks that ends, lengths and classes agree with the set of free blocks.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first run that is wrong.
    pub fn validate(&self) -> Result<()> {
        let mut rebuilt = Self::new(self.len_at.len());
        let (mut start, mut before) = (None, None);
        for id in self.free.iter() {
            if before.is_some_and(|last: u32| last + 1 == id) {
                before = Some(id);
                continue;
            }
            if let (Some(first), Some(last)) = (start, before) {
                rebuilt.insert(first, last - first + 1);
            }
            start = Some(id);
            before = Some(id);
        }
        if let (Some(first), Some(last)) = (start, before) {
            rebuilt.insert(first, last - first + 1);
        }
        for class in 0..self.chunks.len() {
            if !self.runs_of(class).eq(rebuilt.runs_of(class)) {
                return Err(Error::corrupt(format!("run index: size class {class} is off")));
            }
        }
        if self.counts != rebuilt.counts || self.runs != rebuilt.runs || self.present != rebuilt.present {
            return Err(Error::corrupt("run index: counts of runs are off"));
        }
        Ok(())
    }
}
