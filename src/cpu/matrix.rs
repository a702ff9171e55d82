//! Product of a few rows with a tile, held in registers.

use super::convert::Stored;
use super::simd::{Bytes, Matrix, MatrixMut, Simd};

/// Most rows whose sums fit in the registers beside a row of the tile.
pub(super) const ROWS: usize = 6;

/// `c[rows][columns] += a[rows][depth] * b[depth][columns]`; columns are a multiple of the lanes, elements of
/// `b` are widened as they are read. Each element of `c` is summed in order of depth, whatever rows are beside it.
///
/// # Safety
///
/// The CPU has `S`; `a`, `b` and `c` are valid for these shapes.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn accumulate<S: Simd, E: Stored>(
    (rows, depth, columns): (usize, usize, usize),
    a: Matrix,
    b: Bytes,
    c: MatrixMut,
) {
    let mut row = 0;
    while row < rows {
        // SAFETY: rows below `rows` (caller).
        unsafe {
            let (a, c) = ((a.0.add(row * a.1), a.1), (c.0.add(row * c.1), c.1));
            match rows - row {
                1 => strip::<S, E, 1>(depth, columns, a, b, c),
                2 => strip::<S, E, 2>(depth, columns, a, b, c),
                3 => strip::<S, E, 3>(depth, columns, a, b, c),
                4 => strip::<S, E, 4>(depth, columns, a, b, c),
                5 => strip::<S, E, 5>(depth, columns, a, b, c),
                _ => strip::<S, E, ROWS>(depth, columns, a, b, c),
            }
        }
        row += ROWS;
    }
}

#[inline(always)]
#[allow(unsafe_code)]
unsafe fn strip<S: Simd, E: Stored, const R: usize>(depth: usize, columns: usize, a: Matrix, b: Bytes, c: MatrixMut) {
    let mut column = 0;
    while column < columns {
        let left = (columns - column) / S::LANES;
        // SAFETY: columns below `columns` (caller).
        unsafe {
            let (b, c) = ((b.0.add(column * E::ELEMENT.bytes()), b.1), (c.0.add(column), c.1));
            let taken = if S::COLUMNS >= 4 && left >= 4 {
                tile::<S, E, R, 4>(depth, a, b, c);
                4
            } else if S::COLUMNS >= 2 && left >= 2 {
                tile::<S, E, R, 2>(depth, a, b, c);
                2
            } else {
                tile::<S, E, R, 1>(depth, a, b, c);
                1
            };
            column += taken * S::LANES;
        }
    }
}

#[inline(always)]
#[allow(unsafe_code)]
unsafe fn tile<S: Simd, E: Stored, const R: usize, const C: usize>(depth: usize, a: Matrix, b: Bytes, c: MatrixMut) {
    // SAFETY: R rows and C vectors of columns are valid (caller).
    unsafe {
        let mut sums = [[S::splat(0.0); C]; R];
        for (i, row) in sums.iter_mut().enumerate() {
            for (j, sum) in row.iter_mut().enumerate() {
                *sum = S::load(c.0.add(i * c.1 + j * S::LANES));
            }
        }
        // By pointers: indices would be checked for overflow at every step.
        let mut lines = [a.0; R];
        for (i, line) in lines.iter_mut().enumerate() {
            *line = a.0.add(i * a.1);
        }
        let mut from = b.0;
        for k in 0..depth {
            let mut values = [S::splat(0.0); C];
            for (j, v) in values.iter_mut().enumerate() {
                *v = E::load::<S>(from.add(j * S::LANES * E::ELEMENT.bytes()));
            }
            for (row, line) in sums.iter_mut().zip(lines) {
                let x = S::splat(*line.add(k));
                for (sum, v) in row.iter_mut().zip(values) {
                    *sum = S::fma(x, v, *sum);
                }
            }
            from = from.add(b.1);
        }
        for (i, row) in sums.iter().enumerate() {
            for (j, sum) in row.iter().enumerate() {
                S::store(c.0.add(i * c.1 + j * S::LANES), *sum);
            }
        }
    }
}
