//! Placeholder: its owner replaces this file.
fn main() {}
