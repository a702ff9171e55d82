//! Free stretches by length: the smallest that is long enough is used first, so long ones stay whole.

use std::collections::BTreeMap;

use super::Moves;

/// Lengths up to this have a bucket of their own and one bit in a mask; longer ones are rare and live in a map.
const SMALL: usize = 64;

/// Best-fit index of free stretches. [`Holes::take`] is O(1) for short ones and O(log distinct lengths) for long.
#[derive(Default)]
pub(super) struct Holes {
    small: Vec<Vec<u32>>,
    mask: u64,
    large: BTreeMap<u32, Vec<u32>>,
}

impl Holes {
    /// From `(start, len)` in ascending order; of equal lengths the lowest start is used first.
    pub(super) fn new(stretches: &[(u32, u32)]) -> Self {
        let mut holes = Self { small: vec![Vec::new(); SMALL], ..Self::default() };
        for &(start, len) in stretches.iter().rev() {
            holes.put(start, len);
        }
        holes
    }

    fn put(&mut self, start: u32, len: u32) {
        match (len as usize).checked_sub(1) {
            None => {}
            Some(i) if i < SMALL => {
                self.small[i].push(start);
                self.mask |= 1 << i;
            }
            Some(_) => self.large.entry(len).or_default().push(start),
        }
    }

    /// Takes the stretch of exactly `len` that is listed for it, out of the index.
    fn pop(&mut self, len: u32) -> Option<u32> {
        let i = (len as usize).checked_sub(1)?;
        if i < SMALL {
            let start = self.small[i].pop();
            if self.small[i].is_empty() {
                self.mask &= !(1 << i);
            }
            return start;
        }
        let starts = self.large.get_mut(&len)?;
        let start = starts.pop();
        if starts.is_empty() {
            self.large.remove(&len);
        }
        start
    }

    /// Start of `len` free blocks cut from the smallest stretch that has them; the rest goes back.
    pub(super) fn take(&mut self, len: u32) -> Option<u32> {
        let i = (len as usize).checked_sub(1)?;
        let fits = if i < SMALL { self.mask & (u64::MAX << i) } else { 0 };
        let found = if fits != 0 { fits.trailing_zeros() + 1 } else { *self.large.range(len..).next()?.0 };
        let start = self.pop(found)?;
        self.put(start + len, found - len);
        Some(start)
    }

    /// The longest stretch, `(start, len)`, taken whole.
    pub(super) fn take_longest(&mut self) -> Option<(u32, u32)> {
        let len = match self.large.keys().next_back() {
            Some(&len) => len,
            None => u64::BITS - self.mask.leading_zeros(),
        };
        Some((self.pop(len)?, len))
    }

    /// Moves neighbouring blocks `start..start + len` into holes, together where a hole takes them all and else in
    /// as few parts as the longest holes allow. `false`, with the moves of what still fitted, when the holes run out.
    pub(super) fn fill(&mut self, start: u32, len: u32, moves: &mut Moves) -> bool {
        let mut done = 0;
        while done < len {
            let left = len - done;
            let (to, n) = match self.take(left) {
                Some(to) => (to, left),
                None => match self.take_longest() {
                    Some(hole) => hole,
                    None => return false,
                },
            };
            for i in 0..n {
                moves.push(start + done + i, to + i);
            }
            done += n;
        }
        true
    }
}
