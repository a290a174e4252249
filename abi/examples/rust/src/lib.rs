//! kernseal bundles from Rust, with nothing but `std`.
//!
//! Three layers that do not mix, as in the C core: [`sys`] is raw and generated, [`Error`] is what a call that can fail gives,
//! [`Library`], [`Bundle`] and [`Prepared`] own what they stand for. What stays unsafe is [`Prepared::run`]: device addresses
//! cannot be checked from here.

pub mod dl;
mod sha256;

#[allow(non_camel_case_types)]
pub mod sys {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../generated/kernseal.rs"));
}

use std::ffi::{CStr, CString};
use std::fmt;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// Why nothing was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// A `KSEAL_*` number.
    pub status: sys::kseal_status,
    /// Its name, such as `misaligned`.
    pub name: String,
    /// Field, value and what is supported.
    pub message: String,
}

impl Error {
    fn new(status: sys::kseal_status, name: &str, message: impl Into<String>) -> Self {
        Self { status, name: name.into(), message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.message)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

/// The functions of one op, as [`sys::Api`] has them.
pub struct OpFunctions<O: Op + ?Sized> {
    pub prepare: unsafe extern "C" fn(*mut sys::kseal_bundle, *const O::Config, *mut *mut O::Raw) -> sys::kseal_status,
    pub workspace_size: unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status,
    /// None for an op that takes no semaphores.
    pub semaphores_size: Option<unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status>,
    pub run: unsafe extern "C" fn(*mut O::Raw, *const O::Args) -> sys::kseal_status,
    pub release: unsafe extern "C" fn(*mut O::Raw) -> sys::kseal_status,
}

/// An op; the generated types in [`sys`] implement it.
pub trait Op {
    type Raw;
    type Config;
    type Args;
    fn functions(api: &sys::Api) -> OpFunctions<Self>;
}

/// `libkernseal.so`, loaded from bytes whose hash was checked. Stays loaded until the process ends.
#[derive(Clone, Copy)]
pub struct Library {
    api: sys::Api,
}

impl Library {
    /// Reads the file once, compares it with `sha256` (64 lowercase hex digits, from the bundle's pins), and loads those
    /// bytes from sealed memory, so that what is checked is what runs.
    pub fn load(path: &Path, sha256: &str) -> Result<Self> {
        let shown = path.display();
        let bytes = std::fs::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::new(sys::KSEAL_MISSING, "missing", format!("{shown}: {e}")),
            _ => Error::new(sys::KSEAL_IO_ERROR, "io_error", format!("{shown}: {e}")),
        })?;
        let found = sha256::hex(&bytes);
        if found != sha256 {
            let message = format!("{shown}: SHA-256 is {found}, pinned is {sha256}");
            return Err(Error::new(sys::KSEAL_MISMATCH, "mismatch", message));
        }
        let library = dl::Dl::from_bytes(&bytes)
            .map_err(|message| Error::new(sys::KSEAL_IO_ERROR, "io_error", format!("{shown}: {message}")))?;
        // SAFETY: the pinned bytes are a libkernseal.so; its version is compared before anything else is called.
        let api = unsafe { sys::Api::resolve(|name| library.symbol(name)) }
            .map_err(|name| Error::new(sys::KSEAL_ABI_MISMATCH, "abi_mismatch", format!("{shown}: has no {name}")))?;
        // SAFETY: takes nothing, allowed at any time.
        let version = unsafe { (api.kseal_abi_version)() };
        if version >> 16 != sys::KSEAL_ABI_VERSION >> 16 || version < sys::KSEAL_ABI_VERSION {
            let message = format!("{shown}: ABI is {version:#x}, this crate needs {:#x}", sys::KSEAL_ABI_VERSION);
            return Err(Error::new(sys::KSEAL_ABI_MISMATCH, "abi_mismatch", message));
        }
        Ok(Self { api })
    }

    fn check(&self, status: sys::kseal_status) -> Result<()> {
        if status == sys::KSEAL_OK {
            return Ok(());
        }
        // SAFETY: both give strings that live until this thread's next failure, and are copied here.
        let (name, message) = unsafe {
            (CStr::from_ptr((self.api.kseal_status_name)(status)), CStr::from_ptr((self.api.kseal_last_error)()))
        };
        Err(Error::new(status, &name.to_string_lossy(), message.to_string_lossy()))
    }

    /// Opens the bundle's folder. `flags` are bits of `KSEAL_OPEN_FLAG_*`.
    pub fn open(&self, folder: &Path, flags: u32) -> Result<Bundle> {
        let path = CString::new(folder.as_os_str().as_bytes())
            .map_err(|_| Error::new(sys::KSEAL_INVALID_ARGUMENT, "invalid_argument", "folder: has a zero byte"))?;
        let args = sys::kseal_open_args {
            abi_version: sys::KSEAL_ABI_VERSION,
            flags,
            bundle_path: path.as_ptr(),
            ..sys::kseal_open_args::new()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: both pointers are to locals that outlive the call.
        self.check(unsafe { (self.api.kseal_open)(&args, &mut raw) })?;
        Ok(Bundle { library: *self, raw })
    }
}

/// An open bundle; closed when dropped.
pub struct Bundle {
    library: Library,
    raw: *mut sys::kseal_bundle,
}

// SAFETY: the C functions that take a bundle may be called from any thread; closing needs the one owner.
unsafe impl Send for Bundle {}
unsafe impl Sync for Bundle {}

/// One kernel of a bundle.
#[derive(Clone, Debug)]
pub struct Variant {
    pub op: String,
    pub variant: String,
    pub axes: String,
    pub sm: String,
    pub sha256: String,
    pub evidence: sys::kseal_evidence,
}

impl Bundle {
    /// Every kernel that is there, in a fixed order.
    pub fn variants(&self) -> Result<Vec<Variant>> {
        let api = &self.library.api;
        // SAFETY: `raw` is open as long as `self` lives.
        let count = unsafe { (api.kseal_variant_count)(self.raw) };
        (0..count)
            .map(|index| {
                let mut info = sys::kseal_variant_info::new();
                // SAFETY: `info` is a local with its size set.
                self.library.check(unsafe { (api.kseal_variant_at)(self.raw, index, &mut info) })?;
                // SAFETY: every string of `info` is static in the library, which stays loaded.
                let text = |s| unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned();
                Ok(Variant {
                    op: text(info.op),
                    variant: text(info.variant),
                    axes: text(info.axes),
                    sm: text(info.sm),
                    sha256: text(info.sha256),
                    evidence: info.evidence,
                })
            })
            .collect()
    }

    /// Checks and loads the variant for `config`. Not under graph capture.
    pub fn prepare<O: Op>(&self, config: &O::Config) -> Result<Prepared<O>> {
        let functions = O::functions(&self.library.api);
        let mut raw = ptr::null_mut();
        // SAFETY: `config` is a whole struct, for `Op` is implemented by generated code only; `raw` is a local.
        self.library.check(unsafe { (functions.prepare)(self.raw, config, &mut raw) })?;
        Ok(Prepared { library: self.library, functions, raw, op: PhantomData })
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // SAFETY: opened by `Library::open` and closed once.
        unsafe { (self.library.api.kseal_close)(self.raw) }
    }
}

/// A variant on a device; needs its bundle no more. Released when dropped: its launches must have finished by then.
pub struct Prepared<O: Op> {
    library: Library,
    functions: OpFunctions<O>,
    raw: *mut O::Raw,
    op: PhantomData<O>,
}

// SAFETY: a handle does not change between prepare and release, and any thread may run it.
unsafe impl<O: Op> Send for Prepared<O> {}
unsafe impl<O: Op> Sync for Prepared<O> {}

impl<O: Op> Prepared<O> {
    /// Bytes of workspace that a run with `args` needs.
    pub fn workspace_size(&self, args: &O::Args) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: no pointer in `args` is looked at.
        self.library.check(unsafe { (self.functions.workspace_size)(self.raw, args, &mut bytes) })?;
        Ok(bytes)
    }

    /// Bytes of semaphores that a run with `args` needs; 0 for an op that takes none.
    pub fn semaphores_size(&self, args: &O::Args) -> Result<u64> {
        let mut bytes = 0;
        if let Some(size) = self.functions.semaphores_size {
            // SAFETY: no pointer in `args` is looked at.
            self.library.check(unsafe { size(self.raw, args, &mut bytes) })?;
        }
        Ok(bytes)
    }

    /// Validates `args` and launches: no allocation, lock, load or wait.
    ///
    /// # Safety
    /// Every address in `args` must be device memory of the documented shape until the launch has finished, and what the
    /// device reads (offsets, indices) must be as documented.
    pub unsafe fn run(&self, args: &O::Args) -> Result<()> {
        self.library.check((self.functions.run)(self.raw, args))
    }
}

impl<O: Op> Drop for Prepared<O> {
    fn drop(&mut self) {
        // The handle is gone whatever this says, and a destructor has nobody to tell.
        // SAFETY: prepared once and released once.
        let _ = unsafe { (self.functions.release)(self.raw) };
    }
}
