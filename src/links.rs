//! A doubly linked list of block ids in two flat arrays: O(1) at both ends and in the middle, no allocation.

const NONE: u32 = u32::MAX;
const OUT: u32 = u32::MAX - 1;

/// List over ids `0..bound`; each id is in it at most once.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    next: Vec<u32>,
    previous: Vec<u32>,
    head: u32,
    tail: u32,
    len: usize,
}

impl Links {
    pub(crate) fn new(bound: usize) -> Self {
        Self { next: vec![OUT; bound], previous: vec![OUT; bound], head: NONE, tail: NONE, len: 0 }
    }

    pub(crate) fn bound(&self) -> u32 {
        self.next.len() as u32
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.next.get(id as usize).is_some_and(|&next| next != OUT)
    }

    pub(crate) fn front(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    #[inline]
    pub(crate) fn push_front(&mut self, id: u32) {
        debug_assert!(!self.contains(id));
        self.next[id as usize] = self.head;
        self.previous[id as usize] = NONE;
        if self.head == NONE {
            self.tail = id;
        } else {
            self.previous[self.head as usize] = id;
        }
        self.head = id;
        self.len += 1;
    }

    #[inline]
    pub(crate) fn push_back(&mut self, id: u32) {
        debug_assert!(!self.contains(id));
        self.previous[id as usize] = self.tail;
        self.next[id as usize] = NONE;
        if self.tail == NONE {
            self.head = id;
        } else {
            self.next[self.tail as usize] = id;
        }
        self.tail = id;
        self.len += 1;
    }

    #[inline]
    pub(crate) fn remove(&mut self, id: u32) {
        debug_assert!(self.contains(id));
        let (previous, next) = (self.previous[id as usize], self.next[id as usize]);
        if previous == NONE {
            self.head = next;
        } else {
            self.next[previous as usize] = next;
        }
        if next == NONE {
            self.tail = previous;
        } else {
            self.previous[next as usize] = previous;
        }
        self.next[id as usize] = OUT;
        self.previous[id as usize] = OUT;
        self.len -= 1;
    }

    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<u32> {
        let id = self.front()?;
        self.remove(id);
        Some(id)
    }

    /// `to` (not in the list) takes the place of `from` (in the list).
    pub(crate) fn replace(&mut self, from: u32, to: u32) {
        let (previous, next) = (self.previous[from as usize], self.next[from as usize]);
        self.previous[to as usize] = previous;
        self.next[to as usize] = next;
        if previous == NONE {
            self.head = to;
        } else {
            self.next[previous as usize] = to;
        }
        if next == NONE {
            self.tail = to;
        } else {
            self.previous[next as usize] = to;
        }
        self.next[from as usize] = OUT;
        self.previous[from as usize] = OUT;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.head;
        std::iter::from_fn(move || {
            if at == NONE {
                return None;
            }
            let id = at;
            at = self.next[id as usize];
            Some(id)
        })
    }

    pub(crate) fn validate(&self) -> Result<(), String> {
        let (mut seen, mut before, mut at) = (0usize, NONE, self.head);
        while at != NONE {
            if at as usize >= self.next.len() || self.previous[at as usize] != before {
                return Err(format!("broken link at block {at}"));
            }
            seen += 1;
            if seen > self.len {
                return Err("the list is longer than its count".into());
            }
            before = at;
            at = self.next[at as usize];
        }
        if seen != self.len || self.tail != before {
            return Err(format!("{seen} blocks are linked, the count says {}", self.len));
        }
        Ok(())
    }
}
