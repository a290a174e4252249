/* What a run refuses: each test is one sentence, and none of them launches. */
#define _GNU_SOURCE
#include <math.h>

#include "fixture.h"

static handle_t *handle;

static void set_up(const char *variant) {
    handle = prepare(open_bundle(), variant);
}

#define REFUSED(sentence, variant, status, change, ...)                                                                    \
    TEST(sentence) {                                                                                                       \
        set_up(variant);                                                                                                   \
        args_t a = args_of(variant);                                                                                       \
        CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);                                                              \
        int before = logged("launch");                                                                                     \
        change;                                                                                                            \
        REFUSES(status, kseal_gdn_prefill_run(handle, &a), "gdn_prefill: ", __VA_ARGS__);                                  \
        CHECK(before == 1 && logged("launch") == before);                                                                  \
    }

/* heads */
REFUSED(no_query_heads, "packed", KSEAL_INVALID_ARGUMENT, a.num_q_heads = 0, "num_q_heads is 0", "positive")
REFUSED(negative_key_heads, "packed", KSEAL_INVALID_ARGUMENT, a.num_k_heads = -4, "num_k_heads is -4")
REFUSED(no_value_heads, "packed", KSEAL_INVALID_ARGUMENT, a.num_v_heads = 0, "num_v_heads is 0")
REFUSED(head_dim_that_is_not_128, "packed", KSEAL_INVALID_ARGUMENT, a.head_dim = 64, "head_dim is 64", "must be 128")
REFUSED(value_heads_that_query_heads_do_not_divide, "packed", KSEAL_INVALID_ARGUMENT, a.num_v_heads = 6, "4, 4, 6",
        "Hk = Hq with Hv a multiple of Hq", "Hk = Hv with Hq a multiple of Hv")
REFUSED(key_heads_that_are_neither_query_nor_value_heads, "packed", KSEAL_INVALID_ARGUMENT, a.num_k_heads = 2, "4, 2, 8")
REFUSED(key_heads_like_value_heads_where_value_heads_are_more, "packed", KSEAL_INVALID_ARGUMENT, a.num_k_heads = 8, "4, 8, 8")

TEST(grouped_query_heads_run_where_the_class_has_them) {
    set_up("packed");
    args_t a = args_of("packed");
    a.num_q_heads = 8;
    a.num_k_heads = a.num_v_heads = 4;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
}
TEST(grouped_query_heads_are_refused_where_the_class_lacks_them) {
    set_up("blackwell");
    args_t a = args_of("blackwell");
    a.num_q_heads = 8;
    a.num_k_heads = a.num_v_heads = 4;
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_run(handle, &a), "8, 4, 4");
    CHECK(strstr(kseal_last_error(), "Hk = Hv") == NULL);
}

/* counts */
REFUSED(negative_tokens, "packed", KSEAL_INVALID_ARGUMENT, a.total_tokens = -1, "total_tokens is -1")
REFUSED(negative_sequences, "packed", KSEAL_INVALID_ARGUMENT, a.num_seqs = -1, "num_seqs is -1")
REFUSED(pool_rows_without_a_pool, "packed", KSEAL_INVALID_ARGUMENT, a.pool_rows = 1, "pool_rows is 1", "config.pooled is 0")
REFUSED(pool_without_rows, "pooled", KSEAL_INVALID_ARGUMENT, a.pool_rows = 0, "pool_rows is 0", "config.pooled is 1")
REFUSED(checkpoint_interval_without_checkpoints, "packed", KSEAL_INVALID_ARGUMENT, a.checkpoint_every = 64,
        "checkpoint_every is 64", "config.checkpoints is 0")
REFUSED(checkpoint_interval_that_is_no_multiple_of_64, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.checkpoint_every = 100,
        "checkpoint_every is 100", "multiple of 64")
REFUSED(checkpoint_interval_of_zero, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.checkpoint_every = 0, "checkpoint_every is 0")
REFUSED(checkpoint_interval_below_zero, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.checkpoint_every = -64, "is -64")
REFUSED(checkpoint_count_without_checkpoints, "packed", KSEAL_INVALID_ARGUMENT, a.total_checkpoints = 1,
        "total_checkpoints is 1")
REFUSED(negative_checkpoint_count, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.total_checkpoints = -1, "total_checkpoints is -1")
REFUSED(scale_of_zero, "packed", KSEAL_INVALID_ARGUMENT, a.scale = 0.0f, "scale is 0")
REFUSED(scale_that_is_not_a_number, "packed", KSEAL_INVALID_ARGUMENT, a.scale = NAN, "scale is")
REFUSED(scale_that_is_infinite, "packed", KSEAL_INVALID_ARGUMENT, a.scale = INFINITY, "scale is inf")

/* products; H is 8, D is 128 */
REFUSED(tokens_that_overflow, "packed", KSEAL_OVERFLOW, a.total_tokens = (int64_t)1 << 21, "total_tokens is 2097152", "2^31")
REFUSED(tokens_beyond_64_bits, "packed", KSEAL_OVERFLOW, a.total_tokens = INT64_MAX, "total_tokens is 9223372036854775807")
REFUSED(packed_states_that_overflow, "packed", KSEAL_OVERFLOW, a.num_seqs = 1 << 14, "num_seqs is 16384", "N * H * D * D")
REFUSED(grid_that_overflows, "pooled", KSEAL_OVERFLOW, a.num_seqs = (int64_t)1 << 28, "num_seqs is 268435456", "N * H ")
REFUSED(pool_rows_that_overflow, "pooled", KSEAL_OVERFLOW, a.pool_rows = (int64_t)1 << 31, "pool_rows is 2147483648")
REFUSED(checkpoints_that_overflow, "pooled_ckpt", KSEAL_OVERFLOW, a.total_checkpoints = 1 << 14, "total_checkpoints is 16384")
REFUSED(head_count_that_overflows_alone, "packed", KSEAL_OVERFLOW, a.num_v_heads = 1 << 30, "T * H * D")

TEST(the_largest_tokens_and_sequences_run) {
    set_up("packed");
    args_t a = args_of("packed");
    a.total_tokens = ((int64_t)1 << 21) - 1;
    a.num_seqs = (1 << 14) - 1;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
}

/* strides */
REFUSED(query_stride_below_dense, "packed", KSEAL_INVALID_ARGUMENT, a.q_token_stride = 384, "q_token_stride is 384", "512")
REFUSED(key_stride_that_is_negative, "packed", KSEAL_INVALID_ARGUMENT, a.k_token_stride = -512, "k_token_stride is -512")
REFUSED(value_stride_off_by_some_elements, "packed", KSEAL_MISALIGNED, a.v_token_stride = 1024 + 64, "v_token_stride is 1088",
        "multiple of 128")
REFUSED(output_stride_below_dense, "packed", KSEAL_INVALID_ARGUMENT, a.o_token_stride = 512, "o_token_stride is 512", "1024")
REFUSED(token_stride_beyond_a_tensor_map, "packed", KSEAL_OVERFLOW, a.q_token_stride = (int64_t)1 << 39, "q_token_stride is")
REFUSED(state_stride_without_a_pool, "packed", KSEAL_INVALID_ARGUMENT, a.final_state_stride = 131072,
        "final_state_stride is 131072", "config.pooled is 0")
REFUSED(initial_state_stride_without_a_pool, "packed", KSEAL_INVALID_ARGUMENT, a.initial_state_stride = 131072,
        "initial_state_stride is 131072")
REFUSED(row_stride_below_dense, "pooled", KSEAL_INVALID_ARGUMENT, a.initial_state_stride = 128, "initial_state_stride is 128")
REFUSED(row_stride_off_by_some_elements, "pooled", KSEAL_MISALIGNED, a.final_state_stride = 131072 + 2,
        "final_state_stride is 131074", "multiple of")
REFUSED(pool_beyond_64_bits, "pooled", KSEAL_OVERFLOW, a.final_state_stride = (int64_t)1 << 59, "final_state_stride is")

/* pointers: null, where null is not allowed */
REFUSED(queries_that_are_null, "packed", KSEAL_INVALID_ARGUMENT, a.q = NULL, "q is null")
REFUSED(keys_that_are_null, "packed", KSEAL_INVALID_ARGUMENT, a.k = NULL, "k is null")
REFUSED(values_that_are_null, "packed", KSEAL_INVALID_ARGUMENT, a.v = NULL, "v is null")
REFUSED(output_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.o = NULL, "o is null")
REFUSED(alpha_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.alpha = NULL, "alpha is null", "config.alpha is 1")
REFUSED(beta_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.beta = NULL, "beta is null", "config.beta is 1")
REFUSED(initial_state_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.initial_state = NULL, "initial_state is null")
REFUSED(final_state_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.final_state = NULL, "final_state is null")
REFUSED(offsets_that_are_null, "packed", KSEAL_INVALID_ARGUMENT, a.cu_seqlens = NULL, "cu_seqlens is null")
REFUSED(state_indices_that_are_null, "pooled", KSEAL_INVALID_ARGUMENT, a.state_indices = NULL, "state_indices is null")
REFUSED(checkpoints_that_are_null, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.checkpoints = NULL, "checkpoints is null")
REFUSED(checkpoint_starts_that_are_null, "pooled_ckpt", KSEAL_INVALID_ARGUMENT, a.checkpoint_cu_starts = NULL,
        "checkpoint_cu_starts is null")
REFUSED(workspace_that_is_null, "packed", KSEAL_INVALID_ARGUMENT, a.workspace = NULL, "workspace is null")

/* pointers: given, where the config says there is none */
REFUSED(alpha_that_the_config_excludes, "plain", KSEAL_INVALID_ARGUMENT, a.alpha = at(0x80000), "alpha is 0x80000", "null")
REFUSED(beta_that_the_config_excludes, "plain", KSEAL_INVALID_ARGUMENT, a.beta = at(0x80000), "beta is 0x80000")
REFUSED(initial_state_that_the_config_excludes, "plain", KSEAL_INVALID_ARGUMENT, a.initial_state = at(0x80000),
        "initial_state is 0x80000", "config.initial_state is 0")
REFUSED(state_indices_that_the_config_excludes, "packed", KSEAL_INVALID_ARGUMENT, a.state_indices = at(0x80000),
        "state_indices is 0x80000", "config.pooled is 0")
REFUSED(output_indices_that_the_config_excludes, "packed", KSEAL_INVALID_ARGUMENT, a.output_state_indices = at(0x80000),
        "output_state_indices is 0x80000")
REFUSED(checkpoints_that_the_config_excludes, "packed", KSEAL_INVALID_ARGUMENT, a.checkpoints = at(0x80000),
        "checkpoints is 0x80000")
REFUSED(checkpoint_starts_that_the_config_excludes, "packed", KSEAL_INVALID_ARGUMENT, a.checkpoint_cu_starts = at(0x80000),
        "checkpoint_cu_starts is 0x80000")

/* pointers: alignment */
REFUSED(misaligned_queries, "packed", KSEAL_MISALIGNED, a.q = at(0x10008), "q is 0x10008", "16 bytes")
REFUSED(misaligned_keys, "packed", KSEAL_MISALIGNED, a.k = at(0x10002), "k is 0x10002", "16 bytes")
REFUSED(misaligned_values, "packed", KSEAL_MISALIGNED, a.v = at(0x10004), "v is 0x10004", "16 bytes")
REFUSED(misaligned_output, "packed", KSEAL_MISALIGNED, a.o = at(0x10008), "o is 0x10008", "16 bytes")
REFUSED(misaligned_alpha, "packed", KSEAL_MISALIGNED, a.alpha = at(0x10004), "alpha is 0x10004", "16 bytes")
REFUSED(misaligned_beta, "packed", KSEAL_MISALIGNED, a.beta = at(0x10004), "beta is 0x10004", "16 bytes")
REFUSED(misaligned_initial_state, "packed", KSEAL_MISALIGNED, a.initial_state = at(0x10004), "initial_state is 0x10004")
REFUSED(misaligned_final_state, "packed", KSEAL_MISALIGNED, a.final_state = at(0x10004), "final_state is 0x10004")
REFUSED(misaligned_checkpoints, "pooled_ckpt", KSEAL_MISALIGNED, a.checkpoints = at(0x10008), "checkpoints is 0x10008")
REFUSED(misaligned_offsets, "packed", KSEAL_MISALIGNED, a.cu_seqlens = at(0x10004), "cu_seqlens is 0x10004", "8 bytes")
REFUSED(misaligned_state_indices, "pooled", KSEAL_MISALIGNED, a.state_indices = at(0x10004), "state_indices is 0x10004")
REFUSED(misaligned_output_indices, "pooled", KSEAL_MISALIGNED, a.output_state_indices = at(0x10004), "output_state_indices is")
REFUSED(misaligned_checkpoint_starts, "pooled_ckpt", KSEAL_MISALIGNED, a.checkpoint_cu_starts = at(0x10004),
        "checkpoint_cu_starts is 0x10004")
REFUSED(misaligned_workspace, "packed", KSEAL_MISALIGNED, a.workspace = at(0x10040), "workspace is 0x10040", "128 bytes")
REFUSED(misaligned_int32_offsets, "i32", KSEAL_MISALIGNED, a.cu_seqlens = at(0x10002), "cu_seqlens is 0x10002", "4 bytes")

TEST(int32_offsets_need_four_bytes_only) {
    set_up("i32");
    args_t a = args_of("i32");
    a.cu_seqlens = at(0x10004);
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
}

/* workspace; 132 SMs of 128 bytes each */
REFUSED(workspace_one_byte_short, "packed", KSEAL_WORKSPACE_TOO_SMALL, a.workspace_bytes = 132 * 128 - 1,
        "workspace_bytes is 16895", "16896")

TEST(workspace_of_just_the_asked_size_runs) {
    uint64_t bytes;
    set_up("packed");
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_workspace_size(handle, &a, &bytes) == KSEAL_OK);
    CHECK(bytes == 132 * 128);
    a.workspace_bytes = bytes;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
}
TEST(workspace_of_the_blackwell_class_is_fixed) {
    uint64_t bytes;
    set_up("blackwell");
    args_t a = args_of("blackwell");
    CHECK(kseal_gdn_prefill_workspace_size(handle, &a, &bytes) == KSEAL_OK);
    CHECK(bytes == 75776);
}

/* what is empty */
TEST(no_sequences_is_a_no_op_that_looks_at_no_pointer) {
    set_up("packed");
    args_t a = {.struct_size = sizeof a};
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    CHECK(logged("launch") == 0);
}
TEST(no_tokens_still_launches_since_states_are_copied) {
    set_up("packed");
    args_t a = args_of("packed");
    a.total_tokens = 0;
    a.q = a.k = a.v = a.alpha = a.beta = NULL;
    a.o = NULL;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    CHECK(logged("launch") == 1);
}
TEST(no_checkpoints_to_store_needs_no_array) {
    set_up("pooled_ckpt");
    args_t a = args_of("pooled_ckpt");
    a.total_checkpoints = 0;
    a.checkpoints = NULL;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
}
TEST(absent_arguments_are_not_in_the_list) {
    kseal_bundle *bundle = open_bundle();
    const struct {
        const char *variant;
        int count;
    } expected[] = {{"packed", 21}, {"pooled", 23}, {"pooled_ckpt", 25}, {"plain", 18}, {"blackwell", 14}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        args_t a = args_of(expected[i].variant);
        CHECK(kseal_gdn_prefill_run(prepare(bundle, expected[i].variant), &a) == KSEAL_OK);
        CHECK(stub_argument_count == expected[i].count);
    }
}

/* the call itself */
TEST(run_without_a_handle) {
    args_t a = args_of("packed");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_run(NULL, &a), "handle is null");
}
TEST(run_without_arguments) {
    set_up("packed");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_run(handle, NULL), "kseal_gdn_prefill_args is null");
}
TEST(workspace_size_without_somewhere_to_put_it) {
    set_up("packed");
    args_t a = args_of("packed");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_workspace_size(handle, &a, NULL), "bytes is null");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_workspace_size(NULL, &a, NULL), "handle is null");
}
TEST(arguments_of_a_smaller_struct_than_ever_was) {
    set_up("packed");
    args_t a = args_of("packed");
    a.struct_size = sizeof a - 8;
    REFUSES(KSEAL_ABI_MISMATCH, kseal_gdn_prefill_run(handle, &a), "struct_size is", "at least");
}
TEST(arguments_of_a_later_struct_run_while_its_new_fields_are_zero) {
    struct {
        args_t known;
        uint64_t added;
    } later = {args_of("packed"), 0};
    set_up("packed");
    later.known = args_of("packed");
    later.known.struct_size = sizeof later;
    CHECK(kseal_gdn_prefill_run(handle, &later.known) == KSEAL_OK);
    later.added = 1;
    REFUSES(KSEAL_ABI_MISMATCH, kseal_gdn_prefill_run(handle, &later.known), "struct_size is", "is set");
}
TEST(run_on_a_device_that_was_not_prepared) {
    fake_set_device(2, 9, 0, 132);
    set_up("packed");
    args_t a = args_of("packed");
    fake_set_current(1);
    REFUSES(KSEAL_NOT_PREPARED, kseal_gdn_prefill_run(handle, &a), "device 1 is current", "device 0");
    CHECK(logged("launch") == 0);
}
TEST(run_on_a_thread_without_a_context_takes_that_of_prepare_and_leaves_none) {
    int device;
    set_up("packed");
    args_t a = args_of("packed");
    fake_set_current(-1);
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    CHECK(logged("launch") == 1);
    CHECK(fake_current_device(&device) == 201);
}
TEST(run_on_a_thread_without_a_context_where_the_drivers_push_fails) {
    set_up("packed");
    args_t a = args_of("packed");
    fake_set_current(-1);
    fake_fail("cuCtxPushCurrent", 2, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_run(handle, &a), "cuCtxPushCurrent", "2");
    CHECK(logged("launch") == 0);
}
TEST(a_launch_that_fails_gives_the_drivers_name_code_and_text) {
    set_up("packed");
    args_t a = args_of("packed");
    fake_fail("cuLaunchKernelEx", 209, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_run(handle, &a), "cuLaunchKernelEx", "CUDA_ERROR_NO_BINARY_FOR_GPU", "209",
            "no kernel image is available");
}
TEST(a_failed_launch_is_reported_even_where_host_code_ignores_it) {
    set_up("packed");
    args_t a = args_of("packed");
    stub_mode = STUB_IGNORE_LAUNCH;
    fake_fail("cuLaunchKernelEx", 700, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_run(handle, &a), "CUDA_ERROR_ILLEGAL_ADDRESS");
    fake_fail("cuLaunchKernelEx", 0, 0);
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK); /* and forgotten after that */
}
TEST(host_code_that_fails_without_a_driver_call) {
    set_up("packed");
    args_t a = args_of("packed");
    stub_mode = STUB_FAIL_QUIETLY;
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_run(handle, &a), "CuTe host code", "700");
}
TEST(a_tensor_map_that_cannot_be_made_stops_the_launch) {
    set_up("packed");
    args_t a = args_of("packed");
    stub_mode = STUB_ENCODE;
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    fake_fail("cuTensorMapEncodeTiled", 1, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_run(handle, &a), "cuTensorMapEncodeTiled", "(1)");
    CHECK(logged("launch") == 1);
}
TEST(a_launch_into_a_stream_that_another_capture_forbids) {
    set_up("packed");
    args_t a = args_of("packed");
    fake_fail("cuLaunchKernelEx", 900, 0);
    REFUSES(KSEAL_CAPTURING, kseal_gdn_prefill_run(handle, &a), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
}
