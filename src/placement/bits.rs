//! A set of block ids as a bitmap of several levels: each bit of a level says whether a word below has any bit set.

/// Set of `u32` ids below a fixed bound. All operations are O(levels), three for a pool of 2^18 blocks.
#[derive(Clone, Debug)]
pub struct BitSet {
    levels: Vec<Vec<u64>>,
    len: usize,
}

impl BitSet {
    /// An empty set over ids `0..bound`.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = bound.div_ceil(64).max(1);
        loop {
            levels.push(vec![0u64; words]);
            if words == 1 {
                break;
            }
            words = words.div_ceil(64);
        }
        Self { levels, len: 0 }
    }

    /// Number of ids in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the set has no id.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `id` is in the set. Ids out of range are not.
    #[inline]
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.levels[0].get(id as usize >> 6).is_some_and(|word| word >> (id & 63) & 1 == 1)
    }

    /// The 64 ids from `word * 64` on, lowest in the lowest bit.
    #[inline]
    #[must_use]
    pub fn word(&self, word: usize) -> u64 {
        self.levels[0][word]
    }

    /// Adds one id; returns whether it was new.
    #[inline]
    pub fn insert(&mut self, id: u32) -> bool {
        let mut at = id as usize;
        for (depth, level) in self.levels.iter_mut().enumerate() {
            let word = &mut level[at >> 6];
            let before = *word;
            *word |= 1 << (at & 63);
            if depth == 0 && *word == before {
                return false;
            }
            if before != 0 {
                break;
            }
            at >>= 6;
        }
        self.len += 1;
        true
    }

    /// Removes one id; returns whether it was there.
    #[inline]
    pub fn remove(&mut self, id: u32) -> bool {
        let mut at = id as usize;
        for (depth, level) in self.levels.iter_mut().enumerate() {
            let word = &mut level[at >> 6];
            let before = *word;
            *word &= !(1 << (at & 63));
            if depth == 0 && *word == before {
                return false;
            }
            if *word != 0 {
                break;
            }
            at >>= 6;
        }
        self.len -= 1;
        true
    }

    /// Adds `start..start + len`, none of which is in the set.
    pub fn insert_range(&mut self, start: u32, len: u32) {
        self.change_range(start, len, true);
    }

    /// Removes `start..start + len`, all of which are in the set.
    pub fn remove_range(&mut self, start: u32, len: u32) {
        self.change_range(start, len, false);
    }

    /// Removes whatever of `start..start + len` is in the set.
    pub fn clear_range(&mut self, start: u32, len: u32) {
        if len == 0 || self.len == 0 {
            return;
        }
        let (first, last) = (start as usize >> 6, (start + len - 1) as usize >> 6);
        for word in first..=last {
            let before = self.levels[0][word];
            if before == 0 {
                continue;
            }
            let low = if word == first { start & 63 } else { 0 };
            let high = if word == last { (start + len - 1) & 63 } else { 63 };
            let after = before & !((u64::MAX >> (63 - high)) & (u64::MAX << low));
            self.len -= (before.count_ones() - after.count_ones()) as usize;
            self.levels[0][word] = after;
            if before != 0 && after == 0 {
                self.change_above(word, false);
            }
        }
    }

    fn change_range(&mut self, start: u32, len: u32, set: bool) {
        if len == 0 {
            return;
        }
        let (first, last) = (start as usize >> 6, (start + len - 1) as usize >> 6);
        if first == last {
            let mask = (u64::MAX >> (64 - len)) << (start & 63);
            let word = &mut self.levels[0][first];
            let before = *word;
            let after = if set { before | mask } else { before & !mask };
            *word = after;
            if (before == 0) != (after == 0) {
                self.change_above(first, set);
            }
            self.len = if set { self.len + len as usize } else { self.len - len as usize };
            return;
        }
        for word in first..=last {
            let low = if word == first { start & 63 } else { 0 };
            let high = if word == last { (start + len - 1) & 63 } else { 63 };
            let mask = (u64::MAX >> (63 - high)) & (u64::MAX << low);
            let before = self.levels[0][word];
            let after = if set { before | mask } else { before & !mask };
            self.levels[0][word] = after;
            if (before == 0) != (after == 0) {
                self.change_above(word, set);
            }
        }
        if set {
            self.len += len as usize;
        } else {
            self.len -= len as usize;
        }
    }

    fn change_above(&mut self, mut at: usize, set: bool) {
        for level in &mut self.levels[1..] {
            let word = &mut level[at >> 6];
            let before = *word;
            if set {
                *word |= 1 << (at & 63);
                if before != 0 {
                    return;
                }
            } else {
                *word &= !(1 << (at & 63));
                if *word != 0 {
                    return;
                }
            }
            at >>= 6;
        }
    }

    /// Lowest id that is at least `from`.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        let mut depth = 0;
        loop {
            let level = self.levels.get(depth)?;
            let word = level.get(at >> 6)?;
            let rest = word & (u64::MAX << (at & 63));
            if rest != 0 {
                at = (at & !63) | rest.trailing_zeros() as usize;
                while depth > 0 {
                    depth -= 1;
                    at = (at << 6) | self.levels[depth][at].trailing_zeros() as usize;
                }
                return Some(at as u32);
            }
            at = (at >> 6) + 1;
            depth += 1;
        }
    }

    /// Highest id that is at most `from`.
    #[must_use]
    pub fn previous(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        let mut depth = 0;
        loop {
            let level = self.levels.get(depth)?;
            if at >> 6 >= level.len() {
                at = level.len() * 64 - 1;
            }
            let rest = level[at >> 6] & (u64::MAX >> (63 - (at & 63)));
            if rest != 0 {
                at = (at & !63) | (63 - rest.leading_zeros() as usize);
                while depth > 0 {
                    depth -= 1;
                    at = (at << 6) | (63 - self.levels[depth][at].leading_zeros() as usize);
                }
                return Some(at as u32);
            }
            if at >> 6 == 0 {
                return None;
            }
            at = (at >> 6) - 1;
            depth += 1;
        }
    }

    /// All ids, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = Some(0);
        std::iter::from_fn(move || {
            let id = self.next(from?)?;
            from = id.checked_add(1);
            Some(id)
        })
    }
}
