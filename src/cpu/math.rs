//! Powers of two and the softmax of one row, over vectors.

use super::simd::Simd;

/// Below it 2^x is taken for 0: what it leaves out is less than 1.2e-38.
const SMALLEST: f32 = -126.0;

/// Coefficients of 2^f for |f| <= 1/2 (least squares on Chebyshev nodes with the errors levelled): off by 1.7e-8 at
/// most, 1e-7 with the rounding of f32.
#[allow(clippy::excessive_precision)]
const POWER: [f32; 6] = [
    1.547_629_929_9e-4,
    1.340_026_967_2e-3,
    9.618_003_852_6e-3,
    5.550_327_897_0e-2,
    2.402_265_071_8e-1,
    6.931_471_824_6e-1,
];

/// 2^x for x up to 127; 0 below -126; NaN stays NaN.
///
/// # Safety
///
/// The CPU has `S`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // SAFETY: no pointer is involved.
    unsafe {
        let n = S::round(x);
        let f = S::sub(x, n);
        let mut p = S::splat(POWER[0]);
        for &coefficient in &POWER[1..] {
            p = S::fma(p, f, S::splat(coefficient));
        }
        p = S::fma(p, f, S::splat(1.0));
        S::select_less(x, S::splat(SMALLEST), S::splat(0.0), S::scale2(p, n))
    }
}

/// 2^x of one number, by the same steps.
///
/// # Safety
///
/// The CPU has `S`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn exp2_one<S: Simd>(x: f32) -> f32 {
    // SAFETY: no pointer is involved.
    unsafe { S::largest(exp2::<S>(S::splat(x))) }
}

/// Below it tanh is taken by its series: 1 - 2 / (1 + e^2x) would lose all digits of a small x, and a large soft cap
/// would multiply what was lost.
const SMALL: f32 = 0.625;

/// (tanh x - x) / x^3 as a polynomial of x^2 for |x| < 0.625 (the coefficients of Cephes' tanhf, by S. Moshier).
#[allow(clippy::excessive_precision)]
const TANH: [f32; 5] =
    [-5.704_988_727_45e-3, 2.063_908_879_54e-2, -5.373_971_555_31e-2, 1.333_144_220_36e-1, -3.333_328_194_22e-1];

/// tanh, within 2e-7 of it relatively.
///
/// # Safety
///
/// The CPU has `S`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: no pointer is involved.
    unsafe {
        let (one, two, top) = (S::splat(1.0), S::splat(2.0), S::splat(126.0));
        let power = S::mul(x, S::splat(2.0 * std::f32::consts::LOG2_E));
        let power = S::select_less(top, power, top, power);
        let large = S::sub(one, S::div(two, S::add(one, exp2::<S>(power))));
        let square = S::mul(x, x);
        let mut p = S::splat(TANH[0]);
        for &coefficient in &TANH[1..] {
            p = S::fma(p, square, S::splat(coefficient));
        }
        let small = S::fma(S::mul(p, square), x, x);
        S::select_less(square, S::splat(SMALL * SMALL), small, large)
    }
}

/// What was gathered of one row so far: its largest logit (base 2) and the sum of the weights relative to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) top: f32,
    pub(super) sum: f32,
}

impl Running {
    pub(super) const NONE: Self = Self { top: f32::NEG_INFINITY, sum: 0.0 };

    /// The top, or 0 where there is none, so that nothing subtracts infinities.
    #[inline(always)]
    pub(super) fn shift(self) -> f32 {
        if self.top == f32::NEG_INFINITY { 0.0 } else { self.top }
    }
}

/// Turns `n` logits of base 2 (a multiple of the lanes, dead ones minus infinity) into weights, in place, and counts
/// them in. Returns what the row's earlier output is to be multiplied by.
///
/// # Safety
///
/// The CPU has `S`; `row` is valid for `n`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn weigh<S: Simd>(row: *mut f32, n: usize, running: &mut Running) -> f32 {
    // SAFETY: within `n` (caller).
    unsafe {
        let mut top = S::load(row);
        for i in (S::LANES..n).step_by(S::LANES) {
            top = S::max(top, S::load(row.add(i)));
        }
        let top = S::largest(top);
        let mut factor = 1.0;
        if top > running.top {
            factor = exp2_one::<S>(running.top - top);
            running.top = top;
        }
        let shift = S::splat(running.shift());
        let mut sum = S::splat(0.0);
        for i in (0..n).step_by(S::LANES) {
            let weight = exp2::<S>(S::sub(S::load(row.add(i)), shift));
            S::store(row.add(i), weight);
            sum = S::add(sum, weight);
        }
        running.sum = running.sum * factor + S::sum(sum);
        factor
    }
}

/// Multiplies `n` elements (a multiple of the lanes).
///
/// # Safety
///
/// The CPU has `S`; `row` is valid for `n`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn rescale<S: Simd>(row: *mut f32, n: usize, factor: f32) {
    // SAFETY: within `n` (caller).
    unsafe {
        let factors = S::splat(factor);
        for i in (0..n).step_by(S::LANES) {
            S::store(row.add(i), S::mul(S::load(row.add(i)), factors));
        }
    }
}
