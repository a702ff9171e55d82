//! A place for every chain: one stretch of neighbouring blocks each, as few cuts and as few moves as can be had.

use std::cmp::Reverse;

use super::super::holes::Holes;
use super::super::{Cell, Moves};
use super::graph::{Chains, NONE, Problem};
use super::route::route;

/// Free, or held by a block that gets a new place anyway.
const OPEN: u8 = 0;
/// Held by a block that could go anywhere: usable, for one move.
const OTHER: u8 = 1;
/// Fixed, or already given away.
const CLOSED: u8 = 2;

/// Scans of the pool for cheap windows in one layout; more chains than this share windows.
const MAX_SCANS: usize = 64;
/// How often chains that do not gain are taken out before a layout is given up.
const RETRIES: usize = 4;

/// What a chain is like now.
struct Info {
    /// Runs it lies in.
    pieces: u32,
    /// Runs saved if it lay in one.
    gain: u64,
    /// Position minus index of its longest piece, and how many blocks have it.
    offset: i64,
    keep: u32,
    fixed: bool,
}

fn inspect(problem: &Problem<'_>, chains: &Chains, i: usize) -> Info {
    let from = chains.ranges[i].0 as usize;
    let chain = chains.chain(i);
    let mut info = Info { pieces: 0, gain: 0, offset: 0, keep: 0, fixed: false };
    let (mut start, mut longest) = (0, 0);
    for k in 0..chain.len() {
        let ends = k + 1 == chain.len() || chain[k].checked_add(1) != Some(chain[k + 1]);
        if ends {
            info.pieces += 1;
            if k + 1 < chain.len() {
                info.gain += chains.weight(from + k);
            }
            if k + 1 - start > longest {
                longest = k + 1 - start;
                info.offset = i64::from(chain[start]) - start as i64;
            }
            start = k + 1;
        }
    }
    for (k, &block) in chain.iter().enumerate() {
        info.keep += u32::from(i64::from(block) - k as i64 == info.offset);
    }
    if problem.fixed_listed {
        info.fixed = chain.iter().any(|&b| problem.cells[b as usize] == Cell::Fixed);
    }
    info
}

/// Moves that bring broken chains together, all of them or, when that takes more than `budget` moves, those that
/// save most runs per move.
pub(super) fn relocate(problem: &Problem<'_>, chains: &Chains, budget: usize) -> Option<Moves> {
    let infos: Vec<Info> = (0..chains.ranges.len()).map(|i| inspect(problem, chains, i)).collect();
    let least_moves = |i: usize| chains.chain(i).len() as u64 - u64::from(infos[i].keep);
    let mut broken: Vec<usize> = (0..infos.len()).filter(|&i| infos[i].pieces > 1).collect();
    if broken.is_empty() {
        return None;
    }
    let mut planner =
        Planner { problem, chains, infos: &infos, class: Vec::new(), parts: Vec::new(), parts_of: Vec::new() };
    let total: u64 = broken.iter().map(|&i| least_moves(i)).sum();
    if total <= budget as u64
        && let Some(want) = planner.best_layout(&broken, true)
        && let Some(moves) = route(problem.cells, want, budget)
    {
        return Some(moves);
    }
    if budget == usize::MAX {
        return None;
    }
    // Runs per move, highest first; whether a prefix fits the budget is found by bisection.
    broken.sort_by(|&x, &y| {
        let left = u128::from(infos[x].gain) * u128::from(least_moves(y));
        let right = u128::from(infos[y].gain) * u128::from(least_moves(x));
        right.cmp(&left).then(x.cmp(&y))
    });
    let mut spent = 0;
    let mut high = broken
        .iter()
        .take_while(|&&i| {
            spent += least_moves(i);
            spent <= budget as u64
        })
        .count();
    let mut low = 0;
    let mut best = None;
    while low < high {
        let middle = (low + high).div_ceil(2);
        match planner.best_layout(&broken[..middle], false).and_then(|want| route(problem.cells, want, budget)) {
            Some(moves) => {
                best = Some(moves);
                low = middle;
            }
            None => high = middle - 1,
        }
    }
    best
}

/// `len` blocks of a chain, from index `from` of all chains' blocks, that come to `start`.
struct Part {
    from: u32,
    len: u32,
    start: u32,
}

/// A stretch of a chain without a place yet.
#[derive(Copy, Clone)]
struct Float {
    chain: u32,
    from: u32,
    len: u32,
}

struct Planner<'a> {
    problem: &'a Problem<'a>,
    chains: &'a Chains,
    infos: &'a [Info],
    class: Vec<u8>,
    parts: Vec<Part>,
    parts_of: Vec<u32>,
}

impl Planner<'_> {
    /// What should lie where when the chains in `chosen` are brought together. Pieces that are long enough stay and
    /// the rest of their chain comes to them; where that leaves no room to lay all chains in one stretch, fewer stay,
    /// and at last (if `all`) even whole chains may be moved.
    fn best_layout(&mut self, chosen: &[usize], all: bool) -> Option<Vec<u32>> {
        let mut best: Option<(u64, Vec<u32>)> = None;
        // One part per chosen chain, and the others as they are.
        let pieces = |i: usize| u64::from(self.infos[i].pieces);
        let least = (0..self.infos.len()).map(pieces).sum::<u64>() - chosen.iter().map(|&i| pieces(i) - 1).sum::<u64>();
        for (keep_quarters, whole_too) in [(1, false), (3, false), (5, false), (5, true)] {
            if whole_too && !all {
                break;
            }
            let Some(parts) = self.lay_out(chosen, keep_quarters, whole_too) else {
                continue;
            };
            if best.as_ref().is_none_or(|(fewest, _)| parts < *fewest) {
                best = Some((parts, self.want()));
            }
            if parts <= least {
                break;
            }
        }
        best.map(|(_, want)| want)
    }

    /// One layout; the parts all chains are in then. `None` when nothing gains.
    fn lay_out(&mut self, chosen: &[usize], keep_quarters: u32, whole_too: bool) -> Option<u64> {
        let mut selected = vec![whole_too; self.infos.len()];
        for &i in chosen {
            selected[i] = true;
        }
        for _ in 0..RETRIES {
            self.classify(&selected);
            let mut floats = Vec::new();
            self.anchor_fixed(&selected, &mut floats);
            self.anchor_pieces(&selected, keep_quarters, &mut floats);
            self.place(floats)?;
            let mut parts = 0;
            let mut dropped = false;
            let mut gains = false;
            for ((info, &now), selected) in self.infos.iter().zip(&self.parts_of).zip(&mut selected) {
                if !*selected {
                    parts += u64::from(info.pieces);
                    continue;
                }
                parts += u64::from(now);
                gains |= now < info.pieces;
                // Not worth a move: it stays as it is, in the next try.
                if now > info.pieces || (now == info.pieces && now > 1) {
                    *selected = false;
                    dropped = true;
                }
            }
            if !dropped {
                return gains.then_some(parts);
            }
        }
        None
    }

    fn classify(&mut self, selected: &[bool]) {
        self.parts.clear();
        self.parts_of = vec![0; self.infos.len()];
        self.class.clear();
        self.class.extend(self.problem.cells.iter().map(|cell| match cell {
            Cell::Free => OPEN,
            Cell::Movable => OTHER,
            Cell::Fixed => CLOSED,
        }));
        for (i, &selected) in selected.iter().enumerate() {
            let chain = self.chains.chain(i);
            if selected && !self.infos[i].fixed {
                for &block in chain {
                    self.class[block as usize] = OPEN;
                }
            } else if selected {
                for &block in chain {
                    if self.problem.cells[block as usize] != Cell::Fixed {
                        self.class[block as usize] = OPEN;
                    }
                }
            } else {
                // What lies together stays together.
                for pair in chain.windows(2) {
                    if pair[0].checked_add(1) == Some(pair[1]) {
                        self.class[pair[0] as usize] = CLOSED;
                        self.class[pair[1] as usize] = CLOSED;
                    }
                }
            }
        }
    }

    fn put(&mut self, chain: u32, from: u32, len: u32, start: u32) {
        if len > 0 {
            self.parts.push(Part { from, len, start });
            self.parts_of[chain as usize] += 1;
            self.class[start as usize..(start + len) as usize].fill(CLOSED);
        }
    }

    fn open(&self, cell: i64) -> bool {
        usize::try_from(cell).ok().and_then(|c| self.class.get(c)).is_some_and(|&c| c != CLOSED)
    }

    /// Chains with fixed blocks grow out from these; two fixed blocks that cannot be in one run share what is
    /// between them.
    fn anchor_fixed(&mut self, selected: &[bool], floats: &mut Vec<Float>) {
        for (i, info) in self.infos.iter().enumerate() {
            if !selected[i] || !info.fixed {
                continue;
            }
            let base = self.chains.ranges[i].0;
            let chain: Vec<u32> = self.chains.chain(i).to_vec();
            let is_fixed = |k: usize| self.problem.cells[chain[k] as usize] == Cell::Fixed;
            // Groups of fixed blocks that already lie as in one run, with nothing closed between.
            let mut groups: Vec<(usize, usize, i64)> = Vec::new();
            for k in (0..chain.len()).filter(|&k| is_fixed(k)) {
                let offset = i64::from(chain[k]) - k as i64;
                match groups.last_mut() {
                    Some((_, hi, o)) if *o == offset && (*hi + 1..k).all(|m| self.open(offset + m as i64)) => {
                        *hi = k;
                    }
                    _ => groups.push((k, k, offset)),
                }
            }
            let float =
                |from: usize, to: usize| Float { chain: i as u32, from: base + from as u32, len: (to - from) as u32 };
            // All of the gap or nothing: a part of it would save no run and cost moves.
            let mut ends: Vec<(usize, usize)> = groups.iter().map(|g| (g.0, g.1 + 1)).collect();
            for g in 0..=groups.len() {
                let left = g.checked_sub(1).map(|l| groups[l]);
                let from = left.map_or(0, |(_, hi, _)| hi + 1);
                let to = groups.get(g).map_or(chain.len(), |r| r.0);
                if from == to {
                    continue;
                }
                let reach_right =
                    left.map_or(0, |(_, _, o)| (from..to).take_while(|&m| self.open(o + m as i64)).count());
                let cut = from + reach_right;
                let reach_left = groups
                    .get(g)
                    .map_or(0, |&(_, _, o)| (cut..to).rev().take_while(|&m| self.open(o + m as i64)).count());
                if cut + reach_left >= to {
                    if let Some(end) = g.checked_sub(1).and_then(|l| ends.get_mut(l)) {
                        end.1 = cut;
                    }
                    if let Some(end) = ends.get_mut(g) {
                        end.0 = cut;
                    }
                    // Both sides may want the same cells: what is given away is closed at once.
                    if let Some((_, _, o)) = left {
                        self.close(o, from, cut);
                    }
                    let taken = groups.get(g).is_some_and(|&(_, _, o)| !(cut..to).all(|m| self.open(o + m as i64)));
                    if taken {
                        if let Some(end) = ends.get_mut(g) {
                            end.0 = to;
                        }
                        floats.push(float(cut, to));
                    } else if let Some(&(_, _, o)) = groups.get(g) {
                        self.close(o, cut, to);
                    }
                } else {
                    floats.push(float(from, to));
                }
            }
            for (&(_, _, offset), (from, to)) in groups.iter().zip(ends) {
                self.put(i as u32, base + from as u32, (to - from) as u32, (offset + from as i64) as u32);
            }
        }
    }

    fn close(&mut self, offset: i64, from: usize, to: usize) {
        for m in from..to {
            if let Some(class) = usize::try_from(offset + m as i64).ok().and_then(|c| self.class.get_mut(c)) {
                *class = CLOSED;
            }
        }
    }

    /// Chains whose longest piece is at least `keep_quarters` quarters of them stay with it, most kept blocks first,
    /// unless that would drive out more blocks than it keeps.
    fn anchor_pieces(&mut self, selected: &[bool], keep_quarters: u32, floats: &mut Vec<Float>) {
        let mut order: Vec<usize> = (0..self.infos.len()).filter(|&i| selected[i] && !self.infos[i].fixed).collect();
        order.sort_by_key(|&i| (Reverse(self.infos[i].keep), i));
        for i in order {
            let (from, to) = self.chains.ranges[i];
            let info = &self.infos[i];
            let len = to - from;
            let float = Float { chain: i as u32, from, len };
            let stays = u64::from(info.keep) * 4 >= u64::from(len) * u64::from(keep_quarters)
                && (0..i64::from(len)).all(|k| self.open(info.offset + k));
            if !stays {
                floats.push(float);
                continue;
            }
            let start = info.offset as usize;
            let driven_out = self.class[start..start + len as usize].iter().filter(|&&c| c == OTHER).count();
            if driven_out > info.keep as usize {
                floats.push(float);
            } else {
                self.put(i as u32, from, len, start as u32);
            }
        }
    }

    /// Places floats, longest first: into open stretches (best fit), then where the fewest other blocks have to go,
    /// at last in parts. `None` when there is no room, which the counts rule out.
    fn place(&mut self, mut floats: Vec<Float>) -> Option<()> {
        floats.sort_by_key(|f| (Reverse(f.len), f.from));
        let mut open = Vec::new();
        stretches(&self.class, |c| c == OPEN, &mut open);
        let mut holes = Holes::new(&open);
        let mut rest = Vec::new();
        for f in floats {
            match holes.take(f.len) {
                Some(start) => self.put(f.chain, f.from, f.len, start),
                None => rest.push(f),
            }
        }
        let mut longest = self.class.len();
        let mut first = 0;
        let batch = rest.len().div_ceil(MAX_SCANS).max(1);
        let mut too_long = Vec::new();
        while first < rest.len() {
            let mut n = batch.min(rest.len() - first);
            loop {
                let group = &rest[first..first + n];
                let total: usize = group.iter().map(|f| f.len as usize).sum();
                if total <= longest {
                    match self.cheapest_window(total) {
                        Ok(mut start) => {
                            for f in group {
                                self.put(f.chain, f.from, f.len, start as u32);
                                start += f.len as usize;
                            }
                            break;
                        }
                        Err(most) => longest = most,
                    }
                }
                if n == 1 {
                    too_long.push(rest[first]);
                    break;
                }
                n /= 2;
            }
            first += n;
        }
        if too_long.is_empty() {
            return Some(());
        }
        let mut usable = Vec::new();
        stretches(&self.class, |c| c != CLOSED, &mut usable);
        let mut holes = Holes::new(&usable);
        for f in too_long {
            let mut done = 0;
            while done < f.len {
                let left = f.len - done;
                let (start, len) = match holes.take(left) {
                    Some(start) => (start, left),
                    None => holes.take_longest()?,
                };
                self.put(f.chain, f.from + done, len, start);
                done += len;
            }
        }
        Some(())
    }

    /// Start of the `len` neighbouring cells that are not closed and hold the fewest other blocks (lowest start
    /// first), or the length of the longest stretch when it is shorter.
    fn cheapest_window(&self, len: usize) -> Result<usize, usize> {
        let mut best: Option<(usize, usize)> = None;
        let (mut from, mut held, mut longest) = (0, 0, 0);
        for (c, &class) in self.class.iter().enumerate() {
            if class == CLOSED {
                from = c + 1;
                held = 0;
                continue;
            }
            held += usize::from(class == OTHER);
            let span = c + 1 - from;
            longest = longest.max(span);
            if span > len {
                held -= usize::from(self.class[c - len] == OTHER);
            }
            if span >= len && best.is_none_or(|(least, _)| held < least) {
                best = Some((held, c + 1 - len));
            }
        }
        best.map(|b| b.1).ok_or(longest)
    }

    /// Block wanted at every cell, [`NONE`] where none is or where it is already.
    fn want(&self) -> Vec<u32> {
        let mut want = vec![NONE; self.class.len()];
        for part in &self.parts {
            let blocks = &self.chains.blocks[part.from as usize..(part.from + part.len) as usize];
            for (cell, &block) in (part.start..).zip(blocks) {
                if cell != block {
                    want[cell as usize] = block;
                }
            }
        }
        want
    }
}

/// Maximal stretches `(start, len)` of cells for which `yes` holds, ascending.
fn stretches(class: &[u8], yes: impl Fn(u8) -> bool, out: &mut Vec<(u32, u32)>) {
    let mut start = 0;
    for group in class.chunk_by(|&x, &y| yes(x) == yes(y)) {
        if group.first().is_some_and(|&c| yes(c)) {
            out.push((start, group.len() as u32));
        }
        start += group.len() as u32;
    }
}
