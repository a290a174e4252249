//! GDN prefill from Rust.
//!
//! ```text
//! KERNSEAL_BUNDLE=BUNDLE cargo run --example gdn_prefill -- BUNDLE
//! ```
//!
//! BUNDLE is a bundle's folder, absolute, such as /opt/kernseal/sm_90a-linux-x86_64. The digest of its library is compiled in: it
//! is what this program trusts. At run time it needs libc, the CUDA driver and the folder.

use kernseal::sys::{
    GdnPrefill, KSEAL_DTYPE_BF16, KSEAL_DTYPE_F32, KSEAL_DTYPE_I64, KSEAL_STATE_LAYOUT_HVK, kseal_gdn_prefill_args,
    kseal_gdn_prefill_config,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::ExitCode;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The CUDA driver, as much of it as this example needs. A serving runtime has one already.
struct Cuda {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    set_current: unsafe extern "C" fn(*mut c_void) -> c_int,
    allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    free: unsafe extern "C" fn(u64) -> c_int,
    upload: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int,
    download: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    synchronize: unsafe extern "C" fn() -> c_int,
}

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// # Safety
/// `F` must be the C type of the function called `name`.
unsafe fn find<F: Copy>(library: *mut c_void, name: &CStr) -> Outcome<F> {
    // SAFETY: an open library and a terminated string.
    let symbol = unsafe { dlsym(library, name.as_ptr()) };
    if symbol.is_null() {
        return Err(format!("libcuda.so.1 has no {}", name.to_string_lossy()).into());
    }
    // SAFETY: a function pointer is as large as an address, and the caller vouches for its type.
    Ok(unsafe { std::mem::transmute_copy(&symbol) })
}

fn check(code: c_int, what: &str) -> Outcome<()> {
    if code == 0 { Ok(()) } else { Err(format!("{what}: CUDA error {code}").into()) }
}

impl Cuda {
    /// With the primary context of device 0 current.
    fn start() -> Outcome<Self> {
        const RTLD_NOW: c_int = 2;
        // SAFETY: a terminated string.
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return Err("libcuda.so.1: is not there".into());
        }
        // SAFETY: the types are those of cuda.h.
        let cuda = unsafe {
            Self {
                init: find(library, c"cuInit")?,
                get: find(library, c"cuDeviceGet")?,
                retain: find(library, c"cuDevicePrimaryCtxRetain")?,
                set_current: find(library, c"cuCtxSetCurrent")?,
                allocate: find(library, c"cuMemAlloc_v2")?,
                free: find(library, c"cuMemFree_v2")?,
                upload: find(library, c"cuMemcpyHtoD_v2")?,
                download: find(library, c"cuMemcpyDtoH_v2")?,
                synchronize: find(library, c"cuCtxSynchronize")?,
            }
        };
        let (mut device, mut context): (c_int, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: the pointers are to locals.
        unsafe {
            check((cuda.init)(0), "cuInit")?;
            check((cuda.get)(&mut device, 0), "cuDeviceGet")?;
            check((cuda.retain)(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            check((cuda.set_current)(context), "cuCtxSetCurrent")?;
        }
        Ok(cuda)
    }

    /// Device memory with a copy of `values` in it.
    fn memory<T: Copy>(&self, values: &[T]) -> Outcome<Memory<'_>> {
        let (mut address, size) = (0u64, std::mem::size_of_val(values));
        // SAFETY: the copy reads `values` only.
        unsafe {
            check((self.allocate)(&mut address, size), "cuMemAlloc")?;
            check((self.upload)(address, values.as_ptr().cast(), size), "cuMemcpyHtoD")?;
        }
        Ok(Memory { cuda: self, address })
    }

    fn wait(&self) -> Outcome<()> {
        // SAFETY: takes nothing.
        check(unsafe { (self.synchronize)() }, "cuCtxSynchronize")
    }
}

/// Device memory, freed when dropped.
struct Memory<'a> {
    cuda: &'a Cuda,
    address: u64,
}

impl Memory<'_> {
    fn get(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    fn read<T: Copy + Default>(&self, count: usize) -> Outcome<Vec<T>> {
        let mut values = vec![T::default(); count];
        let size = std::mem::size_of_val(&values[..]);
        // SAFETY: the copy fills `values` only.
        check(unsafe { (self.cuda.download)(values.as_mut_ptr().cast(), self.address, size) }, "cuMemcpyDtoH")?;
        Ok(values)
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated once and freed once.
        unsafe { (self.cuda.free)(self.address) };
    }
}

fn to_bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16 // exact for the values used here
}

fn from_bf16(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

fn expect(what: &str, got: f32, wanted: f32) -> Outcome<()> {
    if (got - wanted).abs() < 1e-2 { Ok(()) } else { Err(format!("{what} is {got}, expected {wanted}").into()) }
}

fn run(folder: &Path) -> Outcome<()> {
    let cuda = Cuda::start()?;

    // 1. Read the library once, compare it with the digest that was compiled in, load those bytes, and open the bundle. Images
    //    are checked against hashes compiled into the library when they are loaded.
    let bundle = kernseal::open_pinned(folder)?;

    // 2. Prepare what does not change between runs: may allocate, must not be under graph capture.
    let config = kseal_gdn_prefill_config {
        device: -1, // that of the current context
        dtype: KSEAL_DTYPE_BF16,
        state_dtype: KSEAL_DTYPE_F32,
        state_layout: KSEAL_STATE_LAYOUT_HVK,
        index_dtype: KSEAL_DTYPE_I64,
        initial_state: 1,
        alpha: 1,
        beta: 1,
        ..Default::default()
    };
    // SAFETY: the config names no stream.
    let prefill = unsafe { bundle.prepare::<GdnPrefill>(&config)? };

    // 3. One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both.
    const T: usize = 2;
    const D: usize = 128;
    let one = to_bf16(1.0);
    let (mut q, mut k, v) = ([0u16; T * D], [0u16; T * D], [one; T * D]);
    for at in [0, D, D + 1] {
        q[at] = one;
    }
    for at in [0, D + 1] {
        k[at] = one;
    }
    let (q, k, v, o) = (cuda.memory(&q)?, cuda.memory(&k)?, cuda.memory(&v)?, cuda.memory(&[0u16; T * D])?);
    let alpha = cuda.memory(&[1.0f32, 0.5])?; // linear: exp(g), not g
    let beta = cuda.memory(&[1.0f32, 0.25])?;
    let (before, after) = (cuda.memory(&[0f32; D * D])?, cuda.memory(&[0f32; D * D])?);
    let ends = cuda.memory(&[0i64, T as i64])?;
    let mut args = kseal_gdn_prefill_args {
        num_q_heads: 1,
        num_k_heads: 1,
        num_v_heads: 1,
        head_dim: D as i32,
        scale: 1.0,
        total_tokens: T as i64,
        num_seqs: 1,
        q: q.get(),
        k: k.get(),
        v: v.get(),
        o: o.get(),
        alpha: alpha.get(),
        beta: beta.get(),
        initial_state: before.get(),
        final_state: after.get(),
        cu_seqlens: ends.get(),
        ..Default::default()
    };
    args.workspace_bytes = prefill.workspace_size(&args)?;
    let workspace = cuda.memory(&vec![0u8; args.workspace_bytes as usize])?;
    args.workspace = workspace.get();

    // 4. Run: validates and launches on args.stream (here the default one), nothing else. Then wait, as with any launch.
    // SAFETY: every address is device memory of the documented shape and lives until after the wait, as does the handle.
    unsafe { prefill.run(&args)? };
    cuda.wait()?;

    // 5. The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both.
    let (out, state): (Vec<u16>, Vec<f32>) = (o.read(T * D)?, after.read(D * D)?);
    for i in 0..D {
        expect("o of token 0", from_bf16(out[i]), 1.0)?;
        expect("o of token 1", from_bf16(out[D + i]), 0.75)?;
        expect("column 0 of the state", state[i * D], 0.5)?;
        expect("column 1 of the state", state[i * D + 1], 0.25)?;
        expect("column 2 of the state", state[i * D + 2], 0.0)?;
    }
    println!("ok: two tokens of GDN prefill, output and state as expected");
    Ok(())
}

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: gdn_prefill BUNDLE");
        return ExitCode::FAILURE;
    };
    match run(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
