//! Block copies as a simultaneous assignment `new[dst] = old[src]`: hazards, and an order that has none.

use crate::error::{Error, Result};

/// Names the temporary in an ordered group: a register of the kernel, a buffer on the CPU.
pub const TEMPORARY: i32 = -1;

/// Copies in groups that touch no common block but for blocks that are only read. Within a group they run in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ordered {
    /// `(dst, src)` of every copy; [`TEMPORARY`] stands for the temporary of the group.
    pub ops: Vec<(i32, i32)>,
    /// Group `g` is `ops[first[g]..first[g + 1]]`.
    pub first: Vec<u32>,
}

fn same_length(src: &[i32], dst: &[i32]) -> Result<()> {
    if src.len() == dst.len() {
        return Ok(());
    }
    let detail = format!("{} sources for {} destinations: must be as many", src.len(), dst.len());
    Err(Error::invalid("src", src.len(), detail))
}

/// Positions of the destinations in ascending order of id.
fn by_destination(dst: &[i32]) -> Result<Vec<u32>> {
    let mut order: Vec<u32> = (0..dst.len() as u32).collect();
    order.sort_unstable_by_key(|&i| (dst[i as usize], i));
    match order.windows(2).find(|pair| dst[pair[0] as usize] == dst[pair[1] as usize]) {
        Some(pair) => {
            let id = dst[pair[0] as usize];
            Err(Error::invalid("dst", id, format!("block {id} is the destination of two copies")))
        }
        None => Ok(order),
    }
}

fn find(order: &[u32], dst: &[i32], id: i32) -> Option<usize> {
    order.binary_search_by_key(&id, |&i| dst[i as usize]).ok().map(|at| order[at] as usize)
}

/// Refuses copies that no single launch may do in any order: a destination named twice or, unless `allow_overlap`, one
/// that is a source too. O(n log n).
///
/// # Errors
/// [`Error::InvalidArgument`] with the block.
pub fn check(src: &[i32], dst: &[i32], allow_overlap: bool) -> Result<()> {
    same_length(src, dst)?;
    let order = by_destination(dst)?;
    if allow_overlap {
        return Ok(());
    }
    match src.iter().find(|&&id| find(&order, dst, id).is_some()) {
        Some(id) => Err(Error::invalid("dst", id, format!("block {id} is a source and a destination of one launch"))),
        None => Ok(()),
    }
}

/// Orders any assignment so that every block is read before it is overwritten ("parallel copy" of compilers). Copies of a
/// block onto itself are left out; a cycle takes one copy more, through the temporary. O(n log n).
///
/// # Errors
/// [`Error::InvalidArgument`] when a destination is named twice.
pub fn order(src: &[i32], dst: &[i32]) -> Result<Ordered> {
    same_length(src, dst)?;
    let sorted = by_destination(dst)?;
    let n = dst.len();
    // The copy that overwrites what copy `i` reads, if any. Copies of a block onto itself take no part.
    let moved = |i: usize| src[i] != dst[i];
    let writer: Vec<Option<usize>> =
        (0..n).map(|i| find(&sorted, dst, src[i]).filter(|&w| moved(i) && moved(w))).collect();
    let mut readers = vec![0u32; n];
    let mut groups = Groups::new(n);
    for (i, writer) in writer.iter().enumerate() {
        if let Some(writer) = *writer {
            readers[writer] += 1;
            groups.join(i, writer);
        }
    }

    let mut done: Vec<bool> = (0..n).map(|i| !moved(i)).collect();
    let mut sequence: Vec<(usize, (i32, i32))> = Vec::with_capacity(n);
    let mut ready: Vec<usize> = (0..n).rev().filter(|&i| moved(i) && readers[i] == 0).collect();
    while let Some(i) = ready.pop() {
        done[i] = true;
        sequence.push((groups.root(i), (dst[i], src[i])));
        if let Some(writer) = writer[i] {
            readers[writer] -= 1;
            if readers[writer] == 0 {
                ready.push(writer);
            }
        }
    }
    // What is left are cycles in which every block is read once.
    for start in 0..n {
        if done[start] {
            continue;
        }
        let group = groups.root(start);
        sequence.push((group, (TEMPORARY, dst[start])));
        let mut i = start;
        loop {
            done[i] = true;
            match writer[i].filter(|&next| next != start) {
                Some(next) => {
                    sequence.push((group, (dst[i], src[i])));
                    i = next;
                }
                None => {
                    sequence.push((group, (dst[i], TEMPORARY)));
                    break;
                }
            }
        }
    }
    sequence.sort_by_key(|&(group, _)| group);
    let mut ordered = Ordered { ops: Vec::with_capacity(sequence.len()), first: Vec::new() };
    let mut last = None;
    for (group, op) in sequence {
        if last != Some(group) {
            ordered.first.push(ordered.ops.len() as u32);
            last = Some(group);
        }
        ordered.ops.push(op);
    }
    ordered.first.push(ordered.ops.len() as u32);
    Ok(ordered)
}

/// Disjoint sets of copies; the root is the lowest position.
struct Groups(Vec<usize>);

impl Groups {
    fn new(n: usize) -> Self {
        Self((0..n).collect())
    }

    fn root(&mut self, mut i: usize) -> usize {
        while self.0[i] != i {
            self.0[i] = self.0[self.0[i]];
            i = self.0[i];
        }
        i
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.0[a.max(b)] = a.min(b);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    fn run(ordered: &Ordered, blocks: &mut HashMap<i32, i32>) {
        for group in ordered.first.windows(2) {
            let mut temporary = None;
            for &(dst, src) in &ordered.ops[group[0] as usize..group[1] as usize] {
                let value = if src == TEMPORARY { temporary.unwrap() } else { blocks[&src] };
                if dst == TEMPORARY {
                    temporary = Some(value);
                } else {
                    blocks.insert(dst, value);
                }
            }
        }
    }

    fn assignments() -> impl Strategy<Value = (Vec<i32>, Vec<i32>)> {
        (1i32..40).prop_flat_map(|n| {
            let dst = proptest::sample::subsequence((0..n).collect::<Vec<_>>(), 0..=n as usize).prop_shuffle();
            dst.prop_flat_map(move |dst| (proptest::collection::vec(0..n, dst.len()), Just(dst)))
        })
    }

    fn permutations() -> impl Strategy<Value = (Vec<i32>, Vec<i32>)> {
        (1i32..40)
            .prop_flat_map(|n| (Just((0..n).collect::<Vec<_>>()).prop_shuffle(), Just((0..n).collect::<Vec<_>>())))
    }

    proptest! {
        #[test]
        fn an_ordered_assignment_does_what_was_asked((src, dst) in prop_oneof![assignments(), permutations()]) {
            let ordered = order(&src, &dst).unwrap();
            let old: HashMap<i32, i32> = (0..40).map(|id| (id, id)).collect();
            let mut want = old.clone();
            for (s, d) in src.iter().zip(&dst) {
                want.insert(*d, old[s]);
            }
            // Groups are independent: any order of them, here the reverse too.
            let mut got = old.clone();
            run(&ordered, &mut got);
            prop_assert_eq!(&got, &want);
            let mut back = Ordered::default();
            for group in ordered.first.windows(2).rev() {
                back.first.push(back.ops.len() as u32);
                back.ops.extend(&ordered.ops[group[0] as usize..group[1] as usize]);
            }
            back.first.push(back.ops.len() as u32);
            let mut got = old;
            run(&back, &mut got);
            prop_assert_eq!(got, want);

            let moved = src.iter().zip(&dst).filter(|(s, d)| s != d).count();
            prop_assert!(ordered.ops.len() <= moved + moved / 2);
            // No group writes what another reads or writes.
            let written: Vec<HashSet<i32>> = ordered.first.windows(2)
                .map(|g| ordered.ops[g[0] as usize..g[1] as usize].iter().map(|op| op.0).filter(|&d| d >= 0).collect())
                .collect();
            for (g, bounds) in ordered.first.windows(2).enumerate() {
                for &(d, s) in &ordered.ops[bounds[0] as usize..bounds[1] as usize] {
                    for (other, set) in written.iter().enumerate() {
                        prop_assert!(other == g || (!set.contains(&d) && !set.contains(&s)));
                    }
                }
            }
        }

        #[test]
        fn a_check_finds_every_overlap((src, dst) in assignments()) {
            let overlap = src.iter().any(|s| dst.contains(s));
            prop_assert_eq!(check(&src, &dst, false).is_err(), overlap);
            prop_assert!(check(&src, &dst, true).is_ok());
        }
    }

    #[test]
    fn what_a_single_launch_cannot_do_is_refused_by_name() {
        assert!(check(&[1, 2], &[3, 3], true).unwrap_err().to_string().contains("block 3 is the destination of two"));
        assert!(check(&[1, 2], &[2, 5], false).unwrap_err().to_string().contains("block 2 is a source and a dest"));
        assert!(check(&[1], &[2, 3], true).unwrap_err().to_string().contains("1 sources for 2 destinations"));
        assert!(order(&[1, 2], &[3, 3]).is_err());
    }

    #[test]
    fn a_swap_goes_through_the_temporary_and_fan_out_runs_side_by_side() {
        assert_eq!(order(&[1, 2], &[2, 1]).unwrap().ops, [(-1, 2), (2, 1), (1, -1)]);
        assert_eq!(order(&[7, 7, 7], &[1, 2, 3]).unwrap().first, [0, 1, 2, 3]);
        assert_eq!(order(&[4], &[4]).unwrap(), Ordered { ops: vec![], first: vec![0] });
    }
}
