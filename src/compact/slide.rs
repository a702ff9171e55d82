//! Sliding: every movable block moves down into the lowest free place, order kept.
//!
//! Not the fewest moves, but neighbours stay neighbours wherever no fixed block comes between: what a pool needs whose
//! sequences must each lie in one run.

use super::{Cell, Moves, Plan, PlanError, PoolView};

/// Moves all movable blocks down past the fixed ones, lowest first. O(blocks).
///
/// # Errors
/// [`PlanError`] for a view no planner can work on, as of [`super::plan_pages`].
pub fn plan_slide(view: &PoolView<'_>) -> Result<Plan, PlanError> {
    view.check()?;
    let mut moves = Moves::default();
    // Lowest block the open round vacates: nothing of that round may land there or above.
    let mut vacated = u32::MAX;
    let mut low = 0;
    for (i, cell) in view.cells.iter().enumerate() {
        let id = i as u32;
        if *cell != Cell::Movable {
            continue;
        }
        while view.cells.get(low as usize) == Some(&Cell::Fixed) {
            low += 1;
        }
        if low < id {
            if low >= vacated {
                moves.end_round();
                vacated = u32::MAX;
            }
            moves.push(id, low);
            vacated = vacated.min(id);
        }
        low += 1;
    }
    moves.end_round();
    Ok(Plan::new(view, moves))
}
