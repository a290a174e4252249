//! An op that plans on the host, through the crate: `plan FOLDER SHA256` plans a step and prints it.

use kernseal::sys::{KSEAL_DTYPE_BF16, RaggedPrefill, kseal_ragged_prefill_args, kseal_ragged_prefill_config};

fn main() -> kernseal::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let bundle = kernseal::open(&arguments[1], &arguments[2])?;
    let mut config = kseal_ragged_prefill_config::new();
    (config.device, config.dtype, config.head_dim, config.v_dim, config.causal) = (-1, KSEAL_DTYPE_BF16, 128, 128, 1);
    // SAFETY: no stream is named, and the handle launches nothing.
    let op = unsafe { bundle.prepare::<RaggedPrefill>(&config)? };

    let ends = [0i32, 100, 130];
    let mut args = kseal_ragged_prefill_args::new();
    (args.num_q_heads, args.num_kv_heads, args.sm_scale) = (1, 1, 1.0);
    (args.batch_size, args.total_q, args.total_kv) = (2, 130, 130);
    (args.qo_indptr, args.kv_indptr) = (ends.as_ptr().cast(), ends.as_ptr().cast());
    args.plan_bytes = op.plan_size(&args)?;
    let mut plan = vec![0u64; args.plan_bytes.div_ceil(8) as usize];
    args.plan = plan.as_mut_ptr().cast();
    // SAFETY: the ends of two sequences, and a plan of the size that it may take.
    let used = unsafe { op.plan(&args)? };
    let head = plan[0].to_le_bytes();
    println!("{} {}", String::from_utf8_lossy(&head), u8::from(0 < used && used <= args.plan_bytes));
    args.plan_bytes = used - 1;
    // SAFETY: as above.
    if let Err(error) = unsafe { op.plan(&args) } {
        println!("{error}");
    }
    Ok(())
}
