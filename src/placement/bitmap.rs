//! `bitmap`: hands out runs, and keeps room for sequences to grow into.
//!
//! What makes runs is not the search alone (measured on real traffic, see `benches/`):
//!
//! * **Gap.** Behind the last block of every sequence a few free blocks stay soft-reserved. Growth takes them one by
//!   one; others take them only when nothing else is left. The gap shrinks with the pool: what is left over is shared
//!   out among the sequences that grow (as ext4's reservation windows are).
//! * **Slack.** Best fit needs runs to choose from. Some of the oldest cached blocks are candidates beside the clean
//!   ones ([`Placement::slack`]); they stay findable until one is really handed out.
//! * **Scraps for growth, large runs for prompts.** A sequence that cannot grow in place moves to a small fragment
//!   that is big enough, so that the growth of many does not cut up the long runs that prompts need.

use super::runs::Run;
use super::{BitSet, Hint, Placement, RunIndex, for_each_stretch};
use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Room behind a new sequence, in blocks: a share (1/n) of what is left per growing sequence, between these bounds.
const PROMPT_ROOM: Room = Room { share: 12, least: 8, most: 32 };
/// Room behind a sequence that moved on to a new fragment.
const GROWTH_ROOM: Room = Room { share: 4, least: 4, most: 12 };
/// How many fragments, ever larger, growth looks at for one that is in no other sequence's way.
const FRAGMENTS_TRIED: usize = 6;
/// Slack: all that is left while that is at most 1/`CROWDED` of the pool, else at most 1/`SLACK_SHARE` of it. Where
/// little is left nearly all of it goes soon, and its order matters less than its shape.
const CROWDED: usize = 6;
const SLACK_SHARE: usize = 40;

struct Room {
    share: usize,
    least: usize,
    most: usize,
}

/// Run-preferring placement.
#[derive(Debug)]
pub struct Bitmap {
    /// Free blocks in nobody's gap.
    runs: RunIndex,
    /// `gap[b]`: how many free blocks behind the handed-out block `b` are kept for its sequence.
    gap: Vec<u32>,
    /// Blocks with a gap behind them.
    owners: BitSet,
    gap_blocks: usize,
    /// Handed-out blocks behind which a sequence may grow.
    tails: BitSet,
    bound: u32,
}

impl Bitmap {
    /// An empty placement over ids `0..num_blocks`.
    #[must_use]
    pub fn new(num_blocks: usize) -> Self {
        Self {
            runs: RunIndex::new(num_blocks),
            gap: vec![0; num_blocks],
            owners: BitSet::new(num_blocks),
            gap_blocks: 0,
            tails: BitSet::new(num_blocks),
            bound: num_blocks as u32,
        }
    }

    /// Blocks one sequence may keep to itself: its share of what is left.
    fn room(&self, hint: Hint, room: &Room) -> usize {
        (hint.left / (self.tails.len() + 1) / room.share).clamp(room.least, room.most)
    }

    /// Gives the room behind `owner` back to everybody.
    fn end_gap(&mut self, owner: u32) {
        let len = std::mem::take(&mut self.gap[owner as usize]);
        if len > 0 {
            self.owners.remove(owner);
            self.gap_blocks -= len as usize;
            self.runs.insert(owner + 1, len);
        }
    }

    /// Keeps up to `room` free blocks behind `owner`; any gap it had is ended first.
    fn start_gap(&mut self, owner: u32, room: usize) {
        let whole = self.runs.run_at(owner + 1);
        let len = whole.min(room as u32);
        if len > 0 {
            self.runs.remove_front(Run { start: owner + 1, len: whole }, len);
            self.gap[owner as usize] = len;
            self.owners.insert(owner);
            self.gap_blocks += len as usize;
        }
    }

    /// The block whose gap holds `id`, if any.
    fn gap_owner(&self, id: u32) -> Option<u32> {
        let owner = self.owners.previous(id.checked_sub(1)?)?;
        (id <= owner + self.gap[owner as usize]).then_some(owner)
    }

    /// Whether a gap ends right where the run starts.
    fn is_behind_gap(&self, run: Run) -> bool {
        run.start.checked_sub(1).is_some_and(|id| self.gap_owner(id).is_some())
    }

    /// Takes the first `len` blocks of a run.
    fn take_front(&mut self, run: Run, len: u32, out: &mut Vec<BlockId>) {
        self.runs.remove_front(run, len);
        out.extend((run.start..run.start + len).map(BlockId));
    }

    /// Takes `start..start + len` of the indexed runs.
    fn grab(&mut self, start: u32, len: u32, out: &mut Vec<BlockId>) {
        self.runs.remove(start, len);
        out.extend((start..start + len).map(BlockId));
    }

    /// A gap with whatever free run follows it: `(owner, gap, gap + following run)`.
    fn gap_runs(&self) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
        self.owners.iter().map(|owner| {
            let gap = self.gap[owner as usize];
            (owner, gap, gap + self.runs.run_at(owner + 1 + gap))
        })
    }

    /// Takes `len` blocks from the far end of a gap and the run behind it.
    fn take_far_end(&mut self, owner: u32, whole: u32, len: u32, out: &mut Vec<BlockId>) {
        self.end_gap(owner);
        let near = whole - len;
        self.grab(owner + 1 + near, len, out);
        self.start_gap(owner, near as usize);
    }

    /// The smallest fragment of at least `least` blocks, if possible one that no sequence would grow into.
    fn fragment(&self, least: u32) -> Option<Run> {
        let mut want = least;
        for _ in 0..FRAGMENTS_TRIED {
            let run = self.runs.best_fit(want)?;
            let before = run.start.checked_sub(1);
            if before.is_none_or(|id| !self.tails.contains(id) && self.gap_owner(id).is_none()) {
                return Some(run);
            }
            want = run.len + 1;
        }
        None
    }

    /// One block for a sequence that cannot grow in place.
    fn take_for_growth(&mut self, room: usize, out: &mut Vec<BlockId>) {
        let least = (room / 2).max(1) as u32;
        let fragment = self.fragment(least).or_else(|| self.runs.best_fit(least)).or_else(|| self.runs.largest());
        if let Some(run) = fragment {
            self.take_front(run, 1, out);
            return;
        }
        // Only gaps are left: the middle of the largest, so that both can go on for a while.
        let widest = self.gap_runs().max_by_key(|&(owner, _, whole)| (whole, std::cmp::Reverse(owner)));
        if let Some((owner, gap, _)) = widest {
            let near = gap / 2;
            self.end_gap(owner);
            self.grab(owner + 1 + near, 1, out);
            self.start_gap(owner, near as usize);
        }
    }

    /// `need` blocks in as few runs as the free space allows.
    fn take_for_prompt(&mut self, mut need: u32, room: usize, out: &mut Vec<BlockId>) {
        // Longest gap with its run; looked up when it may matter, and anew when one was used.
        let mut widest = None;
        while need > 0 {
            let Some(largest) = self.runs.largest() else {
                self.take_from_gaps(need, out);
                return;
            };
            if largest.len >= need {
                let roomy = self.runs.best_fit(need.saturating_add(room as u32));
                self.take_front(roomy.unwrap_or(largest), need, out);
                return;
            }
            // A long gap may be worth more than what is left of the unreserved runs.
            let worth = |widest: u32| u64::from(largest.len) * 4 < u64::from(widest.min(need)) * 3;
            if worth(need) {
                let whole =
                    *widest.get_or_insert_with(|| self.gap_runs().map(|(_, _, whole)| whole).max().unwrap_or(0));
                if worth(whole) {
                    need -= self.take_from_one_gap(need, out);
                    widest = None;
                    continue;
                }
            }
            if widest.is_some_and(|whole| whole > 0) && self.is_behind_gap(largest) {
                widest = None;
            }
            self.take_front(largest, largest.len, out);
            need -= largest.len;
        }
    }

    /// The smallest gap run that covers `need`, else the largest. Returns how many blocks were taken.
    fn take_from_one_gap(&mut self, need: u32, out: &mut Vec<BlockId>) -> u32 {
        let fitting = self.gap_runs().filter(|&(_, _, whole)| whole >= need);
        let chosen = fitting
            .min_by_key(|&(owner, _, whole)| (whole, owner))
            .or_else(|| self.gap_runs().max_by_key(|&(owner, _, whole)| (whole, std::cmp::Reverse(owner))));
        let Some((owner, _, whole)) = chosen else { return need };
        let len = whole.min(need);
        self.take_far_end(owner, whole, len, out);
        len
    }

    fn take_from_gaps(&mut self, mut need: u32, out: &mut Vec<BlockId>) {
        while need > 0 && self.gap_blocks > 0 {
            need -= self.take_from_one_gap(need, out);
        }
    }

    /// The blocks directly behind `after`: its own gap, then whatever is free behind that.
    fn take_behind(&mut self, after: u32, need: u32, out: &mut Vec<BlockId>) -> u32 {
        self.end_gap(after);
        let whole = self.runs.run_at(after + 1);
        let len = whole.min(need);
        if len > 0 {
            self.take_front(Run { start: after + 1, len: whole }, len, out);
        }
        len
    }

    fn leave_room(&mut self, out: &[BlockId], room: usize) {
        if let Some(last) = out.last() {
            self.tails.insert(last.0);
            self.start_gap(last.0, room);
        }
    }
}

impl Placement for Bitmap {
    fn name(&self) -> &'static str {
        "bitmap"
    }

    fn len(&self) -> usize {
        self.runs.len() + self.gap_blocks
    }

    fn insert(&mut self, ids: &[BlockId]) {
        for_each_stretch(ids, |start, len| self.runs.insert(start, len));
    }

    fn remove(&mut self, id: BlockId) {
        if !self.runs.contains(id.0)
            && let Some(owner) = self.gap_owner(id.0)
        {
            let near = id.0 - owner - 1;
            self.end_gap(owner);
            self.runs.remove(id.0, 1);
            self.start_gap(owner, near as usize);
            return;
        }
        self.runs.remove(id.0, 1);
    }

    fn take(&mut self, n: usize, hint: Hint, out: &mut Vec<BlockId>) {
        let (mut need, at) = (n as u32, out.len());
        if need == 0 {
            return;
        }
        if let Some(BlockId(after)) = hint.after {
            self.tails.remove(after);
            let gap = self.gap[after as usize];
            if n == 1 && gap > 1 {
                // Growth in place, the common case: the gap moves along without being searched again.
                self.gap[after as usize] = 0;
                self.gap[after as usize + 1] = gap - 1;
                self.owners.remove(after);
                self.owners.insert(after + 1);
                self.gap_blocks -= 1;
                self.tails.insert(after + 1);
                out.push(BlockId(after + 1));
                return;
            }
            need -= self.take_behind(after, need, out);
        }
        let growing = n == 1 && hint.after.is_some();
        let room = self.room(hint, if growing { &GROWTH_ROOM } else { &PROMPT_ROOM });
        if need > 0 {
            if growing {
                self.take_for_growth(room, out);
            } else {
                self.take_for_prompt(need, room, out);
            }
        }
        if !hint.fixed {
            self.leave_room(&out[at..], room);
        }
    }

    fn largest_run(&self) -> usize {
        let widest = self.gap_runs().map(|(_, _, whole)| whole).max().unwrap_or(0);
        self.runs.largest().map_or(0, |run| run.len).max(widest) as usize
    }

    fn order(&self) -> Vec<BlockId> {
        let kept = self.owners.iter().flat_map(|owner| owner + 1..=owner + self.gap[owner as usize]);
        self.runs.iter().chain(kept).map(BlockId).collect()
    }

    fn released(&mut self, ids: &[BlockId]) {
        for_each_stretch(ids, |start, len| {
            self.tails.clear_range(start, len);
            // A gap lies behind a block that was handed out, so inside a stretch there is none.
            self.end_gap(start + len - 1);
        });
    }

    fn give(&mut self, ids: &[BlockId]) {
        for_each_stretch(ids, |start, len| {
            self.tails.clear_range(start, len);
            self.end_gap(start + len - 1);
            self.runs.insert(start, len);
        });
    }

    fn slack(&self, n: usize, left: usize) -> usize {
        let bound = self.bound as usize;
        let choice = if left <= bound / CROWDED { left } else { left.min(bound / SLACK_SHARE) };
        if n == 1 { choice } else { choice + self.gap_blocks }
    }

    fn validate(&self) -> Result<()> {
        self.runs.validate()?;
        let mut blocks = 0;
        for owner in self.owners.iter() {
            let len = self.gap[owner as usize];
            let inside = owner + 1..=owner + len;
            if len == 0 || owner + len >= self.bound || self.runs.contains(owner) {
                return Err(Error::corrupt(format!("bitmap: gap of {len} behind block {owner}")));
            }
            if inside.clone().any(|id| self.runs.contains(id) || self.gap[id as usize] > 0) {
                return Err(Error::corrupt(format!("bitmap: gap behind block {owner} overlaps another")));
            }
            blocks += len as usize;
        }
        let with_gap = self.gap.iter().filter(|&&len| len > 0).count();
        if blocks != self.gap_blocks || with_gap != self.owners.len() {
            return Err(Error::corrupt("bitmap: the count of gap blocks is off"));
        }
        if let Some(id) = self.tails.iter().find(|&id| self.runs.contains(id)) {
            return Err(Error::corrupt(format!("bitmap: block {id} is free and the tail of a sequence")));
        }
        Ok(())
    }
}
