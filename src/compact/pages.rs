//! Empty the most pages with the fewest moves.

use super::bits::Bits;
use super::holes::Holes;
use super::{Cell, Moves, Plan, PlanError, PoolView};

/// Plans the moves that leave the most pages empty within `max_moves`, and among such plans the fewest moves; one
/// round. A page is `blocks_per_page` neighbouring blocks. Pages that are empty already are no gain and stay empty; a
/// page with a fixed block cannot be emptied, but its free blocks are destinations. Ties: lowest page first, the
/// short last page last. O(blocks + pages log pages).
///
/// # Why it is optimal
///
/// Let any sequence of moves empty the set `S` of pages and fill the set `T` of pages that were empty.
///
/// 1. *`T` is empty without loss.* With `t = |T|`, a plan worth anything has `|S| > t`, and at most one page is
///    short, so `S` has `t` full-size pages. Leave those as they are instead of emptying them: their blocks stay, and
///    the room on them replaces the room on `T`, which is no larger. Same number of empty pages, fewer moves.
/// 2. *Cost.* Every block on `S` has to move at least once, and once is enough: moves `>= sum of blocks on S`.
/// 3. *Room.* The blocks of `S` go to free blocks of non-empty pages outside `S`. With `F` the free blocks on all
///    non-empty pages this reads `blocks(S) <= F - free(S)`, that is `size(S) <= F`: which pages are chosen does not
///    matter, only how many (and whether the short one is among them).
/// 4. So for every number of full-size pages the ones with the fewest blocks are best, by exchange, and both cases
///    of the short page are tried. Most pages first, then fewest moves.
pub fn plan_pages(view: &PoolView<'_>, max_moves: Option<usize>) -> Result<Plan, PlanError> {
    view.check()?;
    let size = view.blocks_per_page as usize;
    let budget = max_moves.unwrap_or(usize::MAX);
    let free = Bits::free(view.cells);
    let mut room = 0; // F above
    let mut full: Vec<(u32, u32)> = Vec::new(); // (blocks to move, page)
    let mut short: Option<(u32, u32, usize)> = None; // (blocks to move, page, size)
    let mut holes = free.clone(); // free blocks of pages that neither are empty nor will be
    for (page, cells) in view.cells.chunks(size).enumerate() {
        let from = page * size;
        let free = free.count_range(from, from + cells.len());
        if free == cells.len() {
            holes.clear_range(from, from + cells.len());
            continue;
        }
        room += free;
        if cells.contains(&Cell::Fixed) {
            continue;
        }
        let blocks = (cells.len() - free) as u32;
        if cells.len() == size {
            full.push((blocks, page as u32));
        } else {
            short = Some((blocks, page as u32, cells.len()));
        }
    }
    full.sort_unstable();

    let cheapest = |room: usize, budget: usize| {
        let mut moves = 0;
        let mut pages = 0;
        for &(blocks, _) in full.iter().take(room / size) {
            if moves + blocks as usize > budget {
                break;
            }
            moves += blocks as usize;
            pages += 1;
        }
        (pages, moves)
    };
    let (mut pages, moves) = cheapest(room, budget);
    let mut with_short = false;
    if let Some((blocks, _, len)) = short
        && len <= room
        && blocks as usize <= budget
    {
        let (others, other_moves) = cheapest(room - len, budget - blocks as usize);
        let all_moves = other_moves + blocks as usize;
        if others + 1 > pages || (others + 1 == pages && all_moves < moves) {
            pages = others;
            with_short = true;
        }
    }
    let mut emptied: Vec<u32> = full[..pages].iter().map(|&(_, page)| page).collect();
    if let Some((_, page, _)) = short
        && with_short
    {
        emptied.push(page);
    }
    emptied.sort_unstable();
    let mut sources = Vec::new();
    for &page in &emptied {
        let from = page as usize * size;
        let to = view.cells.len().min(from + size);
        holes.clear_range(from, to);
        free.stretches(from, to, false, &mut sources);
    }
    Ok(Plan::new(view, fill_holes(&sources, &holes)))
}

/// One round that moves the blocks of `sources` into `holes`. Neighbours stay neighbours where a hole takes them, so
/// that fewer runs break; the smallest hole that is long enough is used first.
pub(super) fn fill_holes(sources: &[(u32, u32)], holes: &Bits) -> Moves {
    let mut moves = Moves::default();
    if sources.is_empty() {
        return moves;
    }
    let total = sources.iter().map(|s| s.1 as usize).sum();
    moves.src.reserve(total);
    moves.dst.reserve(total);
    let mut stretches = Vec::new();
    holes.stretches(0, usize::MAX, true, &mut stretches);
    let mut holes = Holes::new(&stretches);
    for &(start, len) in sources {
        let fitted = holes.fill(start, len, &mut moves);
        debug_assert!(fitted, "the room was counted before");
    }
    moves.end_round();
    moves
}
