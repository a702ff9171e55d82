//! Joining two pieces at a time, most runs per move first.
//!
//! Pieces are moved whole, so nothing that holds together is ever broken and no sequence gets worse.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::Moves;
use super::graph::{Edge, Problem};
use super::pieces::{Pieces, Target};
use super::route::schedule;

/// Most pieces driven out for one join.
const MAX_OBSTACLES: usize = 4;
/// Times one break is tried before it is left alone. A try that drives blocks out and still cannot join queues again
/// when something beside it changes, and two such breaks must not take turns for ever.
const MAX_APPLIED: u8 = 4;
/// Neighbourhoods of one block looked at again when something beside it changed.
const MAX_AGAIN: usize = 8;

/// How one break is repaired.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Way {
    /// The second piece comes behind the first.
    Behind,
    /// The first comes before the second.
    Before,
    /// Both go to a free stretch.
    Away(u32),
}

struct Join {
    way: Way,
    gain: u64,
    cost: u64,
}

impl Join {
    fn key(&self) -> u64 {
        (self.gain << 24) / self.cost.max(1)
    }
}

/// Repairs breaks after the moves in `start` while that takes at most `budget` moves in all.
/// O(breaks log breaks + blocks moved log free stretches).
pub(super) fn join_pieces(problem: &Problem<'_>, edges: &[Edge], start: Moves, budget: usize) -> Moves {
    let list = start.src.iter().zip(&start.dst).map(|(s, d)| (s.0, d.0)).collect();
    let mut joiner = Joiner {
        pieces: Pieces::new(problem, edges, list),
        // Offsets of rounds are 32 bits wide.
        budget: budget.min(u32::MAX as usize),
        heap: BinaryHeap::new(),
        applied: vec![0; edges.len()],
    };
    let queued = (0..edges.len() as u32).filter_map(|i| joiner.entry(i));
    joiner.heap = queued.collect::<Vec<_>>().into();
    joiner.run();
    schedule(problem.cells.len(), &joiner.pieces.list)
}

/// A break as it queues: `(runs per move, fewest moves, lowest edge)`.
type Entry = (u64, Reverse<u64>, Reverse<u32>);

struct Joiner<'a> {
    pieces: Pieces<'a>,
    budget: usize,
    heap: BinaryHeap<Entry>,
    applied: Vec<u8>,
}

impl Joiner<'_> {
    fn entry(&self, edge: u32) -> Option<Entry> {
        let join = self.best_join(edge)?;
        Some((join.key(), Reverse(join.cost), Reverse(edge)))
    }

    fn run(&mut self) {
        while let Some((key, Reverse(cost), Reverse(edge))) = self.heap.pop() {
            if self.pieces.list.len() >= self.budget {
                return;
            }
            let Some(join) = self.best_join(edge) else {
                continue;
            };
            // The pool changed since this was pushed: it has to queue again for what it is worth now.
            if (join.key(), Reverse(join.cost)) < (key, Reverse(cost)) {
                self.heap.push((join.key(), Reverse(join.cost), Reverse(edge)));
                continue;
            }
            let applied = &mut self.applied[edge as usize];
            if *applied == MAX_APPLIED {
                continue;
            }
            *applied += 1;
            self.apply(edge, &join);
            while let Some(cell) = self.pieces.touched.pop() {
                let Some(block) = self.pieces.block_at(cell) else {
                    continue;
                };
                let out = self.pieces.edges_out(block).take(MAX_AGAIN);
                let into = self.pieces.edges_into(block).iter().take(MAX_AGAIN);
                let again: Vec<Entry> = out.chain(into.copied()).filter_map(|i| self.entry(i)).collect();
                self.heap.extend(again);
            }
        }
    }

    /// The two pieces an edge would join, as `(start, len)`; `None` when it holds already or is not between ends.
    fn ends(&self, edge: &Edge) -> Option<((u32, u32), (u32, u32))> {
        let (a, b) = (self.pieces.cell_of(edge.a), self.pieces.cell_of(edge.b));
        let (len_a, len_b) = (self.pieces.tail(a)?, self.pieces.head(b)?);
        let first = (a + 1 - len_a, len_a);
        (first.0 != b).then_some((first, (b, len_b)))
    }

    /// The way with most runs per move that the budget allows.
    fn best_join(&self, edge: u32) -> Option<Join> {
        let edge = self.pieces.edge(edge);
        let pieces = &self.pieces;
        let ((a, len_a), (b, len_b)) = self.ends(&edge)?;
        let left = self.budget.saturating_sub(pieces.list.len()) as u64;
        let mut best: Option<Join> = None;
        let mut consider = |way, gain, cost| {
            let join = Join { way, gain, cost };
            if cost <= left && best.as_ref().is_none_or(|b| (join.key(), Reverse(cost)) > (b.key(), Reverse(b.cost))) {
                best = Some(join);
            }
        };
        let block = |cell: Option<u32>| cell.and_then(|c| pieces.block_at(c));
        let weight = u64::from(edge.weight);
        let (a_moves, b_moves) = (pieces.movable(a, len_a), pieces.movable(b, len_b));
        if b_moves && u64::from(len_b) <= left {
            let lo = a + len_a;
            if len_b <= pieces.len() - lo
                && let Some(driven) = self.driven_out(lo, len_b, true, b)
            {
                let hi = lo + len_b;
                // A neighbour that has to go, or goes itself, gives no second join.
                let beside = (hi < pieces.len() && hi != b && pieces.head(hi).is_some()).then_some(hi);
                let more = pieces.weight(block(Some(b + len_b - 1)), block(beside));
                consider(Way::Behind, weight + more, u64::from(len_b) + driven);
            }
        }
        if a_moves
            && u64::from(len_a) <= left
            && let Some(lo) = b.checked_sub(len_a)
            && let Some(driven) = self.driven_out(lo, len_a, false, a)
        {
            let beside = lo.checked_sub(1).filter(|&c| c + 1 != a + len_a && pieces.tail(c).is_some());
            let more = pieces.weight(block(beside), block(Some(a)));
            consider(Way::Before, weight + more, u64::from(len_a) + driven);
        }
        let both = u64::from(len_a) + u64::from(len_b);
        if a_moves
            && b_moves
            && both <= left
            && let Some((start, _)) = pieces.find_hole(both as u32, 0, 0)
        {
            consider(Way::Away(start), weight, both);
        }
        best
    }

    /// Moves it takes to drive all other pieces out of the target, `None` when that cannot be done: every one needs
    /// a hole of its own.
    fn driven_out(&self, lo: u32, len: u32, up: bool, own: u32) -> Option<u64> {
        let hi = lo + len;
        let obstacles = self.pieces.obstacles(lo, hi, up, own, MAX_OBSTACLES)?;
        let Some(longest) = obstacles.iter().map(|o| o.1).max() else {
            return Some(0);
        };
        let holes = self.pieces.holes_outside(longest, lo, hi).take(obstacles.len()).count();
        (holes == obstacles.len()).then(|| obstacles.iter().map(|o| u64::from(o.1)).sum())
    }

    /// Makes room and joins. What is driven out may find a neighbour of its own where it lands, and that may be the
    /// piece to be moved: then that longer piece has to queue again.
    fn apply(&mut self, edge: u32, join: &Join) {
        let ends = self.pieces.edge(edge);
        let Some(((a, len_a), (b, len_b))) = self.ends(&ends) else {
            return;
        };
        let (from, len, to, target) = match join.way {
            Way::Behind => (b, len_b, a + len_a, Target::Behind),
            Way::Before => (a, len_a, b - len_a, Target::Before),
            Way::Away(start) => {
                self.pieces.shift(a, len_a, start, Target::Hole(start));
                (b, len_b, start + len_a, Target::Behind)
            }
        };
        if !matches!(join.way, Way::Away(_)) {
            let up = matches!(target, Target::Behind);
            let obstacles = self.pieces.obstacles(to, to + len, up, from, MAX_OBSTACLES);
            for (start, size) in obstacles.unwrap_or_default() {
                if self.pieces.head(start) != Some(size) {
                    break;
                }
                let Some((hole, stretch)) = self.pieces.find_hole(size, to, to + len) else {
                    break;
                };
                self.pieces.shift(start, size, hole, Target::Hole(stretch));
            }
        }
        if self.pieces.head(from) != Some(len) {
            self.heap.extend(self.entry(edge));
        } else if self.pieces.is_free(to, to + len, from, len) {
            self.pieces.shift(from, len, to, target);
        }
    }
}
