//! Which instruction set the kernels use: found when first asked, or forced.

use std::sync::OnceLock;

use super::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};
use crate::error::{Error, Result};

/// Instruction sets, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every machine of this architecture has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same and AVX-512 BF16.
    Avx512Bf16,
}

impl Level {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Portable, "portable"),
        (Self::Avx2, "avx2"),
        (Self::Avx512, "avx512"),
        (Self::Avx512Bf16, "avx512_bf16"),
    ];

    /// Levels of this machine, weakest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().map(|(level, _)| level).filter(|&level| level <= Self::best()).collect()
    }

    /// The strongest level of this machine.
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(detect)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The level of a name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: no such level, or not on this machine.
    pub fn from_name(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|&(level, known)| known == name && level <= Self::best());
        found.map(|(level, _)| level).ok_or_else(|| {
            let names: Vec<_> = Self::available().into_iter().map(Self::name).collect();
            Error::invalid("level", name, format!("this machine has {}", names.join(", ")))
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) if is_x86_feature_detected!("avx512bf16") => Level::Avx512Bf16,
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// A kernel's work, in items that may run in any order and on any thread.
#[allow(unsafe_code)]
pub(super) trait Work: Sync {
    /// Does item `i`. Always inlined, so that it is compiled for the level it is called at.
    ///
    /// # Safety
    ///
    /// The CPU has `S`, and no other call for the same item runs or ran.
    unsafe fn run<S: Simd>(&self, i: usize);
}

/// Does item `i` at a level.
///
/// # Safety
///
/// The CPU has the level, and no other call for the same item runs or ran.
#[allow(unsafe_code)]
pub(super) unsafe fn run_at<W: Work>(level: Level, work: &W, i: usize) {
    // SAFETY: the caller's.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => avx512_bf16(work, i),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512(work, i),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2(work, i),
            _ => portable(work, i),
        }
    }
}

#[inline(never)]
#[allow(unsafe_code)]
unsafe fn portable<W: Work>(work: &W, i: usize) {
    // SAFETY: every CPU has it; the rest is the caller's.
    unsafe { work.run::<Portable>(i) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
#[allow(unsafe_code)]
unsafe fn avx2<W: Work>(work: &W, i: usize) {
    // SAFETY: the caller's.
    unsafe { work.run::<Avx2>(i) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
#[allow(unsafe_code)]
unsafe fn avx512<W: Work>(work: &W, i: usize) {
    // SAFETY: the caller's.
    unsafe { work.run::<Avx512<false>>(i) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
#[inline(never)]
#[allow(unsafe_code)]
unsafe fn avx512_bf16<W: Work>(work: &W, i: usize) {
    // SAFETY: the caller's.
    unsafe { work.run::<Avx512<true>>(i) }
}
