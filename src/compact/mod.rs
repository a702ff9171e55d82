//! Plans of block moves: what to copy where, what it costs and what it gains.
//!
//! A planner reads a picture of the pool and returns a [`Plan`]; it never changes anything. Three objectives:
//!
//! | objective | what it makes | moves |
//! |---|---|---|
//! | [`plan_pages`] | the most empty pages | provably the fewest |
//! | [`plan_largest_run`] | one run of `n` free blocks | provably the fewest |
//! | [`plan_runs`] | the fewest runs over given sequences | heuristic, beside a lower bound on the runs |
//!
//! Moves come in rounds. Within one round every destination is free when the round starts and is no source of that
//! round, so one kernel launch copies a whole round in any order; the next round starts when it is complete.

mod bits;
mod error;
mod holes;
mod largest_run;
mod pages;
mod runs;
mod slide;

pub use error::PlanError;
pub use largest_run::plan_largest_run;
pub use pages::plan_pages;
pub use runs::plan_runs;
pub use slide::plan_slide;

use crate::ids::BlockId;
use bits::Bits;

/// Largest pool a planner accepts, in blocks: offsets into a plan stay far from the end of `u32`.
pub const MAX_BLOCKS: usize = 1 << 30;

/// What the planner may do with one block.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Cell {
    /// Nothing in it: a move may write here.
    Free,
    /// Holds content, active or cached, that may be copied elsewhere.
    Movable,
    /// Must stay: pinned, the null block, or otherwise not to be moved.
    Fixed,
}

/// The pool as a planner sees it: one [`Cell`] per block id.
#[derive(Copy, Clone, Debug)]
pub struct PoolView<'a> {
    /// State of block `i` at index `i`.
    pub cells: &'a [Cell],
    /// Blocks per page, at least 1; the last page may be short.
    pub blocks_per_page: u32,
}

impl PoolView<'_> {
    /// Refuses what no planner can work on: pages of nothing, or more than [`MAX_BLOCKS`] blocks. O(1).
    fn check(&self) -> Result<(), PlanError> {
        if self.blocks_per_page == 0 {
            return Err(PlanError::EmptyPageSize);
        }
        if self.cells.len() > MAX_BLOCKS {
            return Err(PlanError::PoolTooLarge { blocks: self.cells.len(), limit: MAX_BLOCKS });
        }
        Ok(())
    }
}

/// What a compaction is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Objective {
    /// Fewest runs over given sequences.
    Runs,
    /// Most empty pages.
    Pages,
    /// One run of this many free blocks.
    LargestRun(u32),
}

/// Runs over the given sequences, summed: a block shared by two sequences counts in both.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct RunCount {
    /// Before the plan.
    pub before: u64,
    /// After the plan, recounted on the remapped tables and not predicted.
    pub after: u64,
}

/// What a plan costs and what it changes; everything is counted on the pool before and after, nothing is estimated.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Gain {
    /// Blocks copied, over all rounds.
    pub moves: usize,
    /// Empty pages before.
    pub empty_pages_before: u32,
    /// Empty pages after.
    pub empty_pages_after: u32,
    /// Longest run of free blocks before.
    pub largest_run_before: u32,
    /// Longest run of free blocks after.
    pub largest_run_after: u32,
    /// Runs over sequences; `None` (unknown) until the planner or [`Plan::measure_runs`] was given sequences.
    pub runs: Option<RunCount>,
}

/// Block moves in rounds, with their gain. Apply it whole, round by round, or discard it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Source of each move.
    pub src: Vec<BlockId>,
    /// Destination of each move.
    pub dst: Vec<BlockId>,
    /// End offset of each round in `src` and `dst`, ascending; empty when there is nothing to move.
    pub rounds: Vec<u32>,
    /// Cost and effect.
    pub gain: Gain,
    /// No plan within `max_moves` leaves fewer runs than this; `None` where the objective is not [`Objective::Runs`].
    pub runs_bound: Option<u64>,
}

impl Plan {
    /// Measures `moves` on `view` and wraps them. O(blocks + moves).
    fn new(view: &PoolView<'_>, moves: Moves) -> Self {
        let mut free = Bits::free(view.cells);
        let before = shape(&free, view);
        let after = if moves.src.is_empty() {
            before
        } else {
            for (s, d) in moves.src.iter().zip(&moves.dst) {
                free.set(s.0 as usize);
                free.clear(d.0 as usize);
            }
            shape(&free, view)
        };
        Self {
            gain: Gain {
                moves: moves.src.len(),
                empty_pages_before: before.empty_pages,
                empty_pages_after: after.empty_pages,
                largest_run_before: before.largest_run,
                largest_run_after: after.largest_run,
                runs: None,
            },
            src: moves.src,
            dst: moves.dst,
            rounds: moves.rounds,
            runs_bound: None,
        }
    }

    /// Number of moves.
    pub fn len(&self) -> usize {
        self.src.len()
    }

    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.src.is_empty()
    }

    /// Sources and destinations of each round, in order: one launch each. O(1) per round.
    pub fn launches(&self) -> impl Iterator<Item = (&[BlockId], &[BlockId])> {
        let mut start = 0;
        self.rounds.iter().filter_map(move |&end| {
            let range = start..end as usize;
            start = end as usize;
            Some((self.src.get(range.clone())?, self.dst.get(range)?))
        })
    }

    /// Where each block of a pool of `num_blocks` ends up: `remap[old id] = new id`, itself when it stays. A block
    /// that moves twice (through a vacated block) has its last place. Blocks that hold nothing map to themselves.
    /// O(`num_blocks` + moves).
    pub fn remap(&self, num_blocks: usize) -> Vec<BlockId> {
        remap(num_blocks, &self.src, &self.dst)
    }

    /// The plan as one simultaneous assignment `new[dst] = old[src]` of a pool of `num_blocks` blocks: every block that
    /// ends elsewhere than it began, by ascending source. Equal to the moves of a single round but for their order.
    /// O(`num_blocks` + moves).
    pub fn assignment(&self, num_blocks: usize) -> (Vec<BlockId>, Vec<BlockId>) {
        let to = self.remap(num_blocks);
        (0..).map(BlockId).zip(to).filter(|(from, to)| from != to).unzip()
    }

    /// Checks that the plan fits a pool, as it must before it is applied to one: every source holds a movable block,
    /// every destination is free when its round starts and is neither a source nor twice a destination of that
    /// round, and the rounds cover all moves. The message names the first move that does not. O(blocks + moves).
    pub fn validate(&self, cells: &[Cell]) -> Result<(), String> {
        if self.src.len() != self.dst.len() {
            return Err(format!("{} sources but {} destinations", self.src.len(), self.dst.len()));
        }
        if self.rounds.last().map_or(0, |&end| end as usize) != self.src.len() {
            return Err(format!("rounds end at {:?} but there are {} moves", self.rounds.last(), self.src.len()));
        }
        if !self.rounds.is_sorted() {
            return Err("round offsets are not ascending".to_owned());
        }
        let mut now = cells.to_vec();
        for (round, (src, dst)) in self.launches().enumerate() {
            for (s, d) in src.iter().zip(dst) {
                let bad = |what: &str| Err(format!("round {round}, move {} -> {}: {what}", s.0, d.0));
                match now.get(s.0 as usize) {
                    Some(Cell::Movable) => {}
                    Some(_) => return bad("the source holds no movable block"),
                    None => return bad("the source is outside the pool"),
                }
                match now.get(d.0 as usize) {
                    Some(Cell::Free) => {}
                    Some(_) => return bad("the destination is not free when the round starts"),
                    None => return bad("the destination is outside the pool"),
                }
            }
            // Two passes: nothing vacated in this round may be written in it.
            for (s, d) in src.iter().zip(dst) {
                if now[s.0 as usize] != Cell::Movable || now[d.0 as usize] != Cell::Free {
                    return Err(format!("round {round}, move {} -> {}: used twice in one round", s.0, d.0));
                }
                // Fixed marks "touched in this round" until the round is over.
                now[s.0 as usize] = Cell::Fixed;
                now[d.0 as usize] = Cell::Fixed;
            }
            for (s, d) in src.iter().zip(dst) {
                now[s.0 as usize] = Cell::Free;
                now[d.0 as usize] = Cell::Movable;
            }
        }
        Ok(())
    }

    /// Counts the runs of `sequences` (tables as they are before the plan) and keeps the result in `gain.runs`, for
    /// plans made for another objective. Ids outside `num_blocks` count as staying. O(`num_blocks` + moves + blocks listed).
    pub fn measure_runs(&mut self, num_blocks: usize, sequences: &[&[BlockId]]) -> RunCount {
        let to = self.remap(num_blocks);
        let runs = RunCount { before: count_runs(sequences), after: sequences.iter().map(|s| runs_of(s, &to)).sum() };
        self.gain.runs = Some(runs);
        runs
    }
}

/// Runs over `sequences`, summed; a run is a stretch of consecutive block ids in table order. O(blocks listed).
pub fn count_runs(sequences: &[&[BlockId]]) -> u64 {
    sequences.iter().map(|s| runs_of(s, &[])).sum()
}

/// Plans for any [`Objective`]; `sequences` are the tables that [`Objective::Runs`] plans for, and what `gain.runs`
/// is counted over in any case when there are some. Cost as of the planner called.
pub fn plan_compaction(
    view: &PoolView<'_>,
    objective: Objective,
    sequences: &[&[BlockId]],
    max_moves: Option<usize>,
) -> Result<Plan, PlanError> {
    let mut plan = match objective {
        Objective::Runs => return plan_runs(view, sequences, max_moves),
        Objective::Pages => plan_pages(view, max_moves)?,
        Objective::LargestRun(n) => plan_largest_run(view, n, max_moves)?,
    };
    if !sequences.is_empty() {
        plan.measure_runs(view.cells.len(), sequences);
    }
    Ok(plan)
}

/// Moves before they are measured; same layout as [`Plan`].
#[derive(Clone, Default, Debug)]
struct Moves {
    src: Vec<BlockId>,
    dst: Vec<BlockId>,
    rounds: Vec<u32>,
}

impl Moves {
    /// Adds one move to the round that is open.
    fn push(&mut self, src: u32, dst: u32) {
        self.src.push(BlockId(src));
        self.dst.push(BlockId(dst));
    }

    /// Ends the open round, if it has a move.
    fn end_round(&mut self) {
        let end = self.src.len() as u32;
        if self.rounds.last().map_or(0, |&e| e) < end {
            self.rounds.push(end);
        }
    }
}

/// Final place of every block after `src -> dst` moves in order; moves outside the pool count as none.
fn remap(num_blocks: usize, src: &[BlockId], dst: &[BlockId]) -> Vec<BlockId> {
    let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX);
    let mut to: Vec<BlockId> = (0..num_blocks).map(BlockId).collect();
    // Backwards: `to[c]` is where the content of `c` ends up that is there before the moves done so far.
    for (s, d) in src.iter().zip(dst).rev() {
        let (s, d) = (s.0 as usize, d.0 as usize);
        if let Some(&end) = to.get(d)
            && s < to.len()
        {
            to[d] = BlockId(d as u32);
            to[s] = end;
        }
    }
    to
}

/// Runs of one table after `to`; ids beyond `to` stay.
fn runs_of(sequence: &[BlockId], to: &[BlockId]) -> u64 {
    let mut runs = 0;
    let mut next = None;
    for b in sequence {
        let at = to.get(b.0 as usize).map_or(b.0, |t| t.0);
        runs += u64::from(next != Some(at));
        next = at.checked_add(1);
    }
    runs
}

#[derive(Copy, Clone)]
struct Shape {
    empty_pages: u32,
    largest_run: u32,
}

/// Empty pages and longest free run. O(blocks).
fn shape(free: &Bits, view: &PoolView<'_>) -> Shape {
    let (blocks, page) = (view.cells.len(), view.blocks_per_page.max(1) as usize);
    let empty = |&from: &usize| {
        let to = blocks.min(from + page);
        free.count_range(from, to) == to - from
    };
    Shape { empty_pages: (0..blocks).step_by(page).filter(empty).count() as u32, largest_run: free.longest() as u32 }
}
