//! GDN prefill from Rust.
//!
//! ```text
//! KERNSEAL_PINS=BUNDLE/kernseal_pins.rs cargo run --example gdn_prefill -- BUNDLE
//! ```
//!
//! BUNDLE is a bundle's folder, absolute, such as /opt/kernseal/sm_90a-linux-x86_64. Its pins are compiled in: they are what
//! this program trusts.

use kernseal::dl::Dl;
use kernseal::sys::{
    kseal_gdn_prefill_args, kseal_gdn_prefill_config, GdnPrefill, KSEAL_DTYPE_BF16, KSEAL_DTYPE_F32, KSEAL_DTYPE_I64,
    KSEAL_STATE_LAYOUT_HVK,
};
use kernseal::Library;
use std::ffi::{c_int, c_uint, c_void, CStr};
use std::path::Path;
use std::process::ExitCode;

#[allow(dead_code)] // a real program would also look at FILES
mod pins {
    include!(env!("KERNSEAL_PINS"));
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The CUDA driver, as much of it as this example needs. A serving runtime has one already.
struct Cuda(Dl);

impl Cuda {
    /// # Safety
    /// `F` must be the C type of the function called `name`.
    unsafe fn find<F: Copy>(&self, name: &CStr) -> Outcome<F> {
        let symbol = self.0.symbol(name);
        if symbol.is_null() {
            return Err(format!("libcuda.so.1 has no {}", name.to_string_lossy()).into());
        }
        Ok(std::mem::transmute_copy::<*mut c_void, F>(&symbol))
    }

    fn check(code: c_int, what: &str) -> Outcome<()> {
        if code == 0 {
            Ok(())
        } else {
            Err(format!("{what}: CUDA error {code}").into())
        }
    }

    fn start() -> Outcome<Self> {
        let cuda = Self(Dl::open(c"libcuda.so.1")?);
        let (mut device, mut context): (c_int, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: the types are those of cuda.h, the pointers are to locals.
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> c_int = cuda.find(c"cuInit")?;
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = cuda.find(c"cuDeviceGet")?;
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                cuda.find(c"cuDevicePrimaryCtxRetain")?;
            let set: unsafe extern "C" fn(*mut c_void) -> c_int = cuda.find(c"cuCtxSetCurrent")?;
            Self::check(init(0), "cuInit")?;
            Self::check(get(&mut device, 0), "cuDeviceGet")?;
            Self::check(retain(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            Self::check(set(context), "cuCtxSetCurrent")?;
        }
        Ok(cuda)
    }

    /// Device memory with a copy of `values`. An example ends before it needs the memory back.
    fn upload<T: Copy>(&self, values: &[T]) -> Outcome<*mut c_void> {
        let (mut address, size) = (0u64, std::mem::size_of_val(values));
        // SAFETY: the types are those of cuda.h; the copy reads `values` only.
        unsafe {
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int = self.find(c"cuMemAlloc_v2")?;
            let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int = self.find(c"cuMemcpyHtoD_v2")?;
            Self::check(allocate(&mut address, size), "cuMemAlloc")?;
            Self::check(copy(address, values.as_ptr().cast(), size), "cuMemcpyHtoD")?;
        }
        Ok(address as *mut c_void)
    }

    fn download<T: Copy + Default>(&self, address: *mut c_void, count: usize) -> Outcome<Vec<T>> {
        let mut values = vec![T::default(); count];
        let size = std::mem::size_of_val(&values[..]);
        // SAFETY: the type is that of cuda.h; the copy fills `values` only.
        unsafe {
            let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int = self.find(c"cuMemcpyDtoH_v2")?;
            Self::check(copy(values.as_mut_ptr().cast(), address as u64, size), "cuMemcpyDtoH")?;
        }
        Ok(values)
    }

    fn wait(&self) -> Outcome<()> {
        // SAFETY: takes nothing.
        let code = unsafe { self.find::<unsafe extern "C" fn() -> c_int>(c"cuCtxSynchronize")?() };
        Self::check(code, "cuCtxSynchronize")
    }
}

fn to_bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16 // exact for the values used here
}

fn from_bf16(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

fn expect(what: &str, got: f32, wanted: f32) -> Outcome<()> {
    if (got - wanted).abs() < 1e-2 {
        Ok(())
    } else {
        Err(format!("{what} is {got}, expected {wanted}").into())
    }
}

fn run(folder: &Path) -> Outcome<()> {
    // 1. Read the library once, compare it with the pins, load those bytes.
    let library = Library::load(&folder.join("libkernseal.so"), pins::LIBRARY_SHA256)?;

    // 2. A context on device 0.
    let cuda = Cuda::start()?;

    // 3. Open the bundle. Its images are checked against hashes compiled into the library when they are loaded.
    let bundle = library.open(folder, 0)?;
    if !bundle.variants()?.iter().any(|variant| variant.op == "gdn_prefill") {
        return Err(format!("{}: has no GDN prefill", folder.display()).into());
    }

    // 4. Prepare what does not change between runs: may allocate, must not be under graph capture.
    let prefill = bundle.prepare::<GdnPrefill>(&kseal_gdn_prefill_config {
        device: -1,
        dtype: KSEAL_DTYPE_BF16,
        state_dtype: KSEAL_DTYPE_F32,
        state_layout: KSEAL_STATE_LAYOUT_HVK,
        index_dtype: KSEAL_DTYPE_I64,
        initial_state: 1,
        alpha: 1,
        beta: 1,
        ..Default::default()
    })?;

    // 5. One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both.
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
    let (o, state) = (cuda.upload(&[0u16; T * D])?, cuda.upload(&[0f32; D * D])?);
    let mut args = kseal_gdn_prefill_args {
        num_q_heads: 1,
        num_k_heads: 1,
        num_v_heads: 1,
        head_dim: D as i32,
        scale: 1.0,
        total_tokens: T as i64,
        num_seqs: 1,
        q: cuda.upload(&q)?,
        k: cuda.upload(&k)?,
        v: cuda.upload(&v)?,
        o,
        alpha: cuda.upload(&[1.0f32, 0.5])?, // linear: exp(g), not g
        beta: cuda.upload(&[1.0f32, 0.25])?,
        initial_state: cuda.upload(&[0f32; D * D])?,
        final_state: state,
        cu_seqlens: cuda.upload(&[0i64, T as i64])?,
        ..Default::default()
    };
    args.workspace_bytes = prefill.workspace_size(&args)?;
    args.workspace = cuda.upload(&vec![0u8; args.workspace_bytes as usize])?;

    // 6. Run on the default stream, and wait, as with any launch.
    // SAFETY: every address is device memory of the documented shape, and lives until the process ends.
    unsafe { prefill.run(&args)? };
    cuda.wait()?;

    // 7. The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both.
    let (out, state): (Vec<u16>, Vec<f32>) = (cuda.download(o, T * D)?, cuda.download(state, D * D)?);
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
