//! Fewest runs over given sequences.
//!
//! Two planners, and the better plan of what they find:
//!
//! * [`layout`] gives every broken chain of blocks (a sequence, or with shared prefixes the heaviest path through the
//!   tree of sequences) one stretch of neighbouring blocks, and [`route`] turns that into rounds: a block goes straight
//!   to its place as soon as the place is empty. About one move per block, whatever the pool looks like.
//! * [`local`] joins two pieces at a time, most runs gained per move first. Best when moves are few.

mod graph;
mod layout;
mod local;
mod pieces;
mod route;

use super::{Moves, Plan, PlanError, PoolView, RunCount, remap, runs_of};
use crate::ids::BlockId;
use graph::{Chains, Edge, Lock, Problem};

/// With at most this many breaks left the piece-by-piece planner is worth its time even beside an optimal layout: it
/// may get there with fewer moves.
const FEW_BREAKS: u64 = 1 << 14;

/// Plans moves that leave few runs over `sequences` (block tables) within `max_moves`; `plan.runs_bound` says what no
/// plan can beat. A run is a stretch of consecutive ids in table order; runs are summed over all sequences, so a
/// block shared by several counts in each. A shared block is moved once. Other movable blocks are moved out of the
/// way where that pays. No sequence ends with more runs than it has. Without `max_moves` fewest runs come first and
/// fewest moves second; with it, runs gained per move. Several rounds when blocks have to wait for each other.
///
/// Not minimal in general (with fixed blocks this contains bin packing); the bound is the sum of what any placement
/// must break: a block has one neighbour on each side, so of several successors (shared prefixes that branch) all
/// but the heaviest break; fixed blocks cannot be joined or jumped; and a move repairs at most the breaks on both
/// sides of the block moved.
///
/// O(blocks + blocks listed) for tables that share nothing, when every chain fits in one stretch of blocks that are
/// free or move anyway. Sharing and `max_moves` add a sort of all neighbourhoods, other blocks in the way up to 64
/// scans of the pool, joining pieces O(pieces log pieces), `max_moves` a bisection over the chains.
pub fn plan_runs(view: &PoolView<'_>, sequences: &[&[BlockId]], max_moves: Option<usize>) -> Result<Plan, PlanError> {
    view.check()?;
    let problem = Problem::new(view.cells, sequences)?;
    let mut edges = None;
    if problem.shared || problem.fixed_listed || max_moves.is_some() {
        edges = Some(problem.edges());
    }
    let bound = problem.bound(edges.as_deref(), max_moves);
    let before = problem.before;
    let mut best = Candidate::nothing(before);
    let budget = max_moves.unwrap_or(usize::MAX);
    if before > bound && budget > 0 {
        if let Some(found) = relocate(&problem, edges.as_deref(), budget) {
            best.keep_better(found);
        }
        let few = before - problem.least_possible() <= FEW_BREAKS;
        if few || best.runs > bound {
            let edges = edges.unwrap_or_else(|| problem.edges());
            let relocated = std::mem::replace(&mut best, Candidate::nothing(before));
            let join = |start: Moves| {
                let moves = local::join_pieces(&problem, &edges, start, budget);
                judge(&problem, moves).filter(|(_, worse)| worse.is_empty())
            };
            // Joining pieces of a large pool takes long: not from the start where whole chains nearly got there, and
            // after those only where they did better.
            let near = (relocated.runs - bound) * 8 <= before - bound;
            if (few || !near)
                && let Some((found, _)) = join(Moves::default())
            {
                best.keep_better(found);
            }
            if relocated.runs > bound
                && !relocated.moves.src.is_empty()
                && relocated.moves.src.len() < budget
                && (few || relocated.runs < best.runs)
                && let Some((found, _)) = join(relocated.moves.clone())
            {
                best.keep_better(found);
            }
            best.keep_better(relocated);
        }
    }
    let after = best.runs;
    let mut plan = Plan::new(view, best.moves);
    plan.gain.runs = Some(RunCount { before, after });
    plan.runs_bound = Some(bound);
    Ok(plan)
}

/// A plan and the runs it leaves.
struct Candidate {
    moves: Moves,
    runs: u64,
}

impl Candidate {
    /// No move.
    fn nothing(runs: u64) -> Self {
        Self { moves: Moves::default(), runs }
    }

    /// Fewer runs, then fewer moves, then fewer rounds.
    fn keep_better(&mut self, other: Self) {
        let key = |c: &Self| (c.runs, c.moves.src.len(), c.moves.rounds.len());
        if key(&other) < key(self) {
            *self = other;
        }
    }
}

/// Recounts the runs on the remapped tables; also says which sequences got worse.
fn judge(problem: &Problem<'_>, moves: Moves) -> Option<(Candidate, Vec<u32>)> {
    if moves.src.is_empty() {
        return None;
    }
    let to = remap(problem.cells.len(), &moves.src, &moves.dst);
    let mut runs = 0;
    let mut worse = Vec::new();
    for (i, sequence) in problem.sequences.iter().enumerate() {
        let after = runs_of(sequence, &to);
        runs += after;
        // Only then the count before matters: it is not kept, to save a pass in the common case.
        if after > 1 && after > runs_of(sequence, &[]) {
            worse.push(i as u32);
        }
    }
    Some((Candidate { moves, runs }, worse))
}

/// Whole chains to new places. Where that would make a sequence worse, what holds together now is kept together and
/// it is tried again: first for the sequences concerned, then for all.
fn relocate(problem: &Problem<'_>, edges: Option<&[Edge]>, budget: usize) -> Option<Candidate> {
    let mut lock = Lock::none();
    loop {
        let chains = match edges {
            Some(edges) if problem.shared => Chains::from_edges(problem, edges, &lock),
            _ => Chains::from_sequences(problem.sequences),
        };
        let moves = layout::relocate(problem, &chains, budget)?;
        let (found, worse) = judge(problem, moves)?;
        if worse.is_empty() {
            return Some(found);
        }
        if !problem.shared || !lock.tighten(problem, &worse) {
            return None;
        }
    }
}
