//! The pool while pieces are joined: who lies where, free stretches by length, and the moves made so far.
//!
//! A piece is a maximal stretch of neighbouring blocks that tables want as neighbours. Its length is kept at both of
//! its ends, and so is that of a free stretch: neighbours are found and merged in constant time.

use std::collections::BTreeSet;

use super::super::Cell;
use super::super::bits::Bits;
use super::graph::{Edge, NONE, Problem};

pub(super) struct Pieces<'a> {
    edges: &'a [Edge],
    first_out: Vec<u32>,
    /// Indexes of `edges` by `(b, a)`.
    by_b: Vec<u32>,
    first_in: Vec<u32>,
    /// Block (by its first id) that lies in each cell.
    at: Vec<u32>,
    /// Cell in which each block lies.
    pos: Vec<u32>,
    /// At both ends of a piece or free stretch: its length.
    span: Vec<u32>,
    /// Set where a cell and the next one belong to one piece.
    joined: Bits,
    fixed_before: Vec<u32>,
    /// Free stretches as `(len, start)`.
    holes: BTreeSet<(u32, u32)>,
    /// All moves in the order in which they were made.
    pub(super) list: Vec<(u32, u32)>,
    /// Cells beside which something changed since the caller last looked.
    pub(super) touched: Vec<u32>,
}

impl<'a> Pieces<'a> {
    /// The pool after `list` (moves that can be made in this order). O(blocks + edges log edges).
    pub(super) fn new(problem: &Problem<'_>, edges: &'a [Edge], list: Vec<(u32, u32)>) -> Self {
        let n = problem.cells.len();
        let mut by_b: Vec<u32> = (0..edges.len() as u32).collect();
        by_b.sort_unstable_by_key(|&i| (edges[i as usize].b, edges[i as usize].a));
        let mut first_out = vec![0; n + 1];
        let mut first_in = vec![0; n + 1];
        for edge in edges {
            first_out[edge.a as usize + 1] += 1;
            first_in[edge.b as usize + 1] += 1;
        }
        let mut fixed_before = vec![0; n + 1];
        for i in 0..n {
            first_out[i + 1] += first_out[i];
            first_in[i + 1] += first_in[i];
            fixed_before[i + 1] = fixed_before[i] + u32::from(problem.cells[i] == Cell::Fixed);
        }
        let mut at: Vec<u32> = (0..n as u32).collect();
        for (block, &cell) in at.iter_mut().zip(problem.cells) {
            if cell == Cell::Free {
                *block = NONE;
            }
        }
        let mut pos: Vec<u32> = (0..n as u32).collect();
        for &(s, d) in &list {
            let block = std::mem::replace(&mut at[s as usize], NONE);
            at[d as usize] = block;
            pos[block as usize] = d;
        }
        let mut pieces = Self {
            edges,
            first_out,
            by_b,
            first_in,
            at,
            pos,
            span: vec![0; n],
            joined: Bits::none(n),
            fixed_before,
            holes: BTreeSet::new(),
            list,
            touched: Vec::new(),
        };
        let mut holes = Vec::new();
        let mut from = 0;
        for c in 0..n {
            let pair = (pieces.block_at(c as u32), pieces.block_at(c as u32 + 1));
            if pieces.weight(pair.0, pair.1) > 0 {
                pieces.joined.set(c);
                continue;
            }
            if pair == (None, None) && c + 1 < n {
                continue;
            }
            let len = (c + 1 - from) as u32;
            pieces.tag(from as u32, len);
            if pieces.at[c] == NONE {
                holes.push((len, from as u32));
            }
            from = c + 1;
        }
        pieces.holes = holes.into_iter().collect();
        pieces
    }

    pub(super) fn edge(&self, i: u32) -> Edge {
        self.edges[i as usize]
    }

    /// Edges out of a block.
    pub(super) fn edges_out(&self, block: u32) -> std::ops::Range<u32> {
        self.first_out[block as usize]..self.first_out[block as usize + 1]
    }

    /// Edges into a block.
    pub(super) fn edges_into(&self, block: u32) -> &[u32] {
        let from = self.first_in[block as usize] as usize;
        &self.by_b[from..self.first_in[block as usize + 1] as usize]
    }

    pub(super) fn block_at(&self, cell: u32) -> Option<u32> {
        self.at.get(cell as usize).copied().filter(|&b| b != NONE)
    }

    pub(super) fn cell_of(&self, block: u32) -> u32 {
        self.pos[block as usize]
    }

    /// Weight of `b` behind `a`, 0 when no table wants that.
    pub(super) fn weight(&self, a: Option<u32>, b: Option<u32>) -> u64 {
        let (Some(a), Some(b)) = (a, b) else {
            return 0;
        };
        let out = self.edges_out(a);
        let out = &self.edges[out.start as usize..out.end as usize];
        out.binary_search_by_key(&b, |e| e.b).map_or(0, |i| u64::from(out[i].weight))
    }

    /// Length of the piece that ends in `cell`, when one does.
    pub(super) fn tail(&self, cell: u32) -> Option<u32> {
        (self.at[cell as usize] != NONE && !self.joined.get(cell as usize)).then(|| self.span[cell as usize])
    }

    /// Length of the piece that starts in `cell`, when one does.
    pub(super) fn head(&self, cell: u32) -> Option<u32> {
        let starts = cell == 0 || !self.joined.get(cell as usize - 1);
        (self.at[cell as usize] != NONE && starts).then(|| self.span[cell as usize])
    }

    pub(super) fn movable(&self, start: u32, len: u32) -> bool {
        self.fixed_before[start as usize] == self.fixed_before[(start + len) as usize]
    }

    pub(super) fn len(&self) -> u32 {
        self.at.len() as u32
    }

    fn tag(&mut self, start: u32, len: u32) {
        self.span[start as usize] = len;
        self.span[(start + len - 1) as usize] = len;
    }

    /// Pieces other than `own` in `lo..hi`, of which one end touches an end of a piece or free stretch: `up` says
    /// which. `None` when they are more than `limit`, or one of them cannot move.
    pub(super) fn obstacles(&self, lo: u32, hi: u32, up: bool, own: u32, limit: usize) -> Option<Vec<(u32, u32)>> {
        let mut found = Vec::new();
        let mut left = hi - lo;
        while left > 0 {
            let (start, len) = if up {
                let c = hi - left;
                (c, self.span[c as usize])
            } else {
                let c = lo + left - 1;
                let len = self.span[c as usize];
                (c + 1 - len, len)
            };
            if self.at[start as usize] != NONE && start != own {
                if found.len() == limit || !self.movable(start, len) {
                    return None;
                }
                found.push((start, len));
            }
            left = left.saturating_sub(len);
        }
        Some(found)
    }

    /// Whether `lo..hi` is free but for the `len` cells from `own` on.
    pub(super) fn is_free(&self, lo: u32, hi: u32, own: u32, len: u32) -> bool {
        (lo..hi).all(|c| self.at[c as usize] == NONE || (own..own + len).contains(&c))
    }

    /// `len` free cells outside `lo..hi` in the smallest free stretch that has them, as `(start, start of stretch)`.
    pub(super) fn find_hole(&self, len: u32, lo: u32, hi: u32) -> Option<(u32, u32)> {
        self.holes_outside(len, lo, hi).next()
    }

    /// One place of `len` cells in each free stretch that has it outside `lo..hi`, smallest stretch first. Only the
    /// first 32 stretches are looked at, so that a large target full of holes costs no more.
    pub(super) fn holes_outside(&self, len: u32, lo: u32, hi: u32) -> impl Iterator<Item = (u32, u32)> {
        self.holes.range((len, 0)..).take(32).filter_map(move |&(size, start)| {
            let end = start + size;
            if start >= hi || start + len <= lo {
                Some((start, start))
            } else {
                (end >= hi && end - hi >= len).then_some((hi, start))
            }
        })
    }

    /// Takes the free cells `start..start + len` out of the free stretch that starts at `stretch`.
    fn claim(&mut self, start: u32, len: u32, stretch: u32) {
        let size = self.span[stretch as usize];
        self.holes.remove(&(size, stretch));
        for (s, e) in [(stretch, start), (start + len, stretch + size)] {
            if e > s {
                self.tag(s, e - s);
                self.holes.insert((e - s, s));
            }
        }
    }

    /// Frees `start..start + len`.
    fn release(&mut self, start: u32, len: u32) {
        let (mut lo, mut hi) = (start, start + len);
        self.at[lo as usize..hi as usize].fill(NONE);
        if lo > 0 && self.at[lo as usize - 1] == NONE {
            let size = self.span[lo as usize - 1];
            lo -= size;
            self.holes.remove(&(size, lo));
        }
        if hi < self.len() && self.at[hi as usize] == NONE {
            let size = self.span[hi as usize];
            self.holes.remove(&(size, hi));
            hi += size;
        }
        self.tag(lo, hi - lo);
        self.holes.insert((hi - lo, lo));
        self.touched.extend([lo.wrapping_sub(1), hi]);
    }

    fn write(&mut self, to: u32, blocks: &[u32]) {
        for (cell, &block) in (to..).zip(blocks) {
            self.at[cell as usize] = block;
            self.pos[block as usize] = cell;
        }
    }

    /// Moves the piece at `from` to `to`, whose cells are free or its own, and merges it with its new neighbours.
    pub(super) fn shift(&mut self, from: u32, len: u32, to: u32, target: Target) {
        let blocks: Vec<u32> = self.at[from as usize..(from + len) as usize].to_vec();
        // A piece that overlaps its target makes room for itself when it starts at the far end.
        if to < from {
            self.list.extend((0..len).map(|i| (from + i, to + i)));
        } else {
            self.list.extend((0..len).rev().map(|i| (from + i, to + i)));
        }
        if let Target::Hole(stretch) = target {
            // Taken and written before the release: that must not merge it with the cells left behind.
            self.claim(to, len, stretch);
            self.write(to, &blocks);
            self.release(from, len);
        } else {
            self.release(from, len);
            let last = to + len - 1;
            let stretch = match target {
                Target::Before => last + 1 - self.span[last as usize],
                _ => to,
            };
            self.claim(to, len, stretch);
            self.write(to, &blocks);
        }
        for i in from..from + len - 1 {
            self.joined.clear(i as usize);
        }
        for i in to..to + len - 1 {
            self.joined.set(i as usize);
        }
        let (mut lo, mut hi) = (to, to + len);
        if let Some(before) = lo.checked_sub(1)
            && self.weight(self.block_at(before), self.block_at(lo)) > 0
        {
            self.joined.set(before as usize);
            lo -= self.span[before as usize];
        }
        if self.weight(self.block_at(hi - 1), self.block_at(hi)) > 0 {
            self.joined.set(hi as usize - 1);
            hi += self.span[hi as usize];
        }
        self.tag(lo, hi - lo);
        self.touched.extend([lo, hi - 1]);
    }
}

/// Where a piece goes.
#[derive(Copy, Clone)]
pub(super) enum Target {
    /// Right behind a piece that stays.
    Behind,
    /// Right before a piece that stays.
    Before,
    /// Into the free stretch that starts here, which its own cells are no part of.
    Hole(u32),
}
