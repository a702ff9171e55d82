//! `FreeBlocks`: every block that may be handed out, clean or cached; one placement and one eviction joined.
//!
//! It knows neither reference counts nor hashes, so that an engine which owns those can use it in place of its free
//! queue. Blocks it hands out are the caller's until they are given back.

use crate::error::{Error, Result, Shortage};
use crate::eviction::{self, Eviction, Retention};
use crate::ids::BlockId;
use crate::placement::{self, BitSet, Hint, Placement};

/// Where a block is, seen from the set of blocks that may be handed out.
#[repr(u8)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Handed out.
    Out,
    /// Nothing in it; the placement has it.
    Clean,
    /// Content worth keeping; the eviction has it.
    Cached,
    /// Content worth keeping, given up by the eviction: the placement may choose it. Still findable until it does.
    Candidate,
}

/// How a request for blocks is to be served.
#[derive(Copy, Clone, Debug, Default)]
pub struct Request {
    /// The caller's last block: growth continues behind it where it can.
    pub after: Option<BlockId>,
    /// All blocks must form one run, directly behind `after` if that is given.
    pub contiguous: bool,
    /// The caller will not grow behind these blocks: no room is kept there, and nothing is evicted early for them.
    pub fixed: bool,
}

/// Blocks that may be handed out.
#[derive(Debug)]
pub struct FreeBlocks {
    placement: Box<dyn Placement>,
    eviction: Retention,
    place: Vec<Place>,
    clean: usize,
    candidates: usize,
    evictions: u64,
    nominated: Vec<BlockId>,
    /// When a block became a candidate, in nominations; of no meaning for others.
    since: Vec<u64>,
    nominations: u64,
    /// Whether the placement may ask for more candidates than it needs.
    early: bool,
}

impl FreeBlocks {
    /// All of `0..num_blocks` are clean.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown policy, no blocks, or more than 2^31.
    pub fn new(num_blocks: usize, placement: &str, eviction: &str, seed: u64) -> Result<Self> {
        if num_blocks == 0 || num_blocks > 1 << 31 {
            return Err(Error::invalid("num_blocks", num_blocks, "must be between 1 and 2^31"));
        }
        crate::pool::check_memory(num_blocks, 64)?;
        let mut placement = placement::by_name(placement, num_blocks)?;
        let eviction = eviction::by_name(eviction, num_blocks, seed)?;
        let all: Vec<BlockId> = (0..num_blocks as u32).map(BlockId).collect();
        placement.insert(&all);
        Ok(Self {
            placement,
            eviction: Retention::new(eviction, num_blocks),
            place: vec![Place::Clean; num_blocks],
            clean: num_blocks,
            candidates: 0,
            evictions: 0,
            nominated: Vec::new(),
            since: vec![0; num_blocks],
            nominations: 0,
            early: true,
        })
    }

    /// Number of blocks that may be handed out.
    #[must_use]
    pub fn len(&self) -> usize {
        self.clean + self.num_cached()
    }

    /// Whether nothing can be handed out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the pool: ids are below this.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.place.len()
    }

    /// Number of clean blocks.
    #[must_use]
    pub fn num_clean(&self) -> usize {
        self.clean
    }

    /// Number of cached blocks.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.candidates + self.eviction.len()
    }

    /// Cached blocks handed out for something else so far.
    #[must_use]
    pub fn num_evictions(&self) -> u64 {
        self.evictions
    }

    /// Name of the placement.
    #[must_use]
    pub fn placement(&self) -> &'static str {
        self.placement.name()
    }

    /// Name of the eviction policy.
    #[must_use]
    pub fn eviction(&self) -> &'static str {
        self.eviction.name()
    }

    /// Where every block is, by id.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.place
    }

    /// Where the block is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id out of range.
    pub fn place_of(&self, id: BlockId) -> Result<Place> {
        self.place.get(id.index()).copied().ok_or_else(|| self.out_of_range(id))
    }

    fn out_of_range(&self, id: BlockId) -> Error {
        Error::invalid("block", id, format!("must be below num_blocks = {}", self.place.len()))
    }

    /// Whether the block holds content and may be handed out.
    #[must_use]
    pub fn is_cached(&self, id: BlockId) -> bool {
        matches!(self.place.get(id.index()), Some(Place::Cached | Place::Candidate))
    }

    /// Longest run of blocks that may be handed out now, clean or cached. O(number of blocks).
    #[must_use]
    pub fn largest_run(&self) -> usize {
        self.longest(|place| place != Place::Out)
    }

    /// Longest run of clean blocks. O(number of blocks).
    #[must_use]
    pub fn largest_clean_run(&self) -> usize {
        self.longest(|place| place == Place::Clean)
    }

    /// Longest stretch of blocks whose place counts, 64 at a time where all or none do.
    fn longest(&self, counts: impl Fn(Place) -> bool) -> usize {
        let (mut best, mut run) = (0, 0);
        for chunk in self.place.chunks(64) {
            let many = chunk.iter().fold(0u8, |many, &place| many + u8::from(counts(place)));
            if usize::from(many) == chunk.len() {
                run += chunk.len();
            } else if many == 0 {
                best = best.max(run);
                run = 0;
            } else {
                for &place in chunk {
                    run = if counts(place) { run + 1 } else { 0 };
                    best = best.max(run);
                }
            }
        }
        best.max(run)
    }

    /// The numbers of a refusal.
    #[must_use]
    pub fn shortage(&self, required: usize, reserved: usize) -> Shortage {
        Shortage { required, free: self.clean, cached: self.num_cached(), reserved, largest_run: self.largest_run() }
    }

    /// Start of the best place for one run of `n` blocks outside `excluded`: the fewest cached blocks lost, then the
    /// tightest fit, then the lowest id. With `after` only the place directly behind it is looked at; otherwise
    /// O(number of blocks).
    #[must_use]
    pub fn find_run(&self, n: usize, after: Option<BlockId>, excluded: &BitSet) -> Option<BlockId> {
        let bound = self.place.len();
        let usable = |i: usize| self.place[i] != Place::Out && !excluded.contains(i as u32);
        if let Some(after) = after {
            let start = after.index() + 1;
            let fits = start + n <= bound && (start..start + n).all(usable);
            return fits.then_some(BlockId(start as u32));
        }
        let mut best: Option<(usize, usize, usize)> = None;
        let mut low = 0;
        while low < bound {
            if !usable(low) {
                low += 1;
                continue;
            }
            let high = (low..bound).find(|&i| !usable(i)).unwrap_or(bound);
            let lost = |i: usize| usize::from(self.place[i] != Place::Clean);
            if high - low >= n {
                let mut cached: usize = (low..low + n).map(lost).sum();
                for start in low..=high - n {
                    let candidate = (cached, high - low, start);
                    if best.is_none_or(|best| candidate < best) {
                        best = Some(candidate);
                    }
                    if start + n < high {
                        cached = cached + lost(start + n) - lost(start);
                    }
                }
            }
            low = high;
        }
        best.map(|(_, _, start)| BlockId(start as u32))
    }

    /// Hands out exactly `start..start + n`, evicting what is cached there; appended to `out`, lost content to
    /// `evicted`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when one of them is handed out already; nothing is changed then.
    pub fn take_exactly(
        &mut self,
        start: BlockId,
        n: usize,
        out: &mut Vec<BlockId>,
        evicted: &mut Vec<BlockId>,
    ) -> Result<()> {
        let ids = (start.0..start.0 + n as u32).map(BlockId);
        for id in ids.clone() {
            if self.place_of(id)? == Place::Out {
                return Err(Error::invalid("block", id, "is handed out already"));
            }
        }
        for id in ids {
            if self.is_cached(id) {
                evicted.push(id);
                self.evictions += 1;
            }
            self.extract(id)?;
            self.eviction.forget(id);
            out.push(id);
        }
        Ok(())
    }

    /// Hands out `n` blocks, appended to `out` in table order, evicting as needed. Blocks whose content is lost by that
    /// are appended to `evicted`.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] when there are fewer, or no run long enough where the request is contiguous;
    /// [`Error::InvalidArgument`] for an `after` that is not handed out.
    pub fn take(
        &mut self,
        n: usize,
        request: Request,
        out: &mut Vec<BlockId>,
        evicted: &mut Vec<BlockId>,
    ) -> Result<()> {
        if let Some(after) = request.after
            && self.place_of(after)? != Place::Out
        {
            return Err(Error::invalid("after", after, "must be a block that is handed out"));
        }
        if n > self.len() {
            return Err(Error::OutOfBlocks { what: "this request".into(), shortage: self.shortage(n, 0) });
        }
        if request.contiguous && n > 0 {
            let Some(start) = self.find_run(n, request.after, &BitSet::new(0)) else {
                let what = format!("this request for one run of {n} blocks");
                return Err(Error::OutOfBlocks { what, shortage: self.shortage(n, 0) });
            };
            return self.take_exactly(start, n, out, evicted);
        }
        let at = out.len();
        let hint = Hint { after: request.after, left: self.len() - n, fixed: request.fixed };
        self.choose(n, hint, out);
        let (mut clean, mut lost) = (0, evicted.len());
        for &id in &out[at..] {
            match std::mem::replace(&mut self.place[id.index()], Place::Out) {
                Place::Clean => clean += 1,
                Place::Candidate => evicted.push(id),
                Place::Cached | Place::Out => {
                    return Err(Error::corrupt(format!("block {id} was handed out twice")));
                }
            }
        }
        self.clean -= clean;
        if evicted.len() > lost {
            self.eviction.forget_all(&evicted[lost..]);
            lost = evicted.len() - lost;
            self.candidates -= lost;
            self.evictions += lost as u64;
        }
        Ok(())
    }

    fn choose(&mut self, n: usize, hint: Hint, out: &mut Vec<BlockId>) {
        if self.placement.mixes_victims() {
            let slack = if hint.fixed || !self.early { 0 } else { self.placement.slack(n, hint.left) };
            self.nominate(n, n + slack);
            self.placement.take(n, hint, out);
        } else {
            let clean = n.min(self.placement.len());
            self.placement.take(clean, hint, out);
            for _ in clean..n {
                if let Some(id) = self.eviction.pop() {
                    self.place[id.index()] = Place::Candidate;
                    self.candidates += 1;
                    out.push(id);
                }
            }
        }
    }

    /// Victims become candidates until the placement can choose among `wanted` blocks; those beyond `needed` only
    /// where nobody watches or retains them.
    fn nominate(&mut self, needed: usize, wanted: usize) {
        if self.placement.len() >= wanted {
            return;
        }
        let mut nominated = std::mem::take(&mut self.nominated);
        nominated.clear();
        for have in self.placement.len()..wanted {
            let victim = if have < needed { self.eviction.pop() } else { self.eviction.pop_early() };
            let Some(id) = victim else { break };
            self.place[id.index()] = Place::Candidate;
            self.since[id.index()] = self.nominations;
            self.nominations += 1;
            nominated.push(id);
        }
        // At once, so that a sequence's runs are merged as runs.
        self.placement.insert(&nominated);
        self.candidates += nominated.len();
        self.nominated = nominated;
    }

    /// Takes this very block out, because its content was hit.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it is not there to be taken.
    pub fn remove(&mut self, id: BlockId) -> Result<()> {
        self.extract(id)?;
        self.eviction.hit(id);
        Ok(())
    }

    /// Takes this very block out without counting a hit.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it is not there to be taken.
    pub fn extract(&mut self, id: BlockId) -> Result<()> {
        match self.place_of(id)? {
            Place::Out => return Err(Error::invalid("block", id, "is handed out already")),
            Place::Clean => {
                self.clean -= 1;
                self.placement.remove(id);
            }
            Place::Candidate => {
                self.candidates -= 1;
                self.placement.remove(id);
            }
            Place::Cached => self.eviction.remove(id),
        }
        self.place[id.index()] = Place::Out;
        Ok(())
    }

    /// A block in use was hit once more.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id out of range.
    pub fn touch(&mut self, id: BlockId) -> Result<()> {
        self.place_of(id)?;
        self.eviction.hit(id);
        Ok(())
    }

    /// Blocks that were handed out are somewhere else now, all or none.
    fn mark(&mut self, ids: &[BlockId], place: Place) -> Result<()> {
        let highest = ids.iter().fold(0, |highest, id| highest.max(id.0));
        let places = self.place.as_mut_slice();
        if highest as usize >= places.len() {
            return Err(self.out_of_range(BlockId(highest)));
        }
        for (i, &id) in ids.iter().enumerate() {
            let now = &mut places[id.index()];
            if *now != Place::Out {
                for undo in &ids[..i] {
                    places[undo.index()] = Place::Out;
                }
                return Err(Error::DoubleFree { block: id });
            }
            *now = place;
        }
        Ok(())
    }

    /// Blocks come back with nothing in them. Under `queue` the first is the first to go again.
    ///
    /// # Errors
    /// [`Error::DoubleFree`] when one is not handed out; nothing is changed then.
    pub fn give_clean(&mut self, ids: &[BlockId]) -> Result<()> {
        self.mark(ids, Place::Clean)?;
        self.eviction.forget_all(ids);
        self.placement.give(ids);
        self.clean += ids.len();
        Ok(())
    }

    /// Blocks of one sequence come back with content worth keeping, evict-first order (its tail first).
    ///
    /// # Errors
    /// [`Error::DoubleFree`] when one is not handed out; nothing is changed then.
    pub fn give_cached(&mut self, ids: &[BlockId]) -> Result<()> {
        self.mark(ids, Place::Cached)?;
        self.placement.released(ids);
        self.eviction.push(ids);
        Ok(())
    }

    /// Makes up to `n` cached blocks clean, next victims first; they are appended to `evicted`.
    pub fn evict(&mut self, n: usize, evicted: &mut Vec<BlockId>) {
        let at = evicted.len();
        evicted.extend(self.candidates_by_age().into_iter().take(n));
        for &id in &evicted[at..] {
            self.candidates -= 1;
            self.place[id.index()] = Place::Clean;
        }
        while evicted.len() - at < n {
            let Some(id) = self.eviction.pop() else { break };
            self.place[id.index()] = Place::Clean;
            self.placement.insert(&[id]);
            evicted.push(id);
        }
        for &id in &evicted[at..] {
            self.eviction.forget(id);
        }
        self.clean += evicted.len() - at;
        self.evictions += (evicted.len() - at) as u64;
    }

    /// The content of a cached block is void: it becomes clean.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the block is not cached.
    pub fn make_clean(&mut self, id: BlockId) -> Result<()> {
        match self.place_of(id)? {
            Place::Candidate => self.candidates -= 1,
            Place::Cached => {
                self.eviction.remove(id);
                self.placement.insert(&[id]);
            }
            Place::Clean | Place::Out => return Err(Error::invalid("block", id, "is not cached")),
        }
        self.eviction.forget(id);
        self.place[id.index()] = Place::Clean;
        self.clean += 1;
        Ok(())
    }

    /// The content of `from` (in use or cached) was moved to the clean block `to`; `from` becomes clean.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `from` is clean or `to` is not.
    pub fn relocate(&mut self, from: BlockId, to: BlockId) -> Result<()> {
        if self.place_of(to)? != Place::Clean {
            return Err(Error::invalid("destination", to, "must be a clean block"));
        }
        let place = self.place_of(from)?;
        match place {
            Place::Clean => return Err(Error::invalid("source", from, "is clean: nothing to move")),
            // Candidates stay in the placement: the two ids change roles.
            Place::Candidate => {}
            Place::Out | Place::Cached => {
                self.placement.remove(to);
                if place == Place::Out {
                    self.placement.released(&[from]);
                }
                self.placement.insert(&[from]);
            }
        }
        self.eviction.remap(from, to);
        self.since[to.index()] = self.since[from.index()];
        self.place[to.index()] = place;
        self.place[from.index()] = Place::Clean;
        Ok(())
    }

    /// Retains the content of a block that is cached or in use; see [`Retention::retain`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id out of range or a clean block.
    pub fn retain(&mut self, id: BlockId, priority: u8, until: u64) -> Result<()> {
        match self.place_of(id)? {
            // What it holds next is other content.
            Place::Clean => return Err(Error::invalid("block", id, "is clean: nothing to retain")),
            Place::Candidate => {
                self.placement.remove(id);
                self.candidates -= 1;
                self.place[id.index()] = Place::Cached;
                self.eviction.push(&[id]);
            }
            Place::Cached | Place::Out => {}
        }
        let evictable = self.place[id.index()] == Place::Cached;
        self.eviction.retain(id, priority, until, evictable);
        Ok(())
    }

    /// Somebody still wants this cached block: until it is hit or handed out it is evicted in its turn, never early.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the block is not cached, or a candidate already.
    pub fn watch(&mut self, id: BlockId) -> Result<()> {
        if self.place_of(id)? != Place::Cached {
            return Err(Error::invalid("block", id, "is not cached"));
        }
        self.eviction.watch(id);
        Ok(())
    }

    /// Whether cached blocks may be evicted before they are needed, so that there are runs to choose from (the
    /// default). If not, hand-out follows the eviction order to the block.
    pub fn set_early(&mut self, early: bool) {
        self.early = early;
    }

    /// The content of all cached blocks is void: they become clean.
    pub fn clear(&mut self) {
        let mut cleared = Vec::new();
        let evictions = self.evictions;
        self.evict(usize::MAX, &mut cleared);
        self.evictions = evictions;
    }

    /// Whether the clock matters to anything retained.
    #[must_use]
    pub fn needs_clock(&self) -> bool {
        self.eviction.needs_clock()
    }

    /// The clock in milliseconds.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.eviction.now()
    }

    /// Sets the clock, never backwards.
    pub fn set_now(&mut self, now: u64) {
        self.eviction.set_now(now);
    }

    /// Tells a clairvoyant policy when the block's content is needed next; `false` when the policy does not use it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id out of range.
    pub fn set_next_use(&mut self, id: BlockId, next_use: u64) -> Result<bool> {
        self.place_of(id)?;
        Ok(self.eviction.set_next_use(id, next_use))
    }

    /// Candidates, first nominated first.
    fn candidates_by_age(&self) -> Vec<BlockId> {
        if self.candidates == 0 {
            return Vec::new();
        }
        let mut candidates = self.placement.order();
        candidates.retain(|id| self.place[id.index()] == Place::Candidate);
        candidates.sort_unstable_by_key(|id| self.since[id.index()]);
        candidates
    }

    /// Ids in hand-out order as things stand: clean blocks, then cached ones, next victim first.
    #[must_use]
    pub fn order(&self) -> Vec<BlockId> {
        let mut order = self.placement.order();
        order.retain(|id| self.place[id.index()] == Place::Clean);
        order.extend(self.candidates_by_age());
        order.extend(self.eviction.order());
        order
    }

    /// Checks that placement, eviction and the places of all blocks agree.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first broken invariant.
    pub fn validate(&self) -> Result<()> {
        self.placement.validate()?;
        self.eviction.validate()?;
        let mut seen = vec![Place::Out; self.place.len()];
        for id in self.placement.order() {
            seen[id.index()] = if self.place[id.index()] == Place::Candidate { Place::Candidate } else { Place::Clean };
        }
        for id in self.eviction.order() {
            if seen[id.index()] != Place::Out {
                return Err(Error::corrupt(format!("block {id} is in the placement and in the eviction")));
            }
            seen[id.index()] = Place::Cached;
        }
        if let Some(i) = (0..seen.len()).find(|&i| seen[i] != self.place[i]) {
            let (is, says) = (seen[i], self.place[i]);
            return Err(Error::corrupt(format!("block {i} is {is:?} but its place says {says:?}")));
        }
        let count = |want| self.place.iter().filter(|&&place| place == want).count();
        if count(Place::Clean) != self.clean
            || count(Place::Candidate) != self.candidates
            || count(Place::Cached) != self.eviction.len()
            || self.placement.len() != self.clean + self.candidates
        {
            return Err(Error::corrupt("counts of clean and cached blocks are off"));
        }
        Ok(())
    }
}
