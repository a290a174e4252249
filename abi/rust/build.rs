//! Pins a library at build time: `KERNSEAL_BUNDLE` names a bundle's folder, or `KERNSEAL_LIBRARY_SHA256` the digest itself.
//! Without them nothing is pinned, and whoever opens a bundle gives the digest.

use std::env;
use std::path::Path;
use std::process::exit;

#[path = "src/sha256.rs"]
mod sha256;

fn fail(why: &str) -> ! {
    println!("cargo::error={why}");
    exit(1)
}

fn digest_of_library(folder: &Path) -> String {
    let path = folder.join("libkernseal.so");
    println!("cargo::rerun-if-changed={}", path.display());
    match std::fs::read(&path) {
        Ok(bytes) => sha256::hex(&bytes),
        Err(error) => fail(&format!("KERNSEAL_BUNDLE: {}: {error}", path.display())),
    }
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KERNSEAL_BUNDLE");
    println!("cargo::rerun-if-env-changed=KERNSEAL_LIBRARY_SHA256");
    let given = env::var("KERNSEAL_LIBRARY_SHA256").ok();
    if let Some(digest) = &given {
        let is_digest = digest.len() == 64 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !is_digest {
            fail(&format!("KERNSEAL_LIBRARY_SHA256 is {digest:?}; it must be 64 lowercase hex digits"));
        }
    }
    let found = env::var_os("KERNSEAL_BUNDLE").map(|folder| digest_of_library(Path::new(&folder)));
    if let (Some(given), Some(found)) = (&given, &found) {
        if given != found {
            fail(&format!("KERNSEAL_BUNDLE: SHA-256 of its library is {found}; KERNSEAL_LIBRARY_SHA256 is {given}"));
        }
    }
    println!("cargo::rustc-env=KERNSEAL_PINNED_SHA256={}", found.or(given).unwrap_or_default());
}
