//! Embeds `cuda/`: an installed extension carries the kernels it was tested with.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    let variable = |name| env::var_os(name).map(PathBuf::from).ok_or_else(|| io::Error::other(format!("no {name}")));
    let mut files: Vec<PathBuf> = fs::read_dir(variable("CARGO_MANIFEST_DIR")?.join("cuda"))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|kind| kind == "cu" || kind == "cuh"));
    files.sort();
    let mut list = String::from("&[\n");
    for path in &files {
        let name = path.file_name().unwrap_or_default();
        writeln!(list, "    ({:?}, include_str!({:?})),", name.to_string_lossy(), path.to_string_lossy())
            .map_err(io::Error::other)?;
    }
    list.push_str("]\n");
    fs::write(variable("OUT_DIR")?.join("cuda_sources.rs"), list)
}
