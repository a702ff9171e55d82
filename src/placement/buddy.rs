//! `buddy`: power-of-two blocks, split and merged with their buddies (Knowlton 1965), for any pool size.
//!
//! A pool that is no power of two starts as the largest aligned pieces that fit. A request takes the smallest piece
//! that covers it and gives the tail back at once, so nothing is rounded up; a request larger than every piece is
//! gathered from the largest ones, so one for the whole empty pool succeeds.

use super::{BitSet, Hint, Placement, for_each_stretch, longest_stretch};
use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Binary buddy system over ids `0..num_blocks`.
#[derive(Debug)]
pub struct Buddy {
    /// `orders[k]`: numbers (start >> k) of the free pieces of 2^k blocks.
    orders: Vec<BitSet>,
    free: BitSet,
    bound: u32,
}

impl Buddy {
    /// An empty system over ids `0..num_blocks`.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        let top = num_blocks.max(1).ilog2();
        Self {
            orders: (0..=top).map(|order| BitSet::new((num_blocks >> order) + 1)).collect(),
            free: BitSet::new(num_blocks),
            bound: num_blocks as u32,
        }
    }

    fn top(&self) -> u32 {
        self.orders.len() as u32 - 1
    }

    /// Frees one piece and merges it with its buddy as long as that is free and whole.
    fn merge(&mut self, start: u32, mut order: u32) {
        let mut number = start >> order;
        while order < self.top() && self.orders[order as usize].remove(number ^ 1) {
            number >>= 1;
            order += 1;
        }
        self.orders[order as usize].insert(number);
    }

    /// Frees any stretch as aligned pieces.
    fn give(&mut self, mut start: u32, mut len: u32) {
        self.free.insert_range(start, len);
        while len > 0 {
            let fits = len.ilog2();
            let order = if start == 0 { fits } else { fits.min(start.trailing_zeros()) }.min(self.top());
            self.merge(start, order);
            start += 1 << order;
            len -= 1 << order;
        }
    }

    /// The free piece that holds `id`: `(start, order)`.
    fn piece_around(&self, id: u32) -> Option<(u32, u32)> {
        (0..=self.top()).find(|&k| self.orders[k as usize].contains(id >> k)).map(|k| ((id >> k) << k, k))
    }

    /// Takes a piece out of the free ones.
    fn take_piece(&mut self, start: u32, order: u32) {
        self.orders[order as usize].remove(start >> order);
        self.free.remove_range(start, 1 << order);
    }

    /// Takes `len` blocks from `start` on, inside one free piece; the rest of the piece goes back.
    fn carve(&mut self, piece: (u32, u32), start: u32, len: u32, out: &mut Vec<BlockId>) {
        let (low, order) = piece;
        self.take_piece(low, order);
        let end = low + (1 << order);
        self.give(low, start - low);
        self.give(start + len, end - (start + len));
        out.extend((start..start + len).map(BlockId));
    }

    /// The lowest piece of the smallest order that covers `need`.
    fn covering(&self, need: u32) -> Option<(u32, u32)> {
        let least = need.max(1).next_power_of_two().trailing_zeros();
        (least..=self.top()).find_map(|k| self.orders[k as usize].next(0).map(|number| (number << k, k)))
    }

    /// The lowest piece of the largest order.
    fn largest_piece(&self) -> Option<(u32, u32)> {
        (0..=self.top()).rev().find_map(|k| self.orders[k as usize].next(0).map(|number| (number << k, k)))
    }

    fn take_stretch(&mut self, mut start: u32, mut len: u32, out: &mut Vec<BlockId>) {
        while len > 0 {
            let Some((low, order)) = self.piece_around(start) else { return };
            let part = (low + (1 << order) - start).min(len);
            self.carve((low, order), start, part, out);
            start += part;
            len -= part;
        }
    }
}

impl Placement for Buddy {
    fn name(&self) -> &'static str {
        "buddy"
    }

    fn len(&self) -> usize {
        self.free.len()
    }

    fn insert(&mut self, ids: &[BlockId]) {
        for_each_stretch(ids, |start, len| self.give(start, len));
    }

    fn remove(&mut self, id: BlockId) {
        self.take_stretch(id.0, 1, &mut Vec::with_capacity(1));
    }

    fn take(&mut self, n: usize, hint: Hint, out: &mut Vec<BlockId>) {
        let mut need = n as u32;
        if let Some(BlockId(after)) = hint.after {
            while need > 0 && self.free.contains(after + 1 + (n as u32 - need)) {
                self.take_stretch(after + 1 + (n as u32 - need), 1, out);
                need -= 1;
            }
        }
        while need > 0 {
            let Some(piece) = self.covering(need).or_else(|| self.largest_piece()) else { return };
            let len = need.min(1 << piece.1);
            self.carve(piece, piece.0, len, out);
            need -= len;
        }
    }

    fn largest_run(&self) -> usize {
        longest_stretch(|id| self.free.contains(id), self.bound)
    }

    fn order(&self) -> Vec<BlockId> {
        let pieces = (0..=self.top())
            .flat_map(|k| self.orders[k as usize].iter().flat_map(move |number| (number << k)..((number + 1) << k)));
        pieces.map(BlockId).collect()
    }

    fn validate(&self) -> Result<()> {
        let mut covered = BitSet::new(self.bound as usize);
        for k in 0..=self.top() {
            for number in self.orders[k as usize].iter() {
                let (start, end) = (number << k, (number + 1) << k);
                if end > self.bound || (start..end).any(|id| !self.free.contains(id) || !covered.insert(id)) {
                    return Err(Error::corrupt(format!("buddy: piece of 2^{k} at block {start}")));
                }
                let buddy = number ^ 1;
                if k < self.top() && buddy > number && self.orders[k as usize].contains(buddy) {
                    return Err(Error::corrupt(format!("buddy: pieces of 2^{k} at {start} not merged")));
                }
            }
        }
        if covered.len() == self.free.len() {
            Ok(())
        } else {
            Err(Error::corrupt("buddy: free blocks outside every piece"))
        }
    }
}
