//! Compaction: a plan made from the pool as it is, and applied to it as one transaction.

use super::BlockPool;
use crate::compact::{self, Cell, Objective, Plan, PlanError, PoolView};
use crate::error::{Error, Result};
use crate::free::Place;
use crate::ids::BlockId;
use crate::table::count_runs;

/// A plan of block moves for one pool.
#[derive(Clone, Debug)]
pub struct CompactionPlan {
    /// The moves and their gain.
    pub plan: Plan,
    /// What it is for.
    pub objective: Objective,
    pool: u64,
    /// Generations of every source, then of every destination, when the plan was made.
    generations: Vec<u32>,
}

impl BlockPool {
    /// What a planner may do with each block. Cached blocks move like active ones; pinned ones and the null block stay.
    /// Under strict contiguity so do the sequences that a run is promised to, and that run.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let places = self.free.places().iter().zip(&self.pin_counts);
        let mut cells: Vec<Cell> = places
            .map(|(&place, &pins)| match place {
                _ if pins > 0 => Cell::Fixed,
                Place::Clean => Cell::Free,
                _ => Cell::Movable,
            })
            .collect();
        if self.config.null_block {
            cells[super::NULL.index()] = Cell::Fixed;
        }
        if self.config.contiguous {
            for (_, sequence) in self.sequences.iter().filter(|(_, sequence)| sequence.reserved > 0) {
                let promised = self.promised_run(sequence.blocks.last().copied(), sequence.reserved).map(BlockId);
                for id in sequence.blocks.iter().copied().chain(promised) {
                    cells[id.index()] = Cell::Fixed;
                }
            }
        }
        cells
    }

    /// Plans a compaction. `raws` are the sequences whose runs count; `None` for all.
    ///
    /// Under strict contiguity no sequence may end in more runs than it has: where the plan with the fewest moves would
    /// split one, everything slides down in order instead ([`compact::plan_slide`]).
    ///
    /// # Errors
    /// [`Error::StaleHandle`]; [`Error::InvalidArgument`] when the objective cannot be reached, with the arithmetic.
    pub fn plan_compaction(
        &self,
        objective: Objective,
        max_moves: Option<usize>,
        raws: Option<&[i64]>,
    ) -> Result<CompactionPlan> {
        let tables: Vec<&[BlockId]> = match raws {
            Some(raws) => {
                raws.iter().map(|&raw| Ok(self.sequences.get(raw)?.blocks.as_slice())).collect::<Result<_>>()?
            }
            None => self.sequences.iter().map(|(_, sequence)| sequence.blocks.as_slice()).collect(),
        };
        let cells = self.cells();
        let view = PoolView { cells: &cells, blocks_per_page: self.config.blocks_per_page as u32 };
        let refused = |error: PlanError| Error::invalid("plan", "refused", error.to_string());
        let mut plan = compact::plan_compaction(&view, objective, &tables, max_moves).map_err(refused)?;
        if self.config.contiguous && self.splits(&plan) {
            plan = compact::plan_slide(&view).map_err(refused)?;
            plan.measure_runs(self.config.num_blocks, &tables);
            self.check_slide(&plan, objective, max_moves)?;
        }
        let generations = plan.src.iter().chain(&plan.dst).map(|id| self.generations[id.index()]).collect();
        Ok(CompactionPlan { plan, objective, pool: self.identity, generations })
    }

    /// Whether any sequence would lie in more runs than now.
    fn splits(&self, plan: &Plan) -> bool {
        let remap = plan.remap(self.config.num_blocks);
        self.sequences.iter().any(|(_, sequence)| {
            let moved: Vec<BlockId> = sequence.blocks.iter().map(|id| remap[id.index()]).collect();
            count_runs(&moved) > count_runs(&sequence.blocks)
        })
    }

    fn check_slide(&self, plan: &Plan, objective: Objective, max_moves: Option<usize>) -> Result<()> {
        let refuse = |reason: String| Err(Error::invalid("plan", "refused", reason));
        if self.splits(plan) {
            return refuse("a pinned block would split a sequence that must lie in one run".into());
        }
        if let Some(limit) = max_moves.filter(|&limit| plan.len() > limit) {
            return refuse(format!("keeping sequences whole takes {} moves, max_moves is {limit}", plan.len()));
        }
        match objective {
            Objective::LargestRun(n) if plan.gain.largest_run_after < n => refuse(format!(
                "keeping sequences whole makes a run of {} blocks, not {n}",
                plan.gain.largest_run_after
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a plan that [`apply`](Self::apply) would refuse. Changes nothing.
    ///
    /// # Errors
    /// [`Error::StalePlan`].
    pub fn check_plan(&self, made: &CompactionPlan) -> Result<()> {
        let stale = |reason: String| Err(Error::StalePlan { reason });
        if made.pool != self.identity {
            return stale("it was made for another pool".into());
        }
        let moved = made.plan.src.iter().chain(&made.plan.dst);
        for (&id, &generation) in moved.zip(&made.generations) {
            if self.generations[id.index()] != generation {
                return stale(format!("block {id} was handed out or freed since"));
            }
        }
        made.plan.validate(&self.cells()).or_else(|what| stale(format!("the pool changed: {what}")))
    }

    /// Applies a plan as a whole: tables, prefix index, eviction order and retention follow the blocks. The bytes are
    /// the caller's to copy, before anything reads through the new tables.
    ///
    /// # Errors
    /// [`Error::StalePlan`] when the pool changed in a way that matters; nothing is changed then.
    pub fn apply(&mut self, made: &CompactionPlan) -> Result<()> {
        self.check_plan(made)?;
        for (&from, &to) in made.plan.src.iter().zip(&made.plan.dst) {
            self.free.relocate(from, to)?;
            self.index.remap(from, to);
            self.refs.swap(from.index(), to.index());
            for id in [from, to] {
                self.generations[id.index()] = self.generations[id.index()].wrapping_add(1);
            }
        }
        let remap = made.plan.remap(self.config.num_blocks);
        for sequence in self.sequences.iter_mut() {
            for id in &mut sequence.blocks {
                *id = remap[id.index()];
            }
        }
        self.counters.blocks_moved += made.plan.len() as u64;
        Ok(())
    }
}
