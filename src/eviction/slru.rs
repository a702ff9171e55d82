//! `slru`: a scan-resistant segmented LRU. Segments by hits, weighted by reuse, with probes of what was never hit.
//!
//! LRU gives every sequence the same life, though most prompts never return and a few return again and again; one
//! long scan of new prompts empties it of conversations. Here, time being counted in evictions:
//!
//! * **Segments.** Blocks pushed together stay together. Their class is their mean number of hits; the class whose
//!   oldest segment has the largest age / weight gives the next victim, the weight being 1 + 2 * mean hits (frequency
//!   over age as in LFU-DA, Arlitt et al. 2000, but a FIFO per class as in SLRU, Karedla et al. 1994: O(1)).
//! * **Probes.** Of a sequence never hit only the [`PROBE`] blocks nearest its start stay; the rest is evicted first. A
//!   sequence that returns hits its probe, and is kept whole by its class from then on.
//! * **Branches.** What a hit leaves of its segment (the old continuation, where a conversation went on elsewhere) is
//!   evicted early too.
//! * **Control.** A share of the sequences never hit is kept whole where the probes show that it pays: they return
//!   soon, and bring more hits per block and time than the older half of what is protected.
//! * **Cold start.** Exactly [`super::Lru`] until [`WARM_UP`] pools were evicted: short runs never do worse than that.

use super::Eviction;
use crate::error::{Error, Result};
use crate::ids::BlockId;

const NONE: u32 = u32::MAX;

/// Blocks kept of a sequence never hit; also the unit of [`Segment::scale`].
const PROBE: usize = 16;
/// Cold start, in pools of evictions.
const WARM_UP: u64 = 6;
/// Hits counted per block.
const HIT_CAP: u8 = 8;
/// Queue 0 is evicted first, queue 1 holds what was never hit, the others what was, by mean hits per block.
const QUEUES: usize = 8;
/// Upper bound of the mean hits per block in queues 1.., in quarters of a hit. The last one is [`HIT_CAP`].
const CLASS_BOUND: [u64; QUEUES - 1] = [0, 1, 2, 4, 8, 16, 32];
/// How long each queue lives: 1 + 2 * (the middle of its class), in quarters. Queue 0 has no use for it.
const WEIGHT: [u64; QUEUES] = [4, 4, 5, 7, 10, 16, 28, 52];

/// Control steps per pool of evictions.
const STEPS_PER_POOL: u64 = 8;
/// [`Slru::keep`] that keeps every sequence whole; a control step changes it by 1.
const KEEP_ALL: u32 = 32;
/// What a control step leaves of the counters.
const DECAY: f64 = 1.0 - 1.0 / 64.0;
/// Evidence counts from this many control steps' worth of block-time.
const EVIDENCE: f64 = 2.0;
/// How much denser than the protected content's the hits of content never hit must be for it to be kept whole.
const DENSER: f64 = 1.25;
/// Share of the returns that must come within one LRU life for that.
const SOON: f64 = 0.5;

/// Neighbours in a list; `NONE` at its ends.
#[derive(Copy, Clone, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

/// One of many doubly linked lists that share an array of links; each id is in one at most.
#[derive(Copy, Clone, Debug)]
struct List {
    head: u32,
    tail: u32,
}

impl List {
    const EMPTY: Self = Self { head: NONE, tail: NONE };

    /// Puts `id` between `link.previous` and `link.next`, neighbours in this list.
    fn link(&mut self, links: &mut [Link], id: u32, link: Link) {
        match links.get_mut(link.previous as usize) {
            Some(previous) => previous.next = id,
            None => self.head = id,
        }
        match links.get_mut(link.next as usize) {
            Some(next) => next.previous = id,
            None => self.tail = id,
        }
        links[id as usize] = link;
    }

    fn push_front(&mut self, links: &mut [Link], id: u32) {
        self.link(links, id, Link { previous: NONE, next: self.head });
    }

    fn push_back(&mut self, links: &mut [Link], id: u32) {
        self.link(links, id, Link { previous: self.tail, next: NONE });
    }

    fn remove(&mut self, links: &mut [Link], id: u32) {
        let Link { previous, next } = links[id as usize];
        match links.get_mut(previous as usize) {
            Some(previous) => previous.next = next,
            None => self.head = next,
        }
        match links.get_mut(next as usize) {
            Some(next) => next.previous = previous,
            None => self.tail = previous,
        }
    }

    fn iter(self, links: &[Link]) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((self.head != NONE).then_some(self.head), |&id| {
            let next = links.get(id as usize)?.next;
            (next != NONE).then_some(next)
        })
    }

    /// Whether every link and the tail fit, and no id is met after `most` of them.
    fn is_sound(self, links: &[Link], most: usize) -> bool {
        let (mut before, mut seen) = (NONE, 0);
        for id in self.iter(links) {
            if links.get(id as usize).is_none_or(|link| link.previous != before) || seen == most {
                return false;
            }
            (before, seen) = (id, seen + 1);
        }
        self.tail == before
    }
}

/// Blocks that became evictable together, next victim first. In one queue while it has any.
#[derive(Copy, Clone, Debug)]
struct Segment {
    blocks: List,
    len: u32,
    queue: u8,
    /// The queue it was made for; [`Segment::queue`] is 0 once a hit left it behind.
    class: u8,
    /// How many blocks each block stands for, in 1 / [`PROBE`]: more than one in a probe.
    scale: u32,
    /// Evictions before it was pushed.
    born: u64,
    /// Pushes before it was pushed.
    order: u64,
}

/// Hits, and the block-time (blocks * evictions) in which they came.
///
/// Sums of products of large counts, decayed: floating point, of which only `+ * /` are used, so that every machine
/// gets the same bits.
#[derive(Copy, Clone, Debug, Default)]
struct Rate {
    hits: f64,
    time: f64,
}

impl Rate {
    fn get(self) -> f64 {
        if self.time > 0.0 { self.hits / self.time } else { 0.0 }
    }

    fn decay(&mut self) {
        self.hits *= DECAY;
        self.time *= DECAY;
    }
}

/// What the control goes by.
#[derive(Copy, Clone, Debug, Default)]
struct Evidence {
    /// Content never hit, within one life; a probe stands for its whole sequence.
    fresh: Rate,
    /// Content that was hit, in the older half of its life: what room for fresh sequences would cost.
    protected: Rate,
    /// Hits of content never hit: those within one LRU life over all.
    soon: Rate,
    /// Block-time of content that was hit.
    hit_time: f64,
}

/// The policy; see the module's text. `push`, `pop`, `remove` and `hit` are O(1) per block and allocate only when
/// there are more segments than ever before; memory is O(num_blocks).
#[derive(Debug)]
pub struct Slru {
    /// Per block: its neighbours in its segment; the segment, `NONE` when not evictable; hits up to [`HIT_CAP`].
    links: Vec<Link>,
    segment_of: Vec<u32>,
    hits: Vec<u8>,
    /// Segments and their neighbours in their queue. Those in `spare` are empty.
    segments: Vec<Segment>,
    segment_links: Vec<Link>,
    spare: Vec<u32>,
    queues: [List; QUEUES],
    /// The segment that gives victims, a queue's head; `NONE` when it is to be chosen anew.
    victim: u32,
    /// The block removed by the last call, and what was its segment: a hit that follows is a hit of an evictable block.
    removed: Option<(BlockId, u32, Segment)>,
    len: usize,
    /// Evictions so far: the time.
    now: u64,
    pushes: u64,
    /// End of the cold start.
    warm: u64,
    next_step: u64,
    /// Share of the sequences never hit that are kept whole, in 1 / [`KEEP_ALL`], and what is owed to them.
    keep: u32,
    owed: u32,
    /// Age at which weight 1 is evicted now.
    life: u64,
    evidence: Evidence,
}

impl Slru {
    /// An empty set over ids `0..num_blocks`, none hit so far.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self {
            links: vec![Link { previous: NONE, next: NONE }; num_blocks],
            segment_of: vec![NONE; num_blocks],
            hits: vec![0; num_blocks],
            segments: Vec::new(),
            segment_links: Vec::new(),
            spare: Vec::new(),
            queues: [List::EMPTY; QUEUES],
            victim: NONE,
            removed: None,
            len: 0,
            now: 0,
            pushes: 0,
            warm: WARM_UP * num_blocks as u64,
            next_step: 0,
            keep: 0,
            owed: 0,
            life: 0,
            evidence: Evidence::default(),
        }
    }

    /// Makes `ids` a segment at the back (or the front) of a queue.
    fn add(&mut self, ids: &[BlockId], queue: usize, to_front: bool, scale: usize) {
        if ids.is_empty() {
            return; // the rest of a sequence that is all probe
        }
        let s = self.spare.pop().unwrap_or(self.segments.len() as u32);
        let mut blocks = List::EMPTY;
        for id in ids {
            debug_assert!(self.segment_of[id.index()] == NONE);
            self.segment_of[id.index()] = s;
            blocks.push_back(&mut self.links, id.0);
        }
        let segment = Segment {
            blocks,
            len: ids.len() as u32,
            queue: queue as u8,
            class: queue as u8,
            scale: scale as u32,
            born: self.now,
            order: self.pushes,
        };
        if let Some(slot) = self.segments.get_mut(s as usize) {
            *slot = segment;
        } else {
            self.segments.push(segment);
            self.segment_links.push(Link { previous: NONE, next: NONE });
        }
        let list = &mut self.queues[queue];
        if to_front {
            list.push_front(&mut self.segment_links, s);
        } else {
            list.push_back(&mut self.segment_links, s);
        }
        self.len += ids.len();
    }

    /// Takes a block out of its segment, and an empty segment out of its queue; the segment and what is left of it.
    fn take_out(&mut self, id: BlockId) -> Option<(u32, Segment)> {
        let s = std::mem::replace(&mut self.segment_of[id.index()], NONE);
        let segment = self.segments.get_mut(s as usize)?;
        segment.blocks.remove(&mut self.links, id.0);
        segment.len -= 1;
        self.len -= 1;
        if segment.len == 0 {
            self.queues[usize::from(segment.queue)].remove(&mut self.segment_links, s);
            self.spare.push(s);
            if self.victim == s {
                self.victim = NONE;
            }
        }
        Some((s, *segment))
    }

    /// The segment to evict from at time `now`, if these are the heads of the queues.
    fn choose(&self, heads: &[u32; QUEUES], now: u64) -> Option<u32> {
        let heads = || heads.iter().enumerate().filter_map(|(q, &s)| Some((q, s, self.segments.get(s as usize)?)));
        if now < self.warm {
            return heads().min_by_key(|(_, _, segment)| segment.order).map(|(_, s, _)| s);
        }
        let mut best: Option<(u64, u64, u32)> = None;
        for (q, s, segment) in heads() {
            if q == 0 {
                return Some(s);
            }
            let (age, weight) = (now - segment.born + 1, WEIGHT[q]);
            // age / weight > best age / best weight
            if best.is_none_or(|(a, w, _)| age.saturating_mul(w) > a.saturating_mul(weight)) {
                best = Some((age, weight, s));
            }
        }
        best.map(|(_, _, s)| s)
    }

    /// A block left its segment, by a hit or as a victim.
    fn observe(&mut self, segment: &Segment, hit: bool) {
        let age = self.now - segment.born;
        let seen = &mut self.evidence;
        match segment.class {
            0 => {}
            1 => {
                let scale = f64::from(segment.scale) / PROBE as f64;
                seen.fresh.time += age.min(self.life) as f64 * scale;
                if hit {
                    seen.fresh.hits += if age <= self.life { scale } else { 0.0 };
                    seen.soon.hits += if age <= self.len as u64 { scale } else { 0.0 };
                    seen.soon.time += scale;
                }
            }
            class => {
                seen.hit_time += age as f64;
                let half_life = WEIGHT[usize::from(class)] * self.life / 8;
                if age > half_life {
                    seen.protected.time += (age - half_life) as f64;
                    seen.protected.hits += if hit { 1.0 } else { 0.0 };
                }
            }
        }
    }

    /// Decides whether more or fewer of the sequences never hit are kept whole.
    fn control(&mut self) {
        let period = (self.links.len() as u64 / STEPS_PER_POOL).max(1);
        self.next_step = self.now + period;
        let oldest =
            |q: usize| Some((self.now - self.segments.get(self.queues[q].head as usize)?.born) * 4 / WEIGHT[q]);
        self.life = (1..QUEUES).filter_map(oldest).max().unwrap_or(0);
        let seen = &mut self.evidence;
        if self.now < self.warm {
            *seen = Evidence::default();
            return;
        }
        let enough = EVIDENCE * self.len as f64 * period as f64;
        if seen.fresh.time >= enough && seen.hit_time >= enough {
            // A pool that is mostly in use cannot hold fresh sequences until they return.
            let roomy = 2 * self.len >= self.links.len();
            let pays = seen.soon.get() >= SOON && seen.fresh.get() > DENSER * seen.protected.get();
            self.keep = if roomy && pays { (self.keep + 1).min(KEEP_ALL) } else { self.keep.saturating_sub(1) };
        }
        seen.fresh.decay();
        seen.protected.decay();
        seen.soon.decay();
        seen.hit_time *= DECAY;
    }
}

impl Eviction for Slru {
    fn name(&self) -> &'static str {
        "slru"
    }

    fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, ids: &[BlockId]) {
        if ids.is_empty() {
            return;
        }
        self.removed = None;
        self.victim = NONE;
        self.pushes += 1;
        let (n, hits) = (ids.len() as u64, ids.iter().map(|id| u64::from(self.hits[id.index()])).sum::<u64>());
        let class = CLASS_BOUND.iter().position(|bound| 4 * hits <= bound * n).map_or(QUEUES - 1, |i| i + 1);
        if class == 1 && self.now >= self.warm {
            self.owed += self.keep;
            if self.owed < KEEP_ALL {
                let (rest, probe) = ids.split_at(ids.len().saturating_sub(PROBE));
                self.add(rest, 0, true, PROBE);
                self.add(probe, 1, false, ids.len().max(PROBE));
                return;
            }
            self.owed -= KEEP_ALL;
        }
        self.add(ids, class, false, PROBE);
    }

    fn pop(&mut self) -> Option<BlockId> {
        self.removed = None;
        if self.now >= self.next_step {
            self.control();
        }
        if self.victim == NONE {
            self.victim = self.choose(&self.queues.map(|list| list.head), self.now)?;
        }
        let id = BlockId(self.segments.get(self.victim as usize)?.blocks.head);
        let (_, segment) = self.take_out(id)?;
        self.observe(&segment, false);
        self.now += 1;
        Some(id)
    }

    fn next(&self) -> Option<BlockId> {
        let chosen = || self.choose(&self.queues.map(|list| list.head), self.now);
        let victim = if self.victim == NONE { chosen()? } else { self.victim };
        Some(BlockId(self.segments.get(victim as usize)?.blocks.head))
    }

    fn remove(&mut self, id: BlockId) {
        self.removed = self.take_out(id).map(|(s, segment)| (id, s, segment));
    }

    fn hit(&mut self, id: BlockId) {
        let hits = &mut self.hits[id.index()];
        *hits = (*hits + 1).min(HIT_CAP);
        let Some((_, s, segment)) = self.removed.take().filter(|removed| removed.0 == id) else { return };
        self.observe(&segment, true);
        if segment.len > 0 && segment.queue != 0 && self.now >= self.warm {
            self.queues[usize::from(segment.queue)].remove(&mut self.segment_links, s);
            self.queues[0].push_back(&mut self.segment_links, s);
            self.segments[s as usize].queue = 0;
            self.victim = NONE;
        }
    }

    fn forget(&mut self, id: BlockId) {
        self.removed = None;
        self.hits[id.index()] = 0;
    }

    fn remap(&mut self, from: BlockId, to: BlockId) {
        self.removed = None;
        self.hits[to.index()] = std::mem::take(&mut self.hits[from.index()]);
        let s = std::mem::replace(&mut self.segment_of[from.index()], NONE);
        self.segment_of[to.index()] = s;
        if let Some(segment) = self.segments.get_mut(s as usize) {
            let link = self.links[from.index()];
            segment.blocks.link(&mut self.links, to.0, link);
        }
    }

    fn order(&self) -> Vec<BlockId> {
        let (mut heads, mut order) = (self.queues.map(|list| list.head), Vec::with_capacity(self.len));
        let mut victim = (self.victim != NONE).then_some(self.victim);
        while let Some(s) = victim.or_else(|| self.choose(&heads, self.now + order.len() as u64)) {
            let segment = &self.segments[s as usize];
            order.extend(segment.blocks.iter(&self.links).map(BlockId));
            heads[usize::from(segment.queue)] = self.segment_links[s as usize].next;
            victim = None;
        }
        order
    }

    fn validate(&self) -> Result<()> {
        let corrupt = |what: String| Err(Error::corrupt(format!("slru: {what}")));
        let (mut segments, mut blocks) = (0, 0);
        for (q, list) in self.queues.iter().enumerate() {
            if !list.is_sound(&self.segment_links, self.segments.len()) {
                return corrupt(format!("broken link in queue {q}"));
            }
            for s in list.iter(&self.segment_links) {
                let segment = &self.segments[s as usize];
                let sound = segment.blocks.is_sound(&self.links, segment.len as usize);
                let ids = || segment.blocks.iter(&self.links);
                if !sound || segment.len == 0 || ids().count() != segment.len as usize {
                    return corrupt(format!("segment {s} is not the list of {} blocks it says", segment.len));
                }
                if usize::from(segment.queue) != q || ids().any(|id| self.segment_of[id as usize] != s) {
                    return corrupt(format!("segment {s} in queue {q} is filed elsewhere"));
                }
                (segments, blocks) = (segments + 1, blocks + ids().count());
            }
        }
        let filed = self.segment_of.iter().filter(|&&s| s != NONE).count();
        if (blocks, filed) != (self.len, self.len) || segments + self.spare.len() != self.segments.len() {
            return corrupt(format!("{blocks} blocks in queues and {filed} filed, the count says {}", self.len));
        }
        let is_head = |victim: &Segment| self.queues[usize::from(victim.queue)].head == self.victim;
        match self.segments.get(self.victim as usize) {
            Some(victim) if !is_head(victim) => corrupt(format!("victim {} is not a head", self.victim)),
            _ => Ok(()),
        }
    }
}
