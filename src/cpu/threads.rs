//! Items of work shared among threads: torch's own OpenMP team where the process has one, else a team of this crate.
//!
//! After a parallel region the threads of libgomp spin for a while, expecting the next one. Other threads would have to
//! fight them for the cores, so the kernels ask that very team (`GOMP_parallel`, called from the thread that called
//! torch: libgomp keeps a team per calling thread). Libgomp's teams do not survive a fork; in a forked child, and where
//! no libgomp is loaded, the crate's own threads do the work. They sleep when there is none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::{Error, Result};

mod team;

/// Who runs the items besides the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The OpenMP team of the process where there is one, else the crate's own.
    Joined(usize),
    /// The crate's own, whatever the process has.
    Own(usize),
}

impl Threads {
    /// How many, the caller among them.
    pub fn count(self) -> usize {
        let (Self::Joined(n) | Self::Own(n)) = self;
        n.max(1)
    }
}

struct Job<'a> {
    next: AtomicUsize,
    items: usize,
    failed: AtomicBool,
    body: &'a (dyn Fn(usize) + Sync),
}

impl Job<'_> {
    /// Takes items until none is left.
    fn work(&self) {
        while !self.failed.load(Ordering::Relaxed) {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= self.items {
                return;
            }
            // A panic must not cross into libgomp.
            if catch_unwind(AssertUnwindSafe(|| (self.body)(item))).is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Calls `body` for every item, on the calling thread and up to `threads - 1` others.
///
/// # Errors
/// [`Error::Corrupt`] when an item panicked: a bug.
pub fn parallel(threads: Threads, items: usize, body: &(dyn Fn(usize) + Sync)) -> Result<()> {
    let job = Job { next: AtomicUsize::new(0), items, failed: AtomicBool::new(false), body };
    if items <= 1 || threads.count() == 1 {
        job.work();
    } else {
        let joined = matches!(threads, Threads::Joined(_)) && openmp::run(threads.count(), &|| job.work());
        if !joined {
            team::run(threads.count(), &|| job.work());
        }
    }
    if job.failed.load(Ordering::Relaxed) { Err(Error::Corrupt("a CPU kernel panicked".to_owned())) } else { Ok(()) }
}

/// Says which team [`Threads::Joined`] means in this process: `openmp` or `own`.
pub fn team_name() -> &'static str {
    if openmp::is_there() { "openmp" } else { "own" }
}

/// Remembers the process that loaded the crate: a child forked from it must not use its OpenMP team.
pub fn remember_process() {
    openmp::remember_process();
}

#[cfg(all(unix, target_os = "linux"))]
#[allow(unsafe_code)]
mod openmp {
    use std::ffi::{c_char, c_int, c_uint, c_void};
    use std::sync::OnceLock;

    type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

    unsafe extern "C" {
        fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    const RTLD_LAZY: c_int = 1;
    /// Only if it is loaded already.
    const RTLD_NOLOAD: c_int = 4;

    static PROCESS: OnceLock<u32> = OnceLock::new();

    pub(super) fn remember_process() {
        PROCESS.get_or_init(std::process::id);
    }

    /// `GOMP_parallel` of the libgomp that is loaded. Torch may come later than this crate: only success is kept.
    fn entry() -> Option<Parallel> {
        static ENTRY: OnceLock<Parallel> = OnceLock::new();
        if let Some(&entry) = ENTRY.get() {
            return Some(entry);
        }
        // SAFETY: both names end with a NUL; the handle is never closed, so what it names stays.
        let symbol = unsafe {
            let library = dlopen(c"libgomp.so.1".as_ptr(), RTLD_LAZY | RTLD_NOLOAD);
            if library.is_null() {
                return None;
            }
            dlsym(library, c"GOMP_parallel".as_ptr())
        };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: libgomp's ABI: void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags).
        let entry = unsafe { std::mem::transmute::<*mut c_void, Parallel>(symbol) };
        Some(*ENTRY.get_or_init(|| entry))
    }

    pub(super) fn is_there() -> bool {
        PROCESS.get().is_none_or(|&id| id == std::process::id()) && entry().is_some()
    }

    extern "C" fn enter(data: *mut c_void) {
        // SAFETY: `data` is the closure that `run` borrows for as long as the region lasts.
        let work = unsafe { &*data.cast::<&(dyn Fn() + Sync)>() };
        work();
    }

    /// Runs `work` on a team of this many threads, the caller among them; false where there is no team.
    pub(super) fn run(threads: usize, work: &(dyn Fn() + Sync)) -> bool {
        if !is_there() {
            return false;
        }
        let Some(parallel) = entry() else { return false };
        let threads = threads.min(c_uint::MAX as usize) as c_uint;
        // SAFETY: returns when all threads left `enter`, which never unwinds (`Job::work` catches).
        unsafe { parallel(enter, (&raw const work).cast_mut().cast(), threads, 0) };
        true
    }
}

#[cfg(not(all(unix, target_os = "linux")))]
mod openmp {
    pub(super) fn remember_process() {}

    pub(super) fn is_there() -> bool {
        false
    }

    pub(super) fn run(_: usize, _: &(dyn Fn() + Sync)) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once() {
        for threads in [Threads::Own(1), Threads::Own(2), Threads::Own(5), Threads::Joined(3)] {
            for items in [0, 1, 2, 1000] {
                let seen: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                parallel(threads, items, &|i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn callers_on_many_threads_share_the_team() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let sum = AtomicUsize::new(0);
                        parallel(Threads::Own(3), 50, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        })
                        .unwrap();
                        assert_eq!(sum.into_inner(), 1225);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_is_an_error_and_the_team_lives_on() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let failed = parallel(Threads::Own(3), 50, &|i| assert_ne!(i, 7));
        std::panic::set_hook(hook);
        assert!(matches!(failed, Err(Error::Corrupt(_))));
        assert!(parallel(Threads::Own(3), 50, &|_| {}).is_ok());
    }
}
