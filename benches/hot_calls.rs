//! The program whose instructions `tests/callgrind` counts; it times nothing.
//!
//! `hot_calls --list` prints a line for each scenario, its name and how many iterations are enough to count it.
//! `hot_calls NAME ITERATIONS` sets up, then makes the call that often. The setup may not depend on ITERATIONS, and
//! every iteration leaves things as it found them: the harness runs N and 2 N iterations and divides the difference.
#![allow(clippy::print_stdout, clippy::expect_used)]

use std::hint::black_box;
use std::process::ExitCode;

/// Name, iterations that are enough, and what sets up and then makes the call that often.
type Scenario = (&'static str, usize, fn(usize));

const SCENARIOS: &[Scenario] = &[("nothing", 1_000, nothing)];

fn nothing(iterations: usize) {
    for i in 0..iterations {
        black_box(i);
    }
}

fn main() -> ExitCode {
    // `cargo bench` passes --bench.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] | ["--list"] => {
            for (name, iterations, _) in SCENARIOS {
                println!("{name} {iterations}");
            }
            ExitCode::SUCCESS
        }
        [name, iterations] => match (SCENARIOS.iter().find(|s| s.0 == name), iterations.parse()) {
            (Some(scenario), Ok(iterations)) => {
                scenario.2(iterations);
                ExitCode::SUCCESS
            }
            _ => ExitCode::from(2),
        },
        _ => ExitCode::from(2),
    }
}
