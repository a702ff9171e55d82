//! From "what should lie where" to rounds of moves without a hazard.

use super::super::{Cell, Moves};
use super::graph::NONE;

/// Turns `want` (`want[c]`: the block that should come to `c`, or [`NONE`]) into rounds. Each block goes straight to
/// its place in the round after the place is vacated; a block in the way that has no place of its own goes to a free
/// block nobody wants; a ring of blocks that wait for each other costs one move more, through a free block. `None`
/// when there is no free block at all, or when more than `budget` moves are needed. O(blocks).
///
/// One move per misplaced block is the fewest there can be for a given `want`, plus one per ring.
pub(super) fn route(cells: &[Cell], mut want: Vec<u32>, budget: usize) -> Option<Moves> {
    let mut leaves = vec![false; cells.len()];
    let mut wanted = 0;
    for &block in want.iter().filter(|&&b| b != NONE) {
        leaves[block as usize] = true;
        wanted += 1;
    }
    // Free and wanted by nobody; free and wanted; wanted, but held by a block without a place of its own.
    let (mut spare, mut ready, mut in_the_way) = (Queue::default(), Queue::default(), Vec::new());
    let free = cells.iter().filter(|&&c| c == Cell::Free).count();
    spare.reserve(free + 1);
    ready.reserve(free + 1);
    for (c, (&block, &cell)) in want.iter().zip(cells).enumerate() {
        let (wanted, free) = (block != NONE, cell == Cell::Free);
        spare.push_if(c as u32, free & !wanted);
        ready.push_if(c as u32, free & wanted);
        if wanted && cell == Cell::Movable && !leaves[c] {
            in_the_way.push(c as u32);
        }
    }
    if wanted + in_the_way.len() > budget {
        return None;
    }
    let mut moves = Moves::default();
    moves.src.reserve(wanted + in_the_way.len());
    moves.dst.reserve(wanted + in_the_way.len());
    let mut next = Queue::default();
    let mut used = 0; // of `spare`
    let mut driven_out = 0; // of `in_the_way`
    let mut ring_cursor = 0;
    loop {
        let spares = spare.len; // those vacated in this round are written in the next one at the earliest
        next.reserve(ready.len + in_the_way.len() - driven_out);
        spare.reserve(ready.len);
        for &c in ready.as_slice() {
            let from = std::mem::replace(&mut want[c as usize], NONE);
            moves.push(from, c);
            let wanted = want[from as usize] != NONE;
            next.push_if(from, wanted);
            spare.push_if(from, !wanted);
        }
        while driven_out < in_the_way.len() && used < spares {
            let block = in_the_way[driven_out];
            moves.push(block, spare.items[used]);
            next.push_if(block, true);
            driven_out += 1;
            used += 1;
        }
        if next.len == 0 && spare.len == spares {
            if driven_out < in_the_way.len() {
                return None;
            }
            let parks = &spare.as_slice()[used..];
            for opened in break_rings(&mut want, &mut ring_cursor, parks, &mut moves) {
                next.reserve(1);
                next.push_if(opened, true);
                used += 1;
            }
            if next.len == 0 {
                return (ring_cursor == want.len() && moves.src.len() <= budget).then_some(moves);
            }
        }
        moves.end_round();
        ready.len = 0;
        std::mem::swap(&mut ready, &mut next);
    }
}

/// A list to which an item is added without a branch: on a scattered pool every such branch is a coin toss.
#[derive(Default)]
struct Queue {
    items: Vec<u32>,
    len: usize,
}

impl Queue {
    /// Room for `more` items, and one more that is written but not kept.
    fn reserve(&mut self, more: usize) {
        let room = self.len + more + 1;
        if self.items.len() < room {
            self.items.resize(room.max(2 * self.items.len()), 0);
        }
    }

    fn push_if(&mut self, item: u32, keep: bool) {
        self.items[self.len] = item;
        self.len += usize::from(keep);
    }

    fn as_slice(&self) -> &[u32] {
        &self.items[..self.len]
    }
}

/// Opens as many rings as there are `parks`, free blocks: the content of the lowest block of the ring is parked, and
/// what wanted it wants the parked copy from now on. Returns the blocks that were opened.
fn break_rings(want: &mut [u32], cursor: &mut usize, parks: &[u32], moves: &mut Moves) -> Vec<u32> {
    let mut seen = std::collections::HashSet::new();
    let mut next = Vec::new();
    while *cursor < want.len() {
        if want[*cursor] == NONE || seen.contains(cursor) {
            *cursor += 1;
            continue;
        }
        let Some(&park) = parks.get(next.len()) else {
            break;
        };
        let opened = *cursor as u32;
        moves.push(opened, park);
        next.push(opened);
        let mut c = opened;
        loop {
            seen.insert(c as usize);
            let from = want[c as usize];
            if from == opened {
                want[c as usize] = park;
                break;
            }
            c = from;
        }
        *cursor += 1;
    }
    next
}

/// Rounds for moves that were found one after the other: each goes into the first round in which its source has
/// arrived and its destination has been vacated before. Order within a round stays. O(blocks + moves).
pub(super) fn schedule(num_blocks: usize, list: &[(u32, u32)]) -> Moves {
    let mut arrived = vec![0u32; num_blocks];
    let mut vacated = vec![0u32; num_blocks];
    let mut round_of = Vec::with_capacity(list.len());
    let mut last = 0;
    for &(s, d) in list {
        let round = 1 + arrived[s as usize].max(vacated[d as usize]);
        vacated[s as usize] = round;
        arrived[d as usize] = round;
        last = last.max(round);
        round_of.push(round);
    }
    let mut start = vec![0usize; last as usize + 2];
    for &round in &round_of {
        start[round as usize + 1] += 1;
    }
    for i in 1..start.len() {
        start[i] += start[i - 1];
    }
    let mut order = vec![0u32; list.len()];
    let mut slot = start.clone();
    for (i, &round) in round_of.iter().enumerate() {
        order[slot[round as usize]] = i as u32;
        slot[round as usize] += 1;
    }
    let mut moves = Moves::default();
    for round in 1..=last as usize {
        for &i in &order[start[round]..start[round + 1]] {
            let (s, d) = list[i as usize];
            moves.push(s, d);
        }
        moves.end_round();
    }
    moves
}
