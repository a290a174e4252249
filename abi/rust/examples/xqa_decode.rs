//! XQA decode from Rust, once by itself and once more in a CUDA graph.
//!
//! ```text
//! KERNSEAL_BUNDLE=BUNDLE cargo run --example xqa_decode -- BUNDLE
//! ```
//!
//! BUNDLE is a bundle's folder, absolute, such as /opt/kernseal/sm_90a-linux-x86_64. The digest of its library is compiled in: it
//! is what this program trusts. At run time it needs libc, the CUDA driver and the folder.

use kernseal::sys::{KSEAL_DTYPE_BF16, XqaDecode, kseal_xqa_decode_args, kseal_xqa_decode_config};
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
    create_stream: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int,
    destroy_stream: unsafe extern "C" fn(*mut c_void) -> c_int,
    synchronize: unsafe extern "C" fn(*mut c_void) -> c_int,
    begin_capture: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    end_capture: unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int,
    instantiate: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> c_int,
    launch_graph: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    destroy_executable: unsafe extern "C" fn(*mut c_void) -> c_int,
    destroy_graph: unsafe extern "C" fn(*mut c_void) -> c_int,
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
                create_stream: find(library, c"cuStreamCreate")?,
                destroy_stream: find(library, c"cuStreamDestroy_v2")?,
                synchronize: find(library, c"cuStreamSynchronize")?,
                begin_capture: find(library, c"cuStreamBeginCapture_v2")?,
                end_capture: find(library, c"cuStreamEndCapture")?,
                instantiate: find(library, c"cuGraphInstantiateWithFlags")?,
                launch_graph: find(library, c"cuGraphLaunch")?,
                destroy_executable: find(library, c"cuGraphExecDestroy")?,
                destroy_graph: find(library, c"cuGraphDestroy")?,
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
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        check(unsafe { (self.allocate)(&mut address, std::mem::size_of_val(values)) }, "cuMemAlloc")?;
        let memory = Memory { cuda: self, address };
        memory.write(values)?;
        Ok(memory)
    }

    fn stream(&self) -> Outcome<Stream<'_>> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        check(unsafe { (self.create_stream)(&mut stream, 0) }, "cuStreamCreate")?;
        Ok(Stream { cuda: self, stream })
    }
}

/// A stream, destroyed when dropped.
struct Stream<'a> {
    cuda: &'a Cuda,
    stream: *mut c_void,
}

impl Stream<'_> {
    fn wait(&self) -> Outcome<()> {
        // SAFETY: the stream is alive.
        check(unsafe { (self.cuda.synchronize)(self.stream) }, "cuStreamSynchronize")
    }

    /// What `launch` puts on the stream, as a graph.
    fn capture(&self, launch: impl FnOnce() -> kernseal::Result<()>) -> Outcome<Graph<'_>> {
        let cuda = self.cuda;
        let mut made = Graph { stream: self, graph: std::ptr::null_mut(), executable: std::ptr::null_mut() };
        // SAFETY: the stream is alive.
        check(unsafe { (cuda.begin_capture)(self.stream, 0) }, "cuStreamBeginCapture")?;
        launch()?;
        // SAFETY: as above, and the pointers are to a local.
        unsafe {
            check((cuda.end_capture)(self.stream, &mut made.graph), "cuStreamEndCapture")?;
            check((cuda.instantiate)(&mut made.executable, made.graph, 0), "cuGraphInstantiate")?;
        }
        Ok(made)
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once.
        unsafe { (self.cuda.destroy_stream)(self.stream) };
    }
}

/// A graph, destroyed when dropped.
struct Graph<'a> {
    stream: &'a Stream<'a>,
    graph: *mut c_void,
    executable: *mut c_void,
}

impl Graph<'_> {
    fn launch(&self) -> Outcome<()> {
        // SAFETY: what was captured is still prepared, and its memory there.
        check(unsafe { (self.stream.cuda.launch_graph)(self.executable, self.stream.stream) }, "cuGraphLaunch")?;
        self.stream.wait()
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let cuda = self.stream.cuda;
        // SAFETY: made once and destroyed once.
        unsafe {
            if !self.executable.is_null() {
                (cuda.destroy_executable)(self.executable);
            }
            if !self.graph.is_null() {
                (cuda.destroy_graph)(self.graph);
            }
        }
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

    fn write<T: Copy>(&self, values: &[T]) -> Outcome<()> {
        // SAFETY: the copy reads `values` only.
        let code = unsafe { (self.cuda.upload)(self.address, values.as_ptr().cast(), std::mem::size_of_val(values)) };
        check(code, "cuMemcpyHtoD")
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

const B: usize = 2;
const GROUP: usize = 8;
const D: usize = 128;
const PAGE: usize = 16;
const PAGES: usize = 4;

/// K and V of the pool. Pages 3 and 1 hold the 20 positions of sequence 0, page 0 the 3 of sequence 1. Row t of V is t + 1. The keys
/// of sequence 0 are all zero, so its output is the mean of its rows; in sequence 1 the key of position 1 outweighs the others.
fn cache() -> (Vec<u16>, Vec<u16>) {
    let (mut k, mut v) = (vec![0u16; PAGES * PAGE * D], vec![0u16; PAGES * PAGE * D]);
    k[D] = to_bf16(100.0);
    for (page, first) in [(3, 0), (1, PAGE), (0, 0)] {
        for row in 0..PAGE {
            let at = (page * PAGE + row) * D;
            v[at..at + D].fill(to_bf16((first + row + 1) as f32));
        }
    }
    (k, v)
}

fn expect_output(o: &Memory, sequence0: f32, sequence1: f32) -> Outcome<()> {
    let o: Vec<u16> = o.read(B * GROUP * D)?;
    for i in 0..GROUP * D {
        expect("o of sequence 0", from_bf16(o[i]), sequence0)?;
        expect("o of sequence 1", from_bf16(o[GROUP * D + i]), sequence1)?;
    }
    Ok(())
}

fn run(folder: &Path) -> Outcome<()> {
    let cuda = Cuda::start()?;
    let stream = cuda.stream()?;

    // README: begin
    // 1. Read the library once, compare it with the digest that was compiled in, load those bytes, and open the bundle. Images
    //    are checked against hashes compiled into the library when they are loaded.
    let bundle = kernseal::open_pinned(folder)?;

    // 2. Prepare what does not change between runs: may allocate, must not be under graph capture.
    let config = kseal_xqa_decode_config {
        device: -1, // that of the current context
        dtype: KSEAL_DTYPE_BF16,
        kv_dtype: KSEAL_DTYPE_BF16,
        out_dtype: KSEAL_DTYPE_BF16,
        head_dim: D as u32,
        group_size: GROUP as u32,
        page_size: PAGE as u32,
        ..Default::default()
    };
    // SAFETY: the config names no stream.
    let decode = unsafe { bundle.prepare::<XqaDecode>(&config)? };

    // 3. Sizes, addresses and the stream of one run, and scratch of the size that it asks for.
    let mut args = kseal_xqa_decode_args {
        num_kv_heads: 1,
        num_q_heads: GROUP as i32,
        q_scale: 1.0,
        batch_size: B as i64,
        num_pages: PAGES as i64,
        max_pages_per_seq: 2,
        stream: stream.stream,
        ..Default::default()
    };
    args.workspace_bytes = decode.workspace_size(&args)?;
    args.semaphores_bytes = decode.semaphores_size(&args)?;
    // README: end

    let mut q = [0u16; B * GROUP * D];
    q.chunks_mut(D).for_each(|head| head[0] = to_bf16(8.0));
    let (k, v) = cache();
    let (q, k, v, o) = (cuda.memory(&q)?, cuda.memory(&k)?, cuda.memory(&v)?, cuda.memory(&[0u16; B * GROUP * D])?);
    let (pages, lengths) = (cuda.memory(&[3i32, 1, 0, -1])?, cuda.memory(&[20i32, 3])?);
    // At least one byte: a size may be 0. Semaphores are zero before the first launch.
    let workspace = cuda.memory(&vec![0u8; args.workspace_bytes as usize + 1])?;
    let semaphores = cuda.memory(&vec![0u8; args.semaphores_bytes as usize + 1])?;
    args = kseal_xqa_decode_args {
        q: q.get(),
        k: k.get(),
        v: v.get(),
        o: o.get(),
        page_table: pages.get(),
        seq_lens: lengths.get(),
        workspace: workspace.get(),
        semaphores: semaphores.get(),
        ..args
    };

    // README: begin
    // 4. Run: validates and launches on args.stream, nothing else. Then wait, as with any launch.
    // SAFETY: every address is device memory of the documented shape and lives until after the wait, as does the handle.
    unsafe { decode.run(&args)? };
    // README: end
    stream.wait()?;
    expect_output(&o, 10.5, 2.0)?;

    // 5. The same in a graph: capturing launches nothing, and a replay reads the memory as it is then.
    // SAFETY: as above; the graph goes before the handle does.
    let graph = stream.capture(|| unsafe { decode.run(&args) })?;
    for length in [1i32, 20, 3] {
        lengths.write(&[length, 2])?;
        graph.launch()?;
        expect_output(&o, (length + 1) as f32 / 2.0, 2.0)?;
    }
    println!("ok: two sequences of XQA decode, output as expected, also from a graph");
    Ok(())
}

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: xqa_decode BUNDLE");
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
