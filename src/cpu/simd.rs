//! Vectors of f32: one trait, an implementation per instruction set, and the portable one that every machine has.
//!
//! Kernels are generic over [`Simd`], always inlined, and entered through a function that enables the instruction set
//! (`dispatch!` in `level.rs`), so that each is compiled once per level.

use super::convert::Stored;

/// Lanes of f32 and what the kernels do with them.
///
/// # Safety
///
/// All functions: the CPU has the instruction set, pointers are valid for [`Simd::LANES`] elements (no alignment
/// asked).
pub(super) trait Simd: Copy {
    /// Elements of a vector.
    const LANES: usize;
    /// Vectors across a row of a tile of [`super::matrix::accumulate`]: what leaves registers for 6 rows.
    const COLUMNS: usize;
    /// A vector.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the machine can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger, lane by lane; `b` where either is not a number.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number, ties to even.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `p * 2^n` for whole `n` within -126..=128 and `p` within 0.5..2.
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V;
    /// `yes` where `a < b`, else `no` (also where either is not a number).
    unsafe fn select_less(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// The largest lane (any lane, where one is not a number).
    unsafe fn largest(v: Self::V) -> f32;
    /// The sum of the lanes, in a fixed order.
    unsafe fn sum(v: Self::V) -> f32;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    /// Dot products of `q` with [`Simd::LANES`] rows that lie one behind the other, each `chunks` vectors long.
    unsafe fn dots(q: *const f32, rows: *const f32, chunks: usize) -> Self::V;
    /// Whether [`Simd::dots_bf16`] may be called.
    const BF16: bool = false;
    /// As [`Simd::dots`], of bf16 with bf16: rows of `chunks` times twice the lanes. Subnormals count as 0.
    unsafe fn dots_bf16(_: *const u16, _: *const u16, _: usize) -> Self::V {
        // SAFETY: no pointer is involved.
        unsafe { Self::splat(f32::NAN) }
    }
    /// Transposes a square of [`Simd::LANES`] rows, `from` elements apart, into rows `to` elements apart.
    unsafe fn transpose(source: *const f32, from: usize, target: *mut f32, to: usize);
    /// [`super::matrix::accumulate`], compiled once per instruction set.
    unsafe fn accumulate<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut);
    /// Asks for the cache line at `p`, which need not be valid.
    unsafe fn prefetch(p: *const u8);
}

/// Where a matrix starts, and the elements from a row to the next.
pub(super) type Matrix = (*const f32, usize);
/// Where a matrix of stored elements starts, and the bytes from a row to the next.
pub(super) type Bytes = (*const u8, usize);
/// The same as [`Matrix`], to be written.
pub(super) type MatrixMut = (*mut f32, usize);

/// Plain Rust, which the compiler vectorises for whatever the machine surely has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

const N: usize = 8;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; N] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    const LANES: usize = N;
    const COLUMNS: usize = 1;
    type V = [f32; N];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for LANES elements (trait).
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(v: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 leaves no room for a fraction; right for all |v| < 2^22, the only ones asked for.
        const MAGIC: f32 = 12_582_912.0;
        each(|i| (v[i] + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V {
        each(|i| f32::from_bits(p[i].to_bits().wrapping_add((n[i] as i32 as u32) << 23)))
    }
    #[inline(always)]
    unsafe fn select_less(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        let raw = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        each(|i| super::convert::from_bf16(raw[i]))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        let raw = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        each(|i| super::convert::from_f16(raw[i]))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        let raw = unsafe { p.cast::<[u8; N]>().read_unaligned() };
        each(|i| super::convert::from_e4m3(raw[i]))
    }
    #[inline(always)]
    unsafe fn dots(q: *const f32, rows: *const f32, chunks: usize) -> Self::V {
        let mut sums = [0.0; N];
        for (row, total) in sums.iter_mut().enumerate() {
            let mut lanes = [0.0; N];
            for chunk in 0..chunks {
                // SAFETY: `q` and each of the rows hold `chunks` vectors (trait).
                unsafe {
                    let k = Self::load(rows.add((row * chunks + chunk) * N));
                    lanes = Self::fma(Self::load(q.add(chunk * N)), k, lanes);
                }
            }
            // SAFETY: no pointer is involved.
            *total = unsafe { Self::sum(lanes) };
        }
        sums
    }
    #[inline(always)]
    unsafe fn transpose(source: *const f32, from: usize, target: *mut f32, to: usize) {
        for i in 0..N {
            for j in 0..N {
                // SAFETY: both squares are valid (trait).
                unsafe { *target.add(j * to + i) = *source.add(i * from + j) }
            }
        }
    }
    #[inline(never)]
    unsafe fn accumulate<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut) {
        // SAFETY: the caller's.
        unsafe { super::matrix::accumulate::<Self, E>(shape, a, b, c) }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
