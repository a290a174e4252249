/* Schedules of paged MQA logits: from kseal_paged_mqa_schedule_args to the arguments of the variant's CuTe host function. */
#include "check.h"
#include "kernseal_ops.h"

#define OP "paged_mqa_schedule"
#define LIMIT(name) KSEAL_PAGED_MQA_SCHEDULE_LIMIT_##name
#define STRIDE_END ((int64_t)1 << 40) /* elements; the last entry of a batch then begins below 2^55 bytes */

typedef kseal_paged_mqa_schedule_args args_t;

kseal_status kseal_paged_mqa_schedule_launch_workspace(const struct kseal_handle *handle, const args_t *args,
                                                       uint64_t *bytes) {
    (void)handle, (void)args;
    *bytes = 0;
    return KSEAL_OK;
}

static uint32_t atoms_of(const struct kseal_handle *handle) {
    return handle->variant->axes[KSEAL_PAGED_MQA_SCHEDULE_AXIS_ATOMS];
}

static kseal_status check_sizes(const args_t *a, uint32_t atoms) {
    if (a->batch_size > LIMIT(MAX_ROWS) / atoms)
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; up to %u are supported (config.atoms is %u)", (long long)a->batch_size,
               LIMIT(MAX_ROWS) / atoms, atoms);
    if (a->num_ctas < 0 || a->num_ctas > LIMIT(MAX_CTAS))
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_ctas is %d; it must be 1 to %d, or 0 for the SMs of the device", a->num_ctas,
               LIMIT(MAX_CTAS));
    if (a->seq_len_stride < 0 || a->seq_len_stride >= STRIDE_END)
        REFUSE(KSEAL_INVALID_ARGUMENT, "seq_len_stride is %lld; it must be 1 to 2^40 - 1, or 0 for 1",
               (long long)a->seq_len_stride);
    return KSEAL_OK;
}

static kseal_status validate(const struct kseal_handle *handle, const args_t *a) {
    const struct kseal_pointer pointers[] = {
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), KSEAL_NEEDED, NULL},
        {"schedule", a->schedule, LIMIT(ALIGN_SCHEDULE), KSEAL_NEEDED, NULL},
    };
    CHECK(check_sizes(a, atoms_of(handle)));
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Tensors as CuTe passes them: the base, then the extents and strides that are not compiled in. */
struct lengths {
    const void *data;
    int32_t size;
    int64_t stride;
};
struct starts {
    void *data;
    int32_t size;
};

static kseal_status launch(const struct kseal_handle *handle, const args_t *a) {
    int32_t ctas = a->num_ctas != 0 ? a->num_ctas : (int32_t)handle->sm_count;
    int32_t rows = (int32_t)(a->batch_size * atoms_of(handle));
    struct lengths lengths = {a->seq_lens, (int32_t)a->batch_size, a->seq_len_stride != 0 ? a->seq_len_stride : 1};
    struct starts starts = {a->schedule, ctas + 1};
    void *stream = a->stream;
    void *list[] = {&lengths, &starts, &rows, &stream, NULL /* the result */};
    return kseal_handle_launch(handle, list, 4);
}

kseal_status kseal_paged_mqa_schedule_launch_run(const struct kseal_handle *handle, const args_t *args) {
    CHECK(kseal_check_not_negative(OP, "batch_size", args->batch_size));
    if (args->batch_size == 0)
        return KSEAL_OK;
    CHECK(validate(handle, args));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, args);
}
