//! The vectors of x86-64: AVX2 (with FMA and F16C) and AVX-512 (F, BW, DQ, VL).

use std::arch::x86_64::*;
use std::mem::transmute;

use super::convert::Stored;
use super::simd::{Bytes, Matrix, MatrixMut, Simd};

/// Eight lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2;

/// Sixteen lanes; with or without AVX-512 BF16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512<const BF16: bool>;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
/// What turns an f16 with e4m3's fields moved into place into the value: exponent biases 15 and 7.
const E4M3_BIAS: f32 = 256.0;

/// Products of `q` and 8 rows, not yet summed over the lanes. `N` vectors a row where it is known, else `chunks`: with
/// constant distances the loads need no arithmetic.
#[inline(always)]
unsafe fn products_256<const N: usize>(q: *const f32, rows: *const f32, chunks: usize) -> [__m256; 8] {
    let chunks = if N > 0 { N } else { chunks };
    let stride = chunks.wrapping_mul(8);
    // SAFETY: as `Simd::dots`.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); 8];
        for chunk in 0..chunks {
            let at = chunk.wrapping_mul(8);
            let x = _mm256_loadu_ps(q.add(at));
            for (row, sum) in sums.iter_mut().enumerate() {
                let k = _mm256_loadu_ps(rows.add(row.wrapping_mul(stride).wrapping_add(at)));
                *sum = _mm256_fmadd_ps(x, k, *sum);
            }
        }
        sums
    }
}

/// Products of `q` and 16 rows, not yet summed over the lanes. `N` vectors a row where it is known, else `chunks`: with
/// constant distances the loads need no arithmetic.
#[inline(always)]
unsafe fn products_512<const N: usize>(q: *const f32, rows: *const f32, chunks: usize) -> [__m512; 16] {
    let chunks = if N > 0 { N } else { chunks };
    let stride = chunks.wrapping_mul(16);
    // SAFETY: as `Simd::dots`.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); 16];
        for chunk in 0..chunks {
            let at = chunk.wrapping_mul(16);
            let x = _mm512_loadu_ps(q.add(at));
            for (row, sum) in sums.iter_mut().enumerate() {
                let k = _mm512_loadu_ps(rows.add(row.wrapping_mul(stride).wrapping_add(at)));
                *sum = _mm512_fmadd_ps(x, k, *sum);
            }
        }
        sums
    }
}

/// [`products_512`] of bf16: pairs of products are summed within a lane.
#[inline(always)]
unsafe fn products_bf16<const N: usize>(q: *const u16, rows: *const u16, chunks: usize) -> [__m512; 16] {
    #[inline]
    #[target_feature(enable = "avx512bf16,avx512f")]
    unsafe fn multiply(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: 32 bf16 are 512 bits.
        unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b)) }
    }
    let chunks = if N > 0 { N } else { chunks };
    let stride = chunks.wrapping_mul(32);
    // SAFETY: as `Simd::dots_bf16`.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); 16];
        for chunk in 0..chunks {
            let at = chunk.wrapping_mul(32);
            let x = _mm512_loadu_si512(q.add(at).cast());
            for (row, sum) in sums.iter_mut().enumerate() {
                let k = _mm512_loadu_si512(rows.add(row.wrapping_mul(stride).wrapping_add(at)).cast());
                *sum = multiply(*sum, x, k);
            }
        }
        sums
    }
}

/// The sum of the lanes of each: pairs of rows, then fours, then the quarters.
#[inline(always)]
unsafe fn sum_rows(mut s: [__m512; 16]) -> __m512 {
    // SAFETY: AVX-512 (callers).
    unsafe {
        for i in (0..16).step_by(2) {
            s[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[i], s[i + 1]), _mm512_unpackhi_ps(s[i], s[i + 1]));
        }
        for i in (0..16).step_by(4) {
            let (a, b) = (_mm512_castps_pd(s[i]), _mm512_castps_pd(s[i + 2]));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            s[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        }
        for (i, step) in [(0, 4), (8, 4), (0, 8)] {
            let (a, b) = (s[i], s[i + step]);
            let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            s[i] = _mm512_add_ps(even, odd);
        }
        s[0]
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const COLUMNS: usize = 2;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        // SAFETY: the CPU has AVX2 (trait); the same holds for all below.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: FMA (trait).
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(v: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_round_ps::<NEAREST>(v) }
    }
    #[inline(always)]
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent))
        }
    }
    #[inline(always)]
    unsafe fn select_less(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        // SAFETY: AVX2 (trait).
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        // SAFETY: AVX2 (trait).
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        // SAFETY: AVX2 (trait).
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe {
            let code = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            let low = _mm_and_si128(code, _mm_set1_epi16(0x7f));
            let sign = _mm_slli_epi16::<8>(_mm_xor_si128(code, low));
            let nan = _mm_cmpeq_epi16(low, _mm_set1_epi16(0x7f));
            // All bits set are a quiet NaN in f16.
            let half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16::<7>(low), sign), nan);
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(E4M3_BIAS))
        }
    }
    #[inline(always)]
    unsafe fn dots(q: *const f32, rows: *const f32, chunks: usize) -> Self::V {
        // SAFETY: `q` and each of the rows hold `chunks` vectors (trait).
        unsafe {
            let mut s = match chunks {
                8 => products_256::<8>(q, rows, chunks),
                16 => products_256::<16>(q, rows, chunks),
                _ => products_256::<0>(q, rows, chunks),
            };
            // Pairs of rows, then fours, then the halves.
            for i in (0..8).step_by(2) {
                s[i] = _mm256_add_ps(_mm256_unpacklo_ps(s[i], s[i + 1]), _mm256_unpackhi_ps(s[i], s[i + 1]));
            }
            for i in (0..8).step_by(4) {
                let (a, b) = (_mm256_castps_pd(s[i]), _mm256_castps_pd(s[i + 2]));
                let (low, high) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
                s[i] = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
            }
            let (x, y) = (s[0], s[4]);
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(x, y), _mm256_permute2f128_ps::<0x31>(x, y))
        }
    }
    #[inline(always)]
    unsafe fn transpose(source: *const f32, from: usize, target: *mut f32, to: usize) {
        // SAFETY: both squares are valid (trait).
        unsafe {
            let (mut r, mut t, mut u) = ([_mm256_setzero_ps(); 8], [_mm256_setzero_ps(); 8], [_mm256_setzero_ps(); 8]);
            for (i, row) in r.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(source.add(i * from));
            }
            for i in (0..8).step_by(2) {
                t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            // u[4 * g + c]: column c (and c + 4 in the upper half) of rows 4g..4g+3.
            for i in (0..8).step_by(2) {
                let first = i / 4 * 4 + i % 4 / 2;
                let (a, b) = (_mm256_castps_pd(t[first]), _mm256_castps_pd(t[first + 2]));
                u[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
                u[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
            }
            for c in 0..4 {
                _mm256_storeu_ps(target.add(c * to), _mm256_permute2f128_ps::<0x20>(u[c], u[c + 4]));
                _mm256_storeu_ps(target.add((c + 4) * to), _mm256_permute2f128_ps::<0x31>(u[c], u[c + 4]));
            }
        }
    }
    #[inline(always)]
    unsafe fn accumulate<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut) {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn once<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut) {
            // SAFETY: the caller's.
            unsafe { super::matrix::accumulate::<Avx2, E>(shape, a, b, c) }
        }
        // SAFETY: the caller's.
        unsafe { once::<E>(shape, a, b, c) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    const BF16: bool = BF16;
    const LANES: usize = 16;
    const COLUMNS: usize = 4;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        // SAFETY: the CPU has AVX-512 (trait); the same holds for all below.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(v: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_roundscale_ps::<NEAREST>(v) }
    }
    #[inline(always)]
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_scalef_ps(p, n) }
    }
    #[inline(always)]
    unsafe fn select_less(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        // SAFETY: AVX-512 (trait).
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        // SAFETY: AVX-512 (trait).
        unsafe {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            Avx2::largest(eight)
        }
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        // SAFETY: AVX-512 (trait).
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            Avx2::sum(eight)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: valid for LANES elements (trait).
        unsafe {
            let code = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let low = _mm256_and_si256(code, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(code, low));
            let nan = _mm256_cmpeq_epi16(low, _mm256_set1_epi16(0x7f));
            // All bits set are a quiet NaN in f16.
            let half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16::<7>(low), sign), nan);
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(E4M3_BIAS))
        }
    }
    #[inline(always)]
    unsafe fn dots(q: *const f32, rows: *const f32, chunks: usize) -> Self::V {
        // SAFETY: `q` and each of the rows hold `chunks` vectors (trait).
        unsafe {
            let s = match chunks {
                4 => products_512::<4>(q, rows, chunks),
                8 => products_512::<8>(q, rows, chunks),
                _ => products_512::<0>(q, rows, chunks),
            };
            sum_rows(s)
        }
    }
    #[inline(always)]
    unsafe fn dots_bf16(q: *const u16, rows: *const u16, chunks: usize) -> Self::V {
        // SAFETY: the CPU has AVX-512 BF16 where this is called (trait); pointers as `Simd::dots`.
        unsafe {
            sum_rows(match chunks {
                2 => products_bf16::<2>(q, rows, chunks),
                4 => products_bf16::<4>(q, rows, chunks),
                _ => products_bf16::<0>(q, rows, chunks),
            })
        }
    }
    #[inline(always)]
    unsafe fn transpose(source: *const f32, from: usize, target: *mut f32, to: usize) {
        // SAFETY: both squares are valid (trait).
        unsafe {
            let (mut r, mut t, mut u) =
                ([_mm512_setzero_ps(); 16], [_mm512_setzero_ps(); 16], [_mm512_setzero_ps(); 16]);
            for (i, row) in r.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(source.add(i * from));
            }
            for i in (0..16).step_by(2) {
                t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
            }
            // u[4 * g + c]: columns c, c + 4, c + 8, c + 12 of rows 4g..4g+3, one per quarter.
            for i in (0..16).step_by(2) {
                let first = i / 4 * 4 + i % 4 / 2;
                let (a, b) = (_mm512_castps_pd(t[first]), _mm512_castps_pd(t[first + 2]));
                u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
            for c in 0..4 {
                let (a, b, d, e) = (u[c], u[c + 4], u[c + 8], u[c + 12]);
                let (ab, de) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(d, e));
                _mm512_storeu_ps(target.add(c * to), _mm512_shuffle_f32x4::<0x88>(ab, de));
                _mm512_storeu_ps(target.add((c + 8) * to), _mm512_shuffle_f32x4::<0xdd>(ab, de));
                let (ab, de) = (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(d, e));
                _mm512_storeu_ps(target.add((c + 4) * to), _mm512_shuffle_f32x4::<0x88>(ab, de));
                _mm512_storeu_ps(target.add((c + 12) * to), _mm512_shuffle_f32x4::<0xdd>(ab, de));
            }
        }
    }
    #[inline(always)]
    unsafe fn accumulate<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn once<E: Stored>(shape: (usize, usize, usize), a: Matrix, b: Bytes, c: MatrixMut) {
            // SAFETY: the caller's.
            unsafe { super::matrix::accumulate::<Avx512<false>, E>(shape, a, b, c) }
        }
        // SAFETY: the caller's.
        unsafe { once::<E>(shape, a, b, c) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
