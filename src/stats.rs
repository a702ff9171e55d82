//! Figures of a pool, and its snapshot.

use std::collections::BTreeMap;

use crate::free::Place;
use crate::ids::BlockId;
use crate::pool::{BlockPool, Counters};
use crate::table::count_runs;

/// Version of the snapshot format.
pub const SNAPSHOT_VERSION: u32 = 1;

/// Runs of clean blocks.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct FreeRuns {
    /// Longest run of clean blocks.
    pub largest_run: usize,
    /// Longest run of clean or cached blocks: what eviction could make of it.
    pub largest_run_with_cached: usize,
    /// Number of runs.
    pub free_runs: usize,
    /// Runs by length, in buckets "1", "2-3", "4-7" and so on.
    pub free_run_histogram: BTreeMap<String, usize>,
    /// 1 - largest run / clean blocks; 0 without clean blocks.
    pub fragmentation: f64,
}

/// Pages: `blocks_per_page` neighbouring blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Pages {
    /// All pages, a short last one included.
    pub total: usize,
    /// Pages with clean blocks only: what could be given back.
    pub empty: usize,
    /// Pages that cannot be given back as they are because a block in them is active or cached.
    pub pinned: usize,
    /// Of these, pages with an active block (or the null block): not even eviction would empty them.
    pub held: usize,
}

/// Runs per sequence.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct SequenceRuns {
    /// Sequences.
    pub sequences: usize,
    /// Runs over all of them.
    pub runs: usize,
    /// Mean runs per sequence; `None` without sequences.
    pub mean: Option<f64>,
    /// 99th percentile (nearest rank); `None` without sequences.
    pub p99: Option<usize>,
    /// Most runs of one sequence; `None` without sequences.
    pub max: Option<usize>,
}

/// Token slots of the blocks held by tables.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TokenSlots {
    /// Slots in active blocks.
    pub slots: usize,
    /// Slots that hold a token; shared blocks count once.
    pub used: usize,
    /// 1 - used / slots; 0 without slots.
    pub internal_fragmentation: f64,
}

/// Everything about a pool that can be computed from its state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Runs of clean blocks.
    pub runs: FreeRuns,
    /// Pages.
    pub pages: Pages,
    /// Runs per sequence.
    pub sequence_runs: SequenceRuns,
    /// Token slots.
    pub tokens: TokenSlots,
    /// Running totals.
    pub counters: Counters,
}

/// Bucket of a run length: "1", "2-3", "4-7"...
#[must_use]
pub fn bucket(len: usize) -> String {
    let low = 1usize << len.max(1).ilog2();
    if low == 1 { "1".into() } else { format!("{low}-{}", 2 * low - 1) }
}

impl BlockPool {
    fn place(&self, i: usize) -> Place {
        self.free_blocks().place_of(BlockId(i as u32)).unwrap_or(Place::Out)
    }

    fn free_runs(&self) -> FreeRuns {
        let mut lengths = Vec::new();
        let (mut with_cached, mut longest_with_cached, mut run) = (0, 0, 0);
        for i in 0..self.config().num_blocks {
            let place = self.place(i);
            with_cached = if place == Place::Out { 0 } else { with_cached + 1 };
            longest_with_cached = longest_with_cached.max(with_cached);
            if place == Place::Clean {
                run += 1;
            } else if run > 0 {
                lengths.push(std::mem::take(&mut run));
            }
        }
        lengths.extend((run > 0).then_some(run));
        let largest = lengths.iter().copied().max().unwrap_or(0);
        let mut histogram = BTreeMap::new();
        for &len in &lengths {
            *histogram.entry(bucket(len)).or_default() += 1;
        }
        FreeRuns {
            largest_run: largest,
            largest_run_with_cached: longest_with_cached,
            free_runs: lengths.len(),
            free_run_histogram: histogram,
            fragmentation: if self.num_free() == 0 { 0.0 } else { 1.0 - largest as f64 / self.num_free() as f64 },
        }
    }

    fn pages(&self) -> Pages {
        let (n, page) = (self.config().num_blocks, self.config().blocks_per_page);
        let total = n.div_ceil(page);
        let (mut empty, mut held) = (0, 0);
        for first in (0..n).step_by(page) {
            let mut places = (first..(first + page).min(n)).map(|i| self.place(i));
            empty += usize::from(places.clone().all(|place| place == Place::Clean));
            held += usize::from(places.any(|place| place == Place::Out));
        }
        Pages { total, empty, pinned: total - empty, held }
    }

    fn sequence_runs(&self) -> SequenceRuns {
        let mut runs: Vec<usize> = self.sequences().iter().map(|(_, sequence)| count_runs(&sequence.blocks)).collect();
        runs.sort_unstable();
        let total = runs.iter().sum();
        let rank = (runs.len() * 99).div_ceil(100);
        SequenceRuns {
            sequences: runs.len(),
            runs: total,
            mean: (!runs.is_empty()).then(|| total as f64 / runs.len() as f64),
            p99: rank.checked_sub(1).and_then(|rank| runs.get(rank).copied()),
            max: runs.last().copied(),
        }
    }

    fn token_slots(&self) -> TokenSlots {
        let block_size = self.config().block_size;
        let mut used = vec![0; self.config().num_blocks];
        for (_, sequence) in self.sequences().iter() {
            for (i, &id) in sequence.blocks.iter().enumerate() {
                let here = (sequence.num_tokens - i * block_size).min(block_size);
                used[id.index()] = here.max(used[id.index()]);
            }
        }
        let held = used.iter().filter(|&&tokens| tokens > 0).count();
        let (slots, used) = (held * block_size, used.iter().sum::<usize>());
        let internal_fragmentation = if slots == 0 { 0.0 } else { 1.0 - used as f64 / slots as f64 };
        TokenSlots { slots, used, internal_fragmentation }
    }

    /// All figures, computed now. O(blocks + blocks listed in tables).
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            runs: self.free_runs(),
            pages: self.pages(),
            sequence_runs: self.sequence_runs(),
            tokens: self.token_slots(),
            counters: self.counters(),
        }
    }
}

#[cfg(feature = "serde")]
impl BlockPool {
    /// The figures as JSON: counts of blocks, runs, pages, tokens, totals.
    #[must_use]
    pub fn stats_json(&self) -> serde_json::Value {
        let stats = self.stats();
        serde_json::json!({
            "blocks": self.block_counts(),
            "runs": stats.runs,
            "pages": stats.pages,
            "sequences": stats.sequence_runs,
            "tokens": stats.tokens,
            "counters": stats.counters,
        })
    }

    fn block_counts(&self) -> serde_json::Value {
        serde_json::json!({
            "total": self.config().num_blocks,
            "null": usize::from(self.config().null_block),
            "free": self.num_free(),
            "cached": self.num_cached(),
            "active": self.num_active(),
            "pinned": self.num_pinned(),
            "reserved": self.num_reserved(),
            "available": self.available(),
        })
    }

    /// The whole state that matters to a person, as versioned JSON (`kvcatch.snapshot`, version 1).
    #[must_use]
    pub fn snapshot_json(&self) -> serde_json::Value {
        let config = self.config();
        let stats = self.stats();
        let mut holders = vec![0u32; config.num_blocks];
        for (_, sequence) in self.sequences().iter() {
            for id in &sequence.blocks {
                holders[id.index()] += 1;
            }
        }
        let sequences: Vec<_> = self
            .sequences()
            .iter()
            .map(|(handle, sequence)| {
                let tags: BTreeMap<_, _> = sequence.tags.iter().cloned().collect();
                serde_json::json!({
                    "id": handle.raw(),
                    "owner": sequence.owner,
                    "tags": tags,
                    "num_tokens": sequence.num_tokens,
                    "num_committed": sequence.committed,
                    "blocks": sequence.blocks.len(),
                    "shared_blocks": sequence.blocks.iter().filter(|id| holders[id.index()] > 1).count(),
                    "runs": count_runs(&sequence.blocks),
                    "hit_tokens": sequence.hit_tokens,
                    "reserved": sequence.reserved,
                })
            })
            .collect();
        let pins: Vec<_> = self
            .pins()
            .iter()
            .map(|(handle, pin)| {
                serde_json::json!({
                    "id": handle.raw(),
                    "owner": pin.owner,
                    "blocks": pin.blocks.len(),
                    "deadline": pin.deadline.map(|ms| ms as f64 / 1e3),
                })
            })
            .collect();
        serde_json::json!({
            "format": "kvcatch.snapshot",
            "version": SNAPSHOT_VERSION,
            "kvcatch": env!("CARGO_PKG_VERSION"),
            "config": {
                "num_blocks": config.num_blocks,
                "block_size": config.block_size,
                "blocks_per_page": config.blocks_per_page,
                "placement": config.placement,
                "eviction": config.eviction,
                "contiguity": if config.contiguous { "required" } else { "preferred" },
                "hash": config.hash.name(),
                "null_block": config.null_block,
            },
            "blocks": self.block_counts(),
            "runs": stats.runs,
            "pages": stats.pages,
            "tokens": stats.tokens,
            "counters": stats.counters,
            "sequences": sequences,
            "pins": pins,
        })
    }
}
