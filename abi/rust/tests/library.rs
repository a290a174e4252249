//! What is refused before anything of a library is used. The library comes from the caller: KERNSEAL_TEST_LIBRARY, its
//! KERNSEAL_TEST_SHA256, and KERNSEAL_TEST_REFUSAL, what must be said of it.

use kernseal::{Error, Library};
use std::path::Path;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

#[test]
#[ignore = "needs a library: see tests/cpu/test_abi_wrappers.py"]
fn a_library_of_another_abi_is_refused() {
    let path = variable("KERNSEAL_TEST_LIBRARY");
    let refusal: Error = Library::load(Path::new(&path), &variable("KERNSEAL_TEST_SHA256")).err().expect("a refusal");
    assert_eq!(refusal.status, kernseal::sys::KSEAL_ABI_MISMATCH);
    let wanted = variable("KERNSEAL_TEST_REFUSAL");
    assert!(refusal.to_string().contains(&wanted), "{refusal}, not {wanted}");
}

#[test]
fn a_missing_library_is_told() {
    let refusal = kernseal::open("/nowhere", "").err().expect("a refusal");
    assert_eq!((refusal.status, refusal.name.as_str()), (kernseal::sys::KSEAL_MISSING, "missing"));
    assert!(refusal.message.contains("/nowhere/libkernseal.so"), "{refusal}");
}
