//! The dynamic linker and memory files, as libc has them.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *mut c_char;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
}

const RTLD_NOW: c_int = 2;

/// By number: libc has memfd_create since 2.27 only.
#[cfg(target_arch = "x86_64")]
const SYS_MEMFD_CREATE: c_long = 319;
#[cfg(target_arch = "aarch64")]
const SYS_MEMFD_CREATE: c_long = 279;
const MFD_CLOEXEC: c_long = 1;
const MFD_ALLOW_SEALING: c_long = 2;
const F_ADD_SEALS: c_int = 1033;
/// Seal, shrink, grow and write.
const EVERY_SEAL: c_int = 15;

/// A shared library. Never closed, so its symbols stay valid.
pub struct Dl(*mut c_void);

impl Dl {
    /// Loads exactly these bytes, from memory that nobody can change any more; fails with the linker's words.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let told = |what: &str| format!("{what}: {}", std::io::Error::last_os_error());
        let flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
        // SAFETY: a terminated name and plain numbers.
        let fd = unsafe { syscall(SYS_MEMFD_CREATE, c"libkernseal.so".as_ptr(), flags) } as c_int;
        if fd < 0 {
            return Err(told("memfd_create"));
        }
        // SAFETY: just opened, and owned by nobody else.
        let mut file = unsafe { File::from_raw_fd(fd) };
        file.write_all(bytes).map_err(|e| format!("memory file: {e}"))?;
        // SAFETY: an open descriptor and plain numbers.
        if unsafe { fcntl(file.as_raw_fd(), F_ADD_SEALS, EVERY_SEAL) } != 0 {
            return Err(told("sealing"));
        }
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|e| e.to_string())?;
        // SAFETY: a terminated string; running the initialisers of bytes that were checked is what loading means.
        let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return Err(last_error());
        }
        // The descriptor stays open: the dynamic linker knows the library by its name.
        let _ = file.into_raw_fd();
        Ok(Self(library))
    }

    /// A symbol's address, null where there is none.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: an open library and a terminated string.
        unsafe { dlsym(self.0, name.as_ptr()) }
    }
}

fn last_error() -> String {
    // SAFETY: takes nothing.
    let why = unsafe { dlerror() };
    if why.is_null() {
        return "did not load".into();
    }
    // SAFETY: a string of this thread, copied here.
    unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned()
}
