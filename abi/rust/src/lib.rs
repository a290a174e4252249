//! kernseal bundles from Rust, with nothing but `std`.
//!
//! Three layers that do not mix, as in the C core: [`sys`] is raw and generated, [`Error`] is what a call that can fail gives,
//! [`Library`], [`Bundle`] and [`Prepared`] own what they stand for.
//!
//! ```no_run
//! # use kernseal::sys::{kseal_xqa_decode_args, kseal_xqa_decode_config, XqaDecode};
//! # fn main() -> kernseal::Result<()> {
//! let bundle = kernseal::open_pinned("/opt/kernseal/sm_90a-linux-x86_64")?;
//! let config = kseal_xqa_decode_config { device: 0, ..Default::default() };
//! // SAFETY: the config names no stream.
//! let decode = unsafe { bundle.prepare::<XqaDecode>(&config)? };
//! let args = kseal_xqa_decode_args::default();
//! // SAFETY: a batch of zero sequences reads no memory.
//! unsafe { decode.run(&args)? };
//! # Ok(())
//! # }
//! ```
//!
//! # What is unsafe
//! [`Bundle::prepare`] and [`Prepared::run`], because streams and device addresses cannot be checked from here. Nothing else.
//!
//! # Threads
//! [`Library`], [`Bundle`] and [`Prepared`] may be sent to and shared by threads, since the C library allows every call on them
//! from any thread but the one that ends them, which needs the one owner. The structs of [`sys`] hold raw pointers, so that they
//! are built where they are used:
//!
//! ```compile_fail,E0277
//! let args = kernseal::sys::kseal_xqa_decode_args::default();
//! std::thread::spawn(move || args.q);
//! ```
//!
//! A handle has one owner, which releases it once:
//!
//! ```compile_fail,E0599
//! fn twice(handle: kernseal::Prepared<kernseal::sys::XqaDecode>) {
//!     let other = handle.clone();
//! }
//! ```
//!
//! A launch is somebody's responsibility:
//!
//! ```compile_fail,E0133
//! fn launch(handle: &kernseal::Prepared<kernseal::sys::XqaDecode>, args: &kernseal::sys::kseal_xqa_decode_args) {
//!     let _ = handle.run(args);
//! }
//! ```
//!
//! Only generated code names an op, for an op says what its structs are:
//!
//! ```compile_fail,E0277
//! enum Mine {}
//! impl kernseal::Op for Mine {
//!     type Raw = ();
//!     type Config = ();
//!     type Args = ();
//!     const NAME: &'static str = "mine";
//!     fn functions(_: &kernseal::sys::Api) -> kernseal::OpFunctions<Self> {
//!         unimplemented!()
//!     }
//! }
//! ```

mod dl;
mod sha256;

#[allow(missing_docs, non_camel_case_types)]
#[rustfmt::skip] // generated
pub mod sys;

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

/// What a call gives that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// SHA-256 of the library that this crate was built for, if `KERNSEAL_BUNDLE` or `KERNSEAL_LIBRARY_SHA256` was set then.
pub const PINNED_SHA256: Option<&str> = {
    let digest = env!("KERNSEAL_PINNED_SHA256");
    if digest.is_empty() { None } else { Some(digest) }
};

/// Opens the bundle in `folder`, whose library must have this SHA-256; see [`Library::load`].
pub fn open(folder: impl AsRef<Path>, sha256: &str) -> Result<Bundle> {
    let folder = folder.as_ref();
    Library::load(&folder.join("libkernseal.so"), sha256)?.open(folder, 0)
}

/// Opens the bundle in `folder`, whose library must be the one that this crate was built for.
pub fn open_pinned(folder: impl AsRef<Path>) -> Result<Bundle> {
    let unpinned = "no library is pinned: build with KERNSEAL_BUNDLE or KERNSEAL_LIBRARY_SHA256, or use open";
    let sha256 = PINNED_SHA256.ok_or_else(|| Error::new(sys::KSEAL_INVALID_ARGUMENT, "invalid_argument", unpinned))?;
    open(folder, sha256)
}

mod sealed {
    /// Implemented by [`crate::sys`] alone.
    pub trait Sealed {}
}

/// The functions of one op, as [`sys::Api`] has them.
pub struct OpFunctions<O: Op + ?Sized> {
    /// `kseal_<op>_prepare`.
    pub prepare: unsafe extern "C" fn(*mut sys::kseal_bundle, *const O::Config, *mut *mut O::Raw) -> sys::kseal_status,
    /// `kseal_<op>_workspace_size`.
    pub workspace_size: unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status,
    /// `kseal_<op>_semaphores_size`, or None for an op that takes no semaphores.
    pub semaphores_size: Option<unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status>,
    /// `kseal_<op>_plan_size`, or None for an op that plans nothing.
    pub plan_size: Option<unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status>,
    /// `kseal_<op>_plan`, or None for an op that plans nothing.
    pub plan: Option<unsafe extern "C" fn(*mut O::Raw, *const O::Args, *mut u64) -> sys::kseal_status>,
    /// `kseal_<op>_run`.
    pub run: unsafe extern "C" fn(*mut O::Raw, *const O::Args) -> sys::kseal_status,
    /// `kseal_<op>_release`.
    pub release: unsafe extern "C" fn(*mut O::Raw) -> sys::kseal_status,
}

/// An op; the generated types in [`sys`] implement it.
pub trait Op: sealed::Sealed {
    /// The C handle.
    type Raw;
    /// What is fixed when it is prepared.
    type Config;
    /// What one run gets.
    type Args;
    /// Its name, as in [`Variant::op`].
    const NAME: &'static str;
    #[doc(hidden)]
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
            let dotted = |version: u32| format!("{}.{}", version >> 16, version & 0xffff);
            let needed = dotted(sys::KSEAL_ABI_VERSION);
            let message = format!("{shown}: has ABI {}, this crate needs {needed}", dotted(version));
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
// SAFETY: as above; several of them at once.
unsafe impl Sync for Bundle {}

/// One kernel of a bundle.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name of the op.
    pub op: String,
    /// Name of the variant, unique within the op.
    pub variant: String,
    /// Its config, as space-separated `axis=value`.
    pub axes: String,
    /// SM that the image runs on, such as `sm_90a`.
    pub sm: String,
    /// SHA-256 of the image.
    pub sha256: String,
    /// How it was checked: a `KSEAL_EVIDENCE_*`.
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
    ///
    /// # Safety
    /// The config's stream, if it has one, must be null or alive.
    pub unsafe fn prepare<O: Op>(&self, config: &O::Config) -> Result<Prepared<O>> {
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

/// A variant on a device; needs its bundle no more. Released when dropped.
pub struct Prepared<O: Op> {
    library: Library,
    functions: OpFunctions<O>,
    raw: *mut O::Raw,
    op: PhantomData<O>,
}

// SAFETY: any thread may use a handle, which does not change between prepare and release; that needs the one owner.
unsafe impl<O: Op> Send for Prepared<O> {}
// SAFETY: as above; several of them at once.
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

    /// Bytes that a plan for args of these sizes may take; 0 for an op that plans nothing.
    pub fn plan_size(&self, args: &O::Args) -> Result<u64> {
        let mut bytes = 0;
        if let Some(size) = self.functions.plan_size {
            // SAFETY: no pointer in `args` is looked at.
            self.library.check(unsafe { size(self.raw, args, &mut bytes) })?;
        }
        Ok(bytes)
    }

    /// Plans a run with `args` on the host, and says how many bytes of the plan are to be copied to the device before it; 0
    /// for an op that plans nothing.
    ///
    /// # Safety
    /// What `args` names on the host must be memory of the documented shape, and the plan nobody else's during the call.
    pub unsafe fn plan(&self, args: &O::Args) -> Result<u64> {
        let mut bytes = 0;
        if let Some(plan) = self.functions.plan {
            // SAFETY: the caller's promise.
            self.library.check(unsafe { plan(self.raw, args, &mut bytes) })?;
        }
        Ok(bytes)
    }

    /// Validates `args` and launches: no allocation, lock, load or wait.
    ///
    /// # Safety
    /// Until the launch has finished (with a graph that captured it: until that graph is launched no more)
    /// - every address in `args` must be device memory of the documented shape, and the stream alive;
    /// - what the device reads there (offsets, indices) must be as documented;
    /// - this handle must not be dropped.
    pub unsafe fn run(&self, args: &O::Args) -> Result<()> {
        // SAFETY: the caller's promise.
        self.library.check(unsafe { (self.functions.run)(self.raw, args) })
    }
}

impl<O: Op> Drop for Prepared<O> {
    fn drop(&mut self) {
        // The handle is gone whatever this says, and a destructor has nobody to tell.
        // SAFETY: prepared once and released once.
        let _ = unsafe { (self.functions.release)(self.raw) };
    }
}

/// What may cross threads does; the doc tests above have what may not.
const _: () = {
    const fn crosses_threads<T: Send + Sync>() {}
    #[allow(dead_code)] // that it compiles is the proof
    const fn so_does_every_handle<O: Op>() {
        crosses_threads::<Prepared<O>>();
    }
    crosses_threads::<Error>();
    crosses_threads::<Library>();
    crosses_threads::<Bundle>();
};
