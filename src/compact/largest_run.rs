//! One run of free blocks, with the fewest moves.

use super::bits::Bits;
use super::pages::fill_holes;
use super::{Cell, Moves, Plan, PlanError, PoolView};

/// Plans the fewest moves that leave `n` neighbouring blocks free, in one round; no move when they are there already
/// (or `n` is 0). Ties: the lowest window. The error says by how much it fails. O(blocks).
///
/// # Why it is optimal
///
/// Whatever the moves, some window of `n` blocks is free in the end. A fixed block never leaves, so the window has
/// none; every other block in it has to leave, one move each at least, and one is enough when it goes outside.
/// A window with `c` blocks in it needs `c` free blocks outside and there are `free - (n - c)` of them: enough exactly
/// when `free >= n`, whatever the window. So the window without a fixed block that holds the fewest blocks is minimal.
pub fn plan_largest_run(view: &PoolView<'_>, n: u32, max_moves: Option<usize>) -> Result<Plan, PlanError> {
    view.check()?;
    let cells = view.cells;
    let mut holes = Bits::free(cells);
    let free = holes.count() as u32;
    if n > free {
        return Err(PlanError::TooFewFree { n, free });
    }
    if n == 0 {
        return Ok(Plan::new(view, Moves::default()));
    }
    let Some((start, needed)) = cheapest_window(cells, n as usize) else {
        let spans = cells.split(|&c| c == Cell::Fixed);
        return Err(PlanError::FixedInTheWay {
            n,
            longest_without_fixed: spans.map(<[Cell]>::len).max().unwrap_or(0) as u32,
            fixed: cells.iter().filter(|&&c| c == Cell::Fixed).count() as u32,
        });
    };
    if let Some(max_moves) = max_moves
        && needed as usize > max_moves
    {
        return Err(PlanError::MaxMoves { n, needed, start: start as u32, max_moves });
    }
    let mut sources = Vec::new();
    holes.stretches(start, start + n as usize, false, &mut sources);
    holes.clear_range(start, start + n as usize);
    Ok(Plan::new(view, fill_holes(&sources, &holes)))
}

/// `(start, blocks to move)` of the window of `n` cells without a fixed one that holds the fewest blocks.
fn cheapest_window(cells: &[Cell], n: usize) -> Option<(usize, u32)> {
    let mut best: Option<(usize, u32)> = None;
    let mut held = 0; // movable blocks in the window that ends here
    let mut from = 0; // first cell after the last fixed one
    for (i, &cell) in cells.iter().enumerate() {
        if cell == Cell::Fixed {
            from = i + 1;
            held = 0;
            continue;
        }
        held += u32::from(cell == Cell::Movable);
        let len = i + 1 - from;
        if len > n {
            held -= u32::from(cells[i - n] == Cell::Movable);
        }
        if len >= n && best.is_none_or(|(_, least)| held < least) {
            best = Some((i + 1 - n, held));
        }
    }
    best
}
