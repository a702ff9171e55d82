//! Who should lie behind whom: the neighbourhoods that tables want, chains of them, and what must break anyway.

use std::cmp::Reverse;

use super::super::{Cell, PlanError, count_runs};
use crate::ids::BlockId;

/// No block.
pub(super) const NONE: u32 = u32::MAX;

/// `b` follows `a` in `weight` tables: every break between them is `weight` runs.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Edge {
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) weight: u32,
}

impl Edge {
    /// Whether the two lie behind each other as the pool is.
    pub(super) fn intact(&self) -> bool {
        self.a.checked_add(1) == Some(self.b)
    }
}

/// The pool and the tables, checked.
pub(super) struct Problem<'a> {
    pub(super) cells: &'a [Cell],
    pub(super) sequences: &'a [&'a [BlockId]],
    /// Some block is listed more than once.
    pub(super) shared: bool,
    /// Some listed block is fixed.
    pub(super) fixed_listed: bool,
    /// Runs now.
    pub(super) before: u64,
    listed: Vec<bool>,
    non_empty: u64,
    has_free: bool,
}

impl<'a> Problem<'a> {
    /// Checks every id. O(blocks + blocks listed).
    pub(super) fn new(cells: &'a [Cell], sequences: &'a [&'a [BlockId]]) -> Result<Self, PlanError> {
        let mut listed = vec![false; cells.len()];
        let mut shared = false;
        let mut fixed_listed = false;
        for (sequence, table) in sequences.iter().enumerate() {
            for (index, &BlockId(block)) in table.iter().enumerate() {
                match cells.get(block as usize) {
                    Some(Cell::Movable) => {}
                    Some(Cell::Fixed) => fixed_listed = true,
                    Some(Cell::Free) => {
                        return Err(PlanError::ListedFree { sequence, index, block });
                    }
                    None => {
                        return Err(PlanError::OutOfRange { sequence, index, block, num_blocks: cells.len() });
                    }
                }
                shared |= std::mem::replace(&mut listed[block as usize], true);
            }
        }
        Ok(Self {
            cells,
            sequences,
            shared,
            fixed_listed,
            before: count_runs(sequences),
            listed,
            non_empty: sequences.iter().filter(|s| !s.is_empty()).count() as u64,
            has_free: cells.contains(&Cell::Free),
        })
    }

    /// One run per sequence.
    pub(super) fn least_possible(&self) -> u64 {
        self.non_empty
    }

    /// All neighbourhoods with their weights, sorted by `(a, b)`. A block behind itself is none. O(listed log listed).
    pub(super) fn edges(&self) -> Vec<Edge> {
        let mut pairs: Vec<u64> = self
            .sequences
            .iter()
            .flat_map(|s| s.windows(2))
            .filter(|w| w[0] != w[1])
            .map(|w| u64::from(w[0].0) << 32 | u64::from(w[1].0))
            .collect();
        pairs.sort_unstable();
        let mut edges: Vec<Edge> = Vec::with_capacity(pairs.len());
        for pair in pairs {
            let (a, b) = ((pair >> 32) as u32, pair as u32);
            match edges.last_mut() {
                Some(last) if last.a == a && last.b == b => last.weight += 1,
                _ => edges.push(Edge { a, b, weight: 1 }),
            }
        }
        edges
    }

    fn fixed(&self, block: u32) -> bool {
        self.cells.get(block as usize) == Some(&Cell::Fixed)
    }

    /// Whether `b` can lie behind `a` at all: not when a fixed block of the two has a fixed stranger, or the end of
    /// the pool, where the other would have to be.
    pub(super) fn possible(&self, edge: &Edge) -> bool {
        let Edge { a, b, .. } = *edge;
        let behind_a = (a as usize + 1 < self.cells.len()).then_some(a + 1);
        let before_b = b.checked_sub(1);
        match (self.fixed(a), self.fixed(b)) {
            (true, true) => behind_a == Some(b),
            (true, false) => behind_a.is_some_and(|c| !self.fixed(c)),
            (false, true) => before_b.is_some_and(|c| !self.fixed(c)),
            (false, false) => true,
        }
    }

    /// Runs that no plan within `max_moves` goes below; `edges` may be missing when nothing is shared, no listed
    /// block is fixed and moves are not limited.
    pub(super) fn bound(&self, edges: Option<&[Edge]>, max_moves: Option<usize>) -> u64 {
        if !self.has_free || max_moves == Some(0) {
            return self.before;
        }
        let mut bound = self.non_empty.max(self.span_bound());
        if let Some(edges) = edges {
            bound = bound.max(self.non_empty + self.branch_bound(edges));
            if let Some(k) = max_moves {
                bound = bound.max(self.before.saturating_sub(self.most_gain(edges, k)));
            }
        }
        bound.min(self.before)
    }

    /// Breaks left however blocks lie: each block keeps one successor and one predecessor, the heaviest at best.
    fn branch_bound(&self, edges: &[Edge]) -> u64 {
        let self_edges: u64 = self.sequences.iter().flat_map(|s| s.windows(2)).filter(|w| w[0] == w[1]).count() as u64;
        let mut lost_in: Vec<(u32, u32, u32)> = Vec::new();
        let mut lost_out = 0;
        for group in edges.chunk_by(|x, y| x.a == y.a) {
            let mut best = 0;
            let mut all = 0;
            for edge in group {
                let usable = if self.possible(edge) { edge.weight } else { 0 };
                best = best.max(usable);
                all += u64::from(edge.weight);
                lost_in.push((edge.b, edge.weight, usable));
            }
            lost_out += all - u64::from(best);
        }
        lost_in.sort_unstable();
        let mut lost = 0;
        for group in lost_in.chunk_by(|x, y| x.0 == y.0) {
            let all: u64 = group.iter().map(|x| u64::from(x.1)).sum();
            let best = group.iter().map(|x| x.2).max().unwrap_or(0);
            lost += all - u64::from(best);
        }
        self_edges + lost_out.max(lost)
    }

    /// A run lies between two fixed blocks that no sequence lists: a longer sequence needs several.
    fn span_bound(&self) -> u64 {
        let (mut span, mut longest) = (0usize, 0usize);
        for (cell, listed) in self.cells.iter().zip(&self.listed) {
            span = if *cell == Cell::Fixed && !listed { 0 } else { span + 1 };
            longest = longest.max(span);
        }
        let longest = longest.max(1);
        self.sequences.iter().map(|s| s.len().div_ceil(longest) as u64).sum()
    }

    /// Most runs that `k` moves can save: a repaired break has a moved block beside it, and a moved block ends with
    /// one neighbour on each side.
    fn most_gain(&self, edges: &[Edge], k: usize) -> u64 {
        let mut ahead = vec![0u32; self.cells.len()];
        let mut behind = vec![0u32; self.cells.len()];
        for edge in edges.iter().filter(|e| !e.intact() && self.possible(e)) {
            let out = &mut ahead[edge.a as usize];
            *out = edge.weight.max(*out);
            let into = &mut behind[edge.b as usize];
            *into = edge.weight.max(*into);
        }
        let mut gains: Vec<u64> = (0..self.cells.len())
            .filter(|&i| self.cells[i] == Cell::Movable)
            .map(|i| u64::from(ahead[i]) + u64::from(behind[i]))
            .filter(|&g| g > 0)
            .collect();
        if k < gains.len() {
            gains.select_nth_unstable_by_key(k, |&g| Reverse(g));
            gains.truncate(k);
        }
        gains.iter().sum()
    }
}

/// Which neighbourhoods that hold now must stay.
pub(super) struct Lock {
    level: u8,
    kept: Vec<Edge>,
}

impl Lock {
    pub(super) fn none() -> Self {
        Self { level: 0, kept: Vec::new() }
    }

    /// Locks what holds in the `worse` sequences, the next time what holds in all; `false` when all is locked already.
    pub(super) fn tighten(&mut self, problem: &Problem<'_>, worse: &[u32]) -> bool {
        self.level += 1;
        if self.level > 2 {
            return false;
        }
        for &i in worse {
            let Some(sequence) = problem.sequences.get(i as usize) else {
                continue;
            };
            self.kept
                .extend(sequence.windows(2).map(|w| Edge { a: w[0].0, b: w[1].0, weight: 0 }).filter(Edge::intact));
        }
        self.kept.sort_unstable_by_key(|e| (e.a, e.b));
        true
    }

    fn holds(&self, edge: &Edge) -> bool {
        edge.intact()
            && match self.level {
                0 => false,
                1 => self.kept.binary_search_by_key(&(edge.a, edge.b), |e| (e.a, e.b)).is_ok(),
                _ => true,
            }
    }
}

/// Blocks in the order in which they should lie; no block is in two chains, chains of one block are left out.
pub(super) struct Chains {
    pub(super) blocks: Vec<u32>,
    /// Runs that a break between block `i` and `i + 1` costs; empty when it is one everywhere.
    weights: Vec<u32>,
    /// Half-open ranges of `blocks`.
    pub(super) ranges: Vec<(u32, u32)>,
}

impl Chains {
    /// Every sequence is a chain; right when no block is listed twice.
    pub(super) fn from_sequences(sequences: &[&[BlockId]]) -> Self {
        let mut blocks = Vec::with_capacity(sequences.iter().map(|s| s.len()).sum());
        let mut ranges = Vec::with_capacity(sequences.len());
        for sequence in sequences.iter().filter(|s| s.len() > 1) {
            let from = blocks.len() as u32;
            blocks.extend(sequence.iter().map(|b| b.0));
            ranges.push((from, blocks.len() as u32));
        }
        Self { blocks, weights: Vec::new(), ranges }
    }

    /// Heaviest neighbourhoods first, each block with one successor and one predecessor: for sequences that share
    /// prefixes, which is a tree, that is the heaviest set of chains there is.
    pub(super) fn from_edges(problem: &Problem<'_>, edges: &[Edge], lock: &Lock) -> Self {
        let n = problem.cells.len();
        let mut order: Vec<(bool, Reverse<u32>, u32, u32)> = edges
            .iter()
            .filter(|e| problem.possible(e))
            .map(|e| (!lock.holds(e), Reverse(e.weight), e.a, e.b))
            .collect();
        order.sort_unstable();
        let mut next = vec![NONE; n];
        let mut prev = vec![NONE; n];
        let mut weight = vec![0; n];
        for (_, Reverse(w), a, b) in order {
            if next[a as usize] == NONE && prev[b as usize] == NONE {
                next[a as usize] = b;
                prev[b as usize] = a;
                weight[a as usize] = w;
            }
        }
        let mut chains = Self { blocks: Vec::new(), weights: Vec::new(), ranges: Vec::new() };
        let mut done = vec![false; n];
        // Heads first; what is left after them are rings (tables that list a block twice), cut at their lowest block.
        for rings in [false, true] {
            for head in 0..n as u32 {
                let h = head as usize;
                if done[h] || next[h] == NONE || (prev[h] != NONE && !rings) {
                    continue;
                }
                let from = chains.blocks.len() as u32;
                let mut block = head;
                while block != NONE && !done[block as usize] {
                    done[block as usize] = true;
                    chains.blocks.push(block);
                    chains.weights.push(weight[block as usize]);
                    block = next[block as usize];
                }
                chains.ranges.push((from, chains.blocks.len() as u32));
            }
        }
        chains
    }

    /// Blocks of chain `i`.
    pub(super) fn chain(&self, i: usize) -> &[u32] {
        let (from, to) = self.ranges[i];
        &self.blocks[from as usize..to as usize]
    }

    /// Runs that the break behind `blocks[i]` costs.
    pub(super) fn weight(&self, i: usize) -> u64 {
        self.weights.get(i).map_or(1, |&w| u64::from(w))
    }
}
