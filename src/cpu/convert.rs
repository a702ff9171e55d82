//! Element types of keys and values: what they are as f32, and back.

use super::simd::Simd;

/// Type of a stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// 16-bit float, 5 bits of exponent.
    F16,
    /// 16-bit float, 8 bits of exponent.
    Bf16,
    /// 8-bit float, 4 bits of exponent; no infinity, one NaN.
    E4m3,
}

impl Element {
    /// The type of a name as `kernels/layout.py` spells it.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "float32" => Self::F32,
            "float16" => Self::F16,
            "bfloat16" => Self::Bf16,
            "float8_e4m3" => Self::E4m3,
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }
}

/// Largest magnitude of e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// A bf16 as f32.
#[inline(always)]
pub fn from_bf16(raw: u16) -> f32 {
    f32::from_bits(u32::from(raw) << 16)
}

/// An f16 as f32.
#[inline(always)]
pub fn from_f16(raw: u16) -> f32 {
    let sign = u32::from(raw & 0x8000) << 16;
    let rest = u32::from(raw & 0x7fff);
    let bias = if rest >= 0x7c00 { 224 << 23 } else { 112 << 23 };
    let normal = (rest << 13) + bias;
    let subnormal = (rest as f32 * (1.0 / 16_777_216.0)).to_bits();
    f32::from_bits(sign | if rest < 0x400 { subnormal } else { normal })
}

/// An e4m3 as f32.
#[inline(always)]
pub fn from_e4m3(raw: u8) -> f32 {
    let sign = u32::from(raw & 0x80) << 24;
    let rest = u32::from(raw & 0x7f);
    let normal = (rest << 20) + (120 << 23);
    let subnormal = (rest as f32 * (1.0 / 512.0)).to_bits();
    let finite = if rest < 8 { subnormal } else { normal };
    f32::from_bits(sign | if rest == 0x7f { 0x7fc0_0000 } else { finite })
}

/// The nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Wraps for NaN alone, where it is not taken.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// The nearest f16, ties to even; NaN stays NaN, too large becomes infinite.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let rest = bits & 0x7fff_ffff;
    let normal = rest.wrapping_add(0xfff + ((rest >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
    // The unit in the last place of a number in 0.5..1 is the smallest f16.
    let subnormal = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if rest < 0x3880_0000 { subnormal } else { normal };
    let large = if rest >= 0x477f_f000 { 0x7c00 } else { finite };
    (sign | if rest > 0x7f80_0000 { 0x7e00 } else { large }) as u16
}

/// The nearest e4m3, ties to even; NaN is 0x7f, beyond 448 is 448 (as `__NV_SATFINITE`).
#[inline(always)]
pub fn to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) & 0x80;
    let rest = bits & 0x7fff_ffff;
    let normal = rest.wrapping_add(0x7_ffff + ((rest >> 20) & 1)).wrapping_sub(120 << 23) >> 20;
    // The unit in the last place of a number in 16384..32768 is the smallest e4m3.
    let subnormal = (f32::from_bits(rest) + 16_384.0).to_bits().wrapping_sub(16_384.0f32.to_bits());
    let finite = if rest < 0x3c80_0000 { subnormal } else { normal };
    let clipped = if rest >= E4M3_MAX.to_bits() { 0x7e } else { finite };
    (if rest > 0x7f80_0000 { 0x7f } else { sign | clipped }) as u8
}

/// An element type as a type: kernels are compiled once for each.
#[allow(unsafe_code)]
pub(super) trait Stored: Copy + Send + Sync {
    /// The type.
    const ELEMENT: Element;

    /// Reads a vector.
    ///
    /// # Safety
    ///
    /// As [`Simd`]: the CPU has it, `p` is valid for its lanes.
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    /// Reads one element.
    ///
    /// # Safety
    ///
    /// `p` is valid for it.
    unsafe fn one(p: *const u8) -> f32;
}

macro_rules! stored {
    ($name:ident, $element:ident, $raw:ty, $load:ident, $one:expr) => {
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name;

        #[allow(unsafe_code)]
        impl Stored for $name {
            const ELEMENT: Element = Element::$element;

            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const u8) -> S::V {
                // SAFETY: valid for the lanes (trait).
                unsafe { S::$load(p.cast()) }
            }
            #[inline(always)]
            unsafe fn one(p: *const u8) -> f32 {
                // SAFETY: valid for one element (trait).
                $one(unsafe { p.cast::<$raw>().read_unaligned() })
            }
        }
    };
}
stored!(F32, F32, f32, load, std::convert::identity);
stored!(F16, F16, u16, load_f16, from_f16);
stored!(Bf16, Bf16, u16, load_bf16, from_bf16);
stored!(E4m3, E4m3, u8, load_e4m3, from_e4m3);

/// Reads `n` elements (times `factor`, which is 1 but for e4m3) into f32 and fills up to `padded` (a multiple of the
/// lanes) with zeros.
///
/// # Safety
///
/// The CPU has `S`; `source` holds `n` elements and `target` takes `padded`.
#[inline(always)]
#[allow(unsafe_code)]
pub(super) unsafe fn widen<S: Simd, E: Stored>(
    source: *const u8,
    factor: f32,
    n: usize,
    target: *mut f32,
    padded: usize,
) {
    let whole = n / S::LANES * S::LANES;
    // By pointers: indices would be checked for overflow at every step.
    // SAFETY: within the bounds the caller gives.
    unsafe {
        let factors = S::splat(factor);
        let step = S::LANES * E::ELEMENT.bytes();
        let (mut from, mut to) = (source, target);
        let (stop, last) = (target.add(whole), target.add(n));
        let four = target.add(whole / (4 * S::LANES) * (4 * S::LANES));
        while to < four {
            for _ in 0..4 {
                S::store(to, scaled::<S, E>(from, factors));
                (from, to) = (from.add(step), to.add(S::LANES));
            }
        }
        while to < stop {
            S::store(to, scaled::<S, E>(from, factors));
            (from, to) = (from.add(step), to.add(S::LANES));
        }
        while to < last {
            *to = E::one(from) * factor;
            (from, to) = (from.add(E::ELEMENT.bytes()), to.add(1));
        }
        while to < target.add(padded) {
            *to = 0.0;
            to = to.add(1);
        }
    }
}

/// A vector times its factors, where the type has any.
#[inline(always)]
#[allow(unsafe_code)]
unsafe fn scaled<S: Simd, E: Stored>(from: *const u8, factors: S::V) -> S::V {
    // SAFETY: the caller's.
    unsafe {
        let v = E::load::<S>(from);
        if matches!(E::ELEMENT, Element::E4m3) { S::mul(v, factors) } else { v }
    }
}

/// [`widen`] of a type known at run time, without vectors.
///
/// # Safety
///
/// `source` holds `target.len()` elements.
#[allow(unsafe_code)]
pub(super) unsafe fn widen_any(element: Element, source: *const u8, target: &mut [f32]) {
    let n = target.len();
    // SAFETY: `source` holds n elements (caller).
    unsafe {
        match element {
            Element::F32 => std::ptr::copy_nonoverlapping(source, target.as_mut_ptr().cast::<u8>(), 4 * n),
            Element::F16 => (0..n).for_each(|i| target[i] = F16::one(source.add(2 * i))),
            Element::Bf16 => (0..n).for_each(|i| target[i] = Bf16::one(source.add(2 * i))),
            Element::E4m3 => (0..n).for_each(|i| target[i] = E4m3::one(source.add(i))),
        }
    }
}

/// Writes f32 as the nearest elements of a type.
///
/// # Safety
///
/// `target` takes `source.len()` elements.
#[allow(unsafe_code)]
pub(super) unsafe fn narrow(element: Element, source: &[f32], target: *mut u8) {
    // SAFETY: `target` takes that many (caller).
    unsafe {
        match element {
            Element::F32 => {
                std::ptr::copy_nonoverlapping(source.as_ptr().cast::<u8>(), target, 4 * source.len());
            }
            Element::F16 => {
                for (i, &x) in source.iter().enumerate() {
                    target.cast::<u16>().add(i).write_unaligned(to_f16(x));
                }
            }
            Element::Bf16 => {
                for (i, &x) in source.iter().enumerate() {
                    target.cast::<u16>().add(i).write_unaligned(to_bf16(x));
                }
            }
            Element::E4m3 => {
                for (i, &x) in source.iter().enumerate() {
                    *target.add(i) = to_e4m3(x);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code whose value is nearest, ties to the even code, by looking at all.
    fn nearest(x: f32, largest: u16, value: impl Fn(u16) -> f32) -> u16 {
        let distance = |code: u16| (f64::from(value(code)) - f64::from(x.abs())).abs();
        (0..=largest).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)))).unwrap_or(0)
    }

    #[test]
    fn every_code_comes_back() {
        for code in 0..=u8::MAX {
            let x = from_e4m3(code);
            if code & 0x7f == 0x7f {
                assert!(x.is_nan());
            } else {
                assert_eq!(to_e4m3(x), code);
            }
        }
        for code in 0..=u16::MAX {
            let (half, brain) = (from_f16(code), from_bf16(code));
            assert!(if half.is_nan() { code & 0x7fff > 0x7c00 } else { to_f16(half) == code }, "{code:#x}");
            assert!(if brain.is_nan() { code & 0x7fff > 0x7f80 } else { to_bf16(brain) == code }, "{code:#x}");
        }
    }

    #[test]
    fn e4m3_is_the_nearest_of_all() {
        let mut x = 1e-4f32;
        while x < 500.0 {
            let want = nearest(x, 0x7e, |code| from_e4m3(code as u8)) as u8;
            assert_eq!(to_e4m3(x), want, "{x}");
            assert_eq!(to_e4m3(-x), want | 0x80, "{x}");
            x *= 1.003;
        }
        // Half way between neighbours: to the even code.
        for code in 0..0x7eu8 {
            let middle = (from_e4m3(code) + from_e4m3(code + 1)) / 2.0;
            assert_eq!(to_e4m3(middle), code + code % 2, "{code}");
        }
        assert_eq!(
            [1e9, f32::INFINITY, -f32::INFINITY, f32::NAN, -f32::NAN].map(to_e4m3),
            [0x7e, 0x7e, 0xfe, 0x7f, 0x7f]
        );
    }

    #[test]
    fn halves_between_neighbours_go_to_the_even_code() {
        for code in (0..0x7bffu16).step_by(7) {
            let middle = ((f64::from(from_f16(code)) + f64::from(from_f16(code + 1))) / 2.0) as f32;
            assert_eq!(to_f16(middle), code + code % 2, "{code:#x}");
        }
        assert_eq!([65_519.0, 65_520.0, f32::INFINITY].map(to_f16), [0x7bff, 0x7c00, 0x7c00]);
        assert!(from_f16(to_f16(f32::NAN)).is_nan() && from_bf16(to_bf16(f32::NAN)).is_nan());
        // A NaN whose upper bits are all zero must not become infinite.
        assert!(from_bf16(to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
