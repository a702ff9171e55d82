//! One bit per block: a million blocks fit the second-level cache, and free stretches are found a word at a time.

use super::Cell;

/// Marked blocks; bits from `len` on are never set.
#[derive(Clone)]
pub(super) struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    /// Nothing marked.
    pub(super) fn none(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(64)], len }
    }

    /// The free blocks of a pool.
    pub(super) fn free(cells: &[Cell]) -> Self {
        let words = cells
            .chunks(64)
            .map(|chunk| {
                let (eights, rest) = chunk.as_chunks::<8>();
                let mut word = 0;
                for (i, eight) in eights.iter().enumerate() {
                    // Movable is 1 and Fixed is 2: bit 0 of a byte is clear when neither bit is set.
                    let bytes = u64::from_le_bytes(eight.map(|c| c as u8));
                    let held = (bytes | bytes >> 1) & 0x0101_0101_0101_0101;
                    // Gathers bit 0 of every byte into the top byte, lowest first.
                    let held = held.wrapping_mul(0x0102_0408_1020_4080) >> 56;
                    word |= (held ^ 0xFF) << (8 * i);
                }
                for (i, &cell) in rest.iter().enumerate() {
                    word |= u64::from(cell == Cell::Free) << (8 * eights.len() + i);
                }
                word
            })
            .collect();
        Self { words, len: cells.len() }
    }

    pub(super) fn get(&self, i: usize) -> bool {
        self.words[i / 64] >> (i % 64) & 1 != 0
    }

    pub(super) fn set(&mut self, i: usize) {
        self.words[i / 64] |= 1 << (i % 64);
    }

    pub(super) fn clear(&mut self, i: usize) {
        self.words[i / 64] &= !(1 << (i % 64));
    }

    /// Clears `from..to`.
    pub(super) fn clear_range(&mut self, from: usize, to: usize) {
        let mut i = from;
        while i < to {
            let end = to.min((i / 64 + 1) * 64);
            let mask = u64::MAX >> (64 - (end - i)) << (i % 64);
            self.words[i / 64] &= !mask;
            i = end;
        }
    }

    /// How many are marked.
    pub(super) fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// How many in `from..to` are marked.
    pub(super) fn count_range(&self, from: usize, to: usize) -> usize {
        let mut count = 0;
        let mut i = from;
        while i < to {
            let end = to.min((i / 64 + 1) * 64);
            let word = self.words[i / 64] >> (i % 64) << (64 - (end - i));
            count += word.count_ones() as usize;
            i = end;
        }
        count
    }

    /// First index from `i` on whose bit is `on`, at most `to`.
    fn next(&self, i: usize, to: usize, on: bool) -> usize {
        let flip = if on { 0 } else { u64::MAX };
        let mut w = i / 64;
        let Some(&word) = self.words.get(w).filter(|_| i < to) else {
            return to;
        };
        let mut word = (word ^ flip) & (u64::MAX << (i % 64));
        while word == 0 {
            w += 1;
            if w * 64 >= to {
                return to;
            }
            word = self.words[w] ^ flip;
        }
        to.min(w * 64 + word.trailing_zeros() as usize)
    }

    /// Maximal stretches `(start, len)` of marked (`on`) or unmarked blocks in `from..to`, ascending, added to `out`.
    pub(super) fn stretches(&self, from: usize, to: usize, on: bool, out: &mut Vec<(u32, u32)>) {
        let to = to.min(self.len);
        let mut start = self.next(from, to, on);
        while start < to {
            let end = self.next(start, to, !on);
            out.push((start as u32, (end - start) as u32));
            start = self.next(end, to, on);
        }
    }

    /// Longest stretch of marked blocks. Only places where a longer one than the best so far could end are looked
    /// at, so most blocks of a scattered pool are not.
    pub(super) fn longest(&self) -> usize {
        let mut best = 0;
        let mut start = 0;
        'next: while start + best < self.len {
            // A longer one from `start` on covers all of `start..=start + best`.
            for i in (start..=start + best).rev() {
                if !self.get(i) {
                    start = i + 1;
                    continue 'next;
                }
            }
            let end = self.next(start + best, self.len, false);
            best = end - start;
            start = end + 1;
        }
        best
    }
}
