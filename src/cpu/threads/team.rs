//! The crate's own threads: made once per process, asleep between calls.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A closure lent to the helpers for the time of one call.
#[derive(Clone, Copy)]
struct Lent(*const (dyn Fn() + Sync));

// SAFETY: the closure is Sync, and `run` does not return before every helper has left it.
#[allow(unsafe_code)]
unsafe impl Send for Lent {}

#[derive(Default)]
struct State {
    /// Work of the call under way, and how many more helpers may take it.
    work: Option<Lent>,
    wanted: usize,
    /// Helpers inside the work.
    inside: usize,
    /// Helpers that exist.
    helpers: usize,
}

#[derive(Default)]
struct Team {
    /// Held by the caller for a whole call; another caller works alone meanwhile.
    turn: Mutex<()>,
    state: Mutex<State>,
    called: Condvar,
    left: Condvar,
}

/// The team of this process. A forked child has none of its parent's threads, so it makes its own.
fn team() -> Arc<Team> {
    static TEAM: Mutex<Option<(u32, Arc<Team>)>> = Mutex::new(None);
    let id = std::process::id();
    // A fork while another thread holds this lock would leave it held: it is held for a few instructions only.
    let mut slot = lock(&TEAM);
    match &*slot {
        Some((owner, team)) if *owner == id => Arc::clone(team),
        _ => {
            let team = Arc::new(Team::default());
            // The parent's team is left alone: its locks may be held by threads that are not here.
            std::mem::forget(slot.replace((id, Arc::clone(&team))));
            team
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on the calling thread and up to `threads - 1` helpers at once.
#[allow(unsafe_code)]
pub(super) fn run(threads: usize, work: &(dyn Fn() + Sync)) {
    let team = team();
    let Ok(_turn) = team.turn.try_lock() else {
        return work();
    };
    // SAFETY: only the lifetime is forgotten; the helpers are out of the closure before this function returns.
    let lent = Lent(unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) });
    {
        let mut state = lock(&team.state);
        while state.helpers + 1 < threads {
            let team = Arc::clone(&team);
            let made = std::thread::Builder::new().name("kvcatch-cpu".to_owned()).spawn(move || help(&team));
            if made.is_err() {
                break;
            }
            state.helpers += 1;
        }
        state.work = Some(lent);
        state.wanted = (threads - 1).min(state.helpers);
    }
    team.called.notify_all();
    work();
    let mut state = lock(&team.state);
    state.work = None;
    while state.inside > 0 {
        state = team.left.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn help(team: &Team) {
    let mut state = lock(&team.state);
    loop {
        match state.work {
            Some(lent) if state.wanted > 0 => {
                state.wanted -= 1;
                state.inside += 1;
                drop(state);
                // SAFETY: `run` waits until `inside` is 0 before the closure ends.
                #[allow(unsafe_code)]
                let work = unsafe { &*lent.0 };
                work();
                state = lock(&team.state);
                state.inside -= 1;
                if state.inside == 0 {
                    team.left.notify_all();
                }
            }
            _ => state = team.called.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}
