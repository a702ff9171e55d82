//! Large pages for pools: blocks lie anywhere in a pool, and with pages of 4 KiB each would cost address translations.

/// Asks the system to back memory with large pages as it is first touched; false where there are none to ask for.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub fn advise(memory: &mut [std::mem::MaybeUninit<u8>]) -> bool {
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    const HUGEPAGE: c_int = 14;
    const PAGE: usize = 4096;
    const LARGE: usize = 2 << 20;

    let start = memory.as_mut_ptr().align_offset(PAGE);
    let length = memory.len().saturating_sub(start) / PAGE * PAGE;
    if length < LARGE {
        return false;
    }
    // SAFETY: whole pages within memory that the caller has for itself; the advice leaves what is in them as it is. On
    // a system whose pages are larger the address may be refused.
    unsafe { madvise(memory.as_mut_ptr().add(start).cast(), length, HUGEPAGE) == 0 }
}

/// There is nothing to ask here.
#[cfg(not(target_os = "linux"))]
pub fn advise(_: &mut [std::mem::MaybeUninit<u8>]) -> bool {
    false
}
