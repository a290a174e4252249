/* Ragged prefill: the plan of upstream's scheduler (PrefillPlan), and from it the launches of upstream's FA2 kernels. */
#include "kernseal_ops.h"

#define OP "ragged_prefill"
#define LIMIT(name) KSEAL_RAGGED_PREFILL_LIMIT_##name
#define KEYS KV_INDPTR
#define MAGIC 0x326e616c70676172u /* "ragplan2" */
#define KV_TOTAL total_kv
#define V_DIM "v_dim"
#define TILE_128_DIM LIMIT(TILE_128_V_DIM)

typedef kseal_ragged_prefill_args args_t;

struct strides {
    uint32_t k_row, k_head, v_row, v_head;
};

#include "ragged_prefill/fa2_plan.h"

/* The kernel's parameter (ragged_prefill.cu). */
struct params {
    const void *q, *k, *v;
    const int32_t *q_indptr, *kv_indptr;
    void *o;
    float *lse;
    struct divisor group_size;
    float sm_scale;
    uint32_t num_q_heads, num_kv_heads;
    uint32_t q_row, q_head, k_row, k_head, v_row, v_head;
    int32_t window_left;
    const int32_t *requests, *q_tiles, *kv_tiles, *merge_indptr, *o_indptr, *chunk;
    const uint8_t *valid;
    uint32_t max_rows;
    const uint32_t *rows;
    uint32_t grid;
    uint8_t split;
};

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    return (struct problem){
        .args = a,
        .head_dim = axes[KSEAL_RAGGED_PREFILL_AXIS_HEAD_DIM],
        .v_dim = axes[KSEAL_RAGGED_PREFILL_AXIS_V_DIM],
        .total_pages = a->total_kv,
        .splittable_blocks = splittable_blocks(handle),
    };
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t d = p->head_dim, v = p->v_dim, heads = a->num_q_heads, kv_heads = a->num_kv_heads;
    CHECK(check_stride("q_row_stride", a->q_row_stride, heads * d, d, STRIDE_BITS, &p->q_row));
    CHECK(check_stride("q_head_stride", a->q_head_stride, d, d, STRIDE_BITS, &p->q_head));
    CHECK(check_stride("k_row_stride", a->k_row_stride, kv_heads * d, d, STRIDE_BITS, &p->kv.k_row));
    CHECK(check_stride("k_head_stride", a->k_head_stride, d, d, STRIDE_BITS, &p->kv.k_head));
    CHECK(check_stride("v_row_stride", a->v_row_stride, kv_heads * v, v, STRIDE_BITS, &p->kv.v_row));
    CHECK(check_stride("v_head_stride", a->v_head_stride, v, v, STRIDE_BITS, &p->kv.v_head));
    CHECK(check_reach("total_q", a->total_q, p->q_row, "q_row_stride"));
    CHECK(check_reach("total_q", a->total_q, heads * v, "num_q_heads * v_dim"));
    CHECK(check_reach("total_kv", a->total_kv, p->kv.k_row, "k_row_stride"));
    CHECK(check_reach("total_kv", a->total_kv, p->kv.v_row, "v_row_stride"));
    CHECK(check_reach("num_q_heads", heads, p->q_head, "q_head_stride"));
    CHECK(check_reach("num_kv_heads", kv_heads, p->kv.k_head, "k_head_stride"));
    return check_reach("num_kv_heads", kv_heads, p->kv.v_head, "v_head_stride");
}

static kseal_status check_sizes(const args_t *a, struct problem *p, bool *empty) {
    CHECK(check_count("batch_size", a->batch_size));
    CHECK(check_count("total_q", a->total_q));
    CHECK(check_count("total_kv", a->total_kv));
    *empty = a->batch_size == 0 || a->total_q == 0;
    if (*empty)
        return KSEAL_OK;
    CHECK(kseal_check_positive_scale(OP, "sm_scale", a->sm_scale));
    CHECK(check_heads(a, p));
    CHECK(check_choices(a, p));
    return check_strides(a, p);
}

static kseal_status check_planned(const args_t *a) {
    CHECK(check_pointer("qo_indptr", a->qo_indptr, LIMIT(ALIGN_QO_INDPTR), true));
    CHECK(check_pointer("kv_indptr", a->kv_indptr, LIMIT(ALIGN_KV_INDPTR), true));
    CHECK(check_pointer("plan", a->plan, LIMIT(ALIGN_PLAN), false));
    CHECK(check_indptr("qo_indptr", a->qo_indptr, a->batch_size, "total_q", a->total_q));
    return check_indptr("kv_indptr", a->kv_indptr, a->batch_size, "total_kv", a->total_kv);
}

static int64_t pages_of(const struct problem *p, int64_t i) { return length(p->args->kv_indptr, i); }

static const int32_t *keys_of(const struct problem *p, int array, int64_t *count) {
    (void)array;
    *count = p->args->batch_size + 1;
    return p->args->kv_indptr;
}

static struct params params_of(const struct problem *p, const struct head *head) {
    const args_t *a = p->args;
    return (struct params){
        .q = a->q,
        .k = a->k,
        .v = a->v,
        .q_indptr = in_plan(a, head, Q_INDPTR),
        .kv_indptr = in_plan(a, head, KV_INDPTR),
        .o = tiles_o(a, head),
        .lse = tiles_lse(a, head),
        .group_size = divisor_of((uint32_t)p->group_size),
        .sm_scale = a->sm_scale,
        .num_q_heads = (uint32_t)a->num_q_heads,
        .num_kv_heads = (uint32_t)a->num_kv_heads,
        .q_row = p->q_row,
        .q_head = p->q_head,
        .k_row = p->kv.k_row,
        .k_head = p->kv.k_head,
        .v_row = p->kv.v_row,
        .v_head = p->kv.v_head,
        .window_left = -1,
        .requests = in_plan(a, head, REQUESTS),
        .q_tiles = in_plan(a, head, Q_TILES),
        .kv_tiles = in_plan(a, head, KV_TILES),
        .merge_indptr = in_plan(a, head, MERGE_INDPTR),
        .o_indptr = in_plan(a, head, O_INDPTR),
        .chunk = in_plan(a, head, CHUNK),
        .valid = in_plan(a, head, VALID),
        .max_rows = head->rows,
        .rows = in_plan(a, head, ROWS),
        .grid = head->grid,
        .split = (uint8_t)head->split,
    };
}

/* ---- what abi/generated/kernseal_ops.h declares ---- */

kseal_status kseal_ragged_prefill_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return measure_workspace(handle, args, bytes);
}

kseal_status kseal_ragged_prefill_launch_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return measure_plan(handle, args, bytes);
}

kseal_status kseal_ragged_prefill_launch_make_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return make_plan(handle, args, bytes);
}

kseal_status kseal_ragged_prefill_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    struct head head;
    bool empty;
    CHECK(check_sizes(args, &p, &empty));
    if (empty)
        return KSEAL_OK;
    CHECK(read_head(&p, &head));
    CHECK(check_pointers(args, &head, args->total_kv > 0));
    CHECK(kseal_handle_check_device(handle));
    const struct params params = params_of(&p, &head);
    return launch(handle, &params, &p, &head);
}
