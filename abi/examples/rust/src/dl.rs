//! The dynamic linker and memory files, as libc has them.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *mut c_char;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
}

const RTLD_NOW: c_int = 2;
const MFD_CLOEXEC: c_uint = 1;
const MFD_ALLOW_SEALING: c_uint = 2;
const F_ADD_SEALS: c_int = 1033;
const F_SEAL_SEAL: c_int = 1;
const F_SEAL_SHRINK: c_int = 2;
const F_SEAL_GROW: c_int = 4;
const F_SEAL_WRITE: c_int = 8;

/// A shared library. Never closed, so its symbols stay valid.
#[derive(Clone, Copy)]
pub struct Dl(*mut c_void);

impl Dl {
    /// Loads a library by name or path; fails with the linker's words.
    pub fn open(path: &CStr) -> Result<Self, String> {
        // SAFETY: a terminated string; running its initialisers is what loading means.
        let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if !library.is_null() {
            return Ok(Self(library));
        }
        // SAFETY: dlerror gives null or a string of this thread, copied here.
        let why = unsafe { dlerror() };
        if why.is_null() {
            return Err(format!("{}: did not load", path.to_string_lossy()));
        }
        Err(unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned())
    }

    /// Loads exactly these bytes, from memory that nobody can change any more.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let told = |what: &str| format!("{what}: {}", std::io::Error::last_os_error());
        // SAFETY: a terminated name; the descriptor is owned by `file` at once.
        let fd = unsafe { memfd_create(c"libkernseal.so".as_ptr(), MFD_CLOEXEC | MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(told("memfd_create"));
        }
        let mut file = unsafe { File::from_raw_fd(fd) };
        file.write_all(bytes).map_err(|e| format!("memory file: {e}"))?;
        let seals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
        // SAFETY: an open descriptor and plain numbers.
        if unsafe { fcntl(file.as_raw_fd(), F_ADD_SEALS, seals) } != 0 {
            return Err(told("sealing"));
        }
        // The descriptor stays open: the dynamic linker knows the library by this name.
        let path = CString::new(format!("/proc/self/fd/{}", file.into_raw_fd())).map_err(|e| e.to_string())?;
        Self::open(&path)
    }

    /// A symbol's address, null where there is none.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: an open library and a terminated string.
        unsafe { dlsym(self.0, name.as_ptr()) }
    }
}
