/* Paged prefill: the plan of upstream's scheduler (PrefillPlan), and from it the launches of upstream's FA2 kernels. */
#include "kernseal_ops.h"

#define OP "paged_prefill"
#define LIMIT(name) KSEAL_PAGED_PREFILL_LIMIT_##name
#define KEYS PAGE_INDPTR, KV_LENS
#define MAGIC 0x326e616c70676170u /* "pagplan2" */
#define KV_TOTAL total_pages
#define V_DIM "head_dim"
#define TILE_128_DIM LIMIT(TILE_128_HEAD_DIM)
#define KV_STRIDE_BITS 32 /* the kernel multiplies them as uint64 */

typedef kseal_paged_prefill_args args_t;

struct strides {
    uint32_t page, row, head;
};

#include "ragged_prefill/fa2_plan.h"

/* paged_kv_t (page.cuh). */
struct paged_kv {
    struct divisor page_size;
    uint32_t num_heads, head_dim, batch_size;
    struct strides k, v;
    const void *k_data, *v_data;
    const int32_t *indices, *indptr, *last_page_len, *rope_pos_offset;
};

/* The kernel's parameter (paged_prefill.cu). */
struct params {
    const void *q;
    struct paged_kv kv;
    const int32_t *q_indptr, *kv_lens;
    void *o;
    float *lse;
    struct divisor group_size;
    float sm_scale;
    uint32_t num_q_heads;
    uint32_t q_row, q_head;
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
        .head_dim = axes[KSEAL_PAGED_PREFILL_AXIS_HEAD_DIM],
        .v_dim = axes[KSEAL_PAGED_PREFILL_AXIS_HEAD_DIM],
        .page_size = a->page_size,
        .total_pages = a->total_pages,
        .splittable_blocks = splittable_blocks(handle),
    };
}

static kseal_status check_pages(const args_t *a) {
    CHECK(kseal_check_positive(OP, "page_size", a->page_size));
    if (!product_below(COUNT_END, a->total_pages, a->page_size, 1))
        REFUSE(KSEAL_OVERFLOW, "total_pages is %lld; times page_size, %d, it must be below 2^31", (long long)a->total_pages,
               a->page_size);
    if (a->num_pages > COUNT_END)
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; page_indices holds int32, so up to 2^31 are supported",
               (long long)a->num_pages);
    if (a->num_pages == 0 && a->total_pages > 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_pages is 0; with total_pages above 0, %lld, there must be a page",
               (long long)a->total_pages);
    if (a->kv_chunk > 0 && a->kv_chunk % a->page_size != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "kv_chunk is %lld; it must be a multiple of page_size, %d", (long long)a->kv_chunk,
               a->page_size);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t d = p->head_dim, heads = a->num_q_heads, row = a->num_kv_heads * d;
    CHECK(check_stride("q_row_stride", a->q_row_stride, heads * d, d, STRIDE_BITS, &p->q_row));
    CHECK(check_stride("q_head_stride", a->q_head_stride, d, d, STRIDE_BITS, &p->q_head));
    CHECK(check_stride("kv_page_stride", a->kv_page_stride, a->page_size * row, d, KV_STRIDE_BITS, &p->kv.page));
    CHECK(check_stride("kv_row_stride", a->kv_row_stride, row, d, KV_STRIDE_BITS, &p->kv.row));
    CHECK(check_stride("kv_head_stride", a->kv_head_stride, d, d, KV_STRIDE_BITS, &p->kv.head));
    CHECK(check_reach("total_q", a->total_q, p->q_row, "q_row_stride"));
    CHECK(check_reach("total_q", a->total_q, heads * d, "num_q_heads * head_dim"));
    return check_reach("num_q_heads", heads, p->q_head, "q_head_stride");
}

static kseal_status check_sizes(const args_t *a, struct problem *p, bool *empty) {
    CHECK(check_count("batch_size", a->batch_size));
    CHECK(check_count("total_q", a->total_q));
    CHECK(check_count("total_pages", a->total_pages));
    CHECK(kseal_check_not_negative(OP, "num_pages", a->num_pages));
    *empty = a->batch_size == 0 || a->total_q == 0;
    if (*empty)
        return KSEAL_OK;
    CHECK(kseal_check_positive_scale(OP, "sm_scale", a->sm_scale));
    CHECK(check_heads(a, p));
    CHECK(check_choices(a, p));
    CHECK(check_pages(a));
    return check_strides(a, p);
}

static kseal_status check_lengths(const args_t *a) {
    const int32_t *indptr = a->page_indptr, *lens = a->kv_lens;
    for (int64_t i = 0; i < a->batch_size; i++) {
        int64_t entries = length(indptr, i);
        if (lens[i] < 0 || lens[i] > entries * a->page_size)
            REFUSE(KSEAL_INVALID_ARGUMENT, "kv_lens[%lld] is %d; with %lld pages of %d, 0 to %lld are supported", (long long)i,
                   lens[i], (long long)entries, a->page_size, (long long)(entries * a->page_size));
    }
    return KSEAL_OK;
}

static kseal_status check_planned(const args_t *a) {
    CHECK(check_pointer("qo_indptr", a->qo_indptr, LIMIT(ALIGN_QO_INDPTR), true));
    CHECK(check_pointer("page_indptr", a->page_indptr, LIMIT(ALIGN_PAGE_INDPTR), true));
    CHECK(check_pointer("kv_lens", a->kv_lens, LIMIT(ALIGN_KV_LENS), true));
    CHECK(check_pointer("plan", a->plan, LIMIT(ALIGN_PLAN), false));
    CHECK(check_indptr("qo_indptr", a->qo_indptr, a->batch_size, "total_q", a->total_q));
    CHECK(check_indptr("page_indptr", a->page_indptr, a->batch_size, "total_pages", a->total_pages));
    return check_lengths(a);
}

static int64_t pages_of(const struct problem *p, int64_t i) {
    const int32_t *lens = p->args->kv_lens;
    return div_up(lens[i], p->page_size);
}

static const int32_t *keys_of(const struct problem *p, int array, int64_t *count) {
    const args_t *a = p->args;
    *count = array == KV_LENS ? a->batch_size : a->batch_size + 1;
    return array == KV_LENS ? a->kv_lens : a->page_indptr;
}

static struct paged_kv kv_of(const struct problem *p, const struct head *head) {
    const args_t *a = p->args;
    return (struct paged_kv){
        .page_size = divisor_of((uint32_t)a->page_size),
        .num_heads = (uint32_t)a->num_kv_heads,
        .head_dim = (uint32_t)p->head_dim,
        .batch_size = (uint32_t)a->batch_size,
        .k = p->kv,
        .v = p->kv,
        .k_data = a->k,
        .v_data = a->v,
        .indices = a->page_indices,
        .indptr = in_plan(a, head, PAGE_INDPTR),
    };
}

static struct params params_of(const struct problem *p, const struct head *head) {
    const args_t *a = p->args;
    return (struct params){
        .q = a->q,
        .kv = kv_of(p, head),
        .q_indptr = in_plan(a, head, Q_INDPTR),
        .kv_lens = in_plan(a, head, KV_LENS),
        .o = tiles_o(a, head),
        .lse = tiles_lse(a, head),
        .group_size = divisor_of((uint32_t)p->group_size),
        .sm_scale = a->sm_scale,
        .num_q_heads = (uint32_t)a->num_q_heads,
        .q_row = p->q_row,
        .q_head = p->q_head,
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

kseal_status kseal_paged_prefill_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return measure_workspace(handle, args, bytes);
}

kseal_status kseal_paged_prefill_launch_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return measure_plan(handle, args, bytes);
}

kseal_status kseal_paged_prefill_launch_make_plan(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    return make_plan(handle, args, bytes);
}

kseal_status kseal_paged_prefill_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    struct head head;
    bool empty;
    CHECK(check_sizes(args, &p, &empty));
    if (empty)
        return KSEAL_OK;
    CHECK(read_head(&p, &head));
    CHECK(check_pointers(args, &head, args->num_pages > 0));
    CHECK(check_pointer("page_indices", args->page_indices, LIMIT(ALIGN_PAGE_INDICES), args->total_pages > 0));
    CHECK(kseal_handle_check_device(handle));
    const struct params params = params_of(&p, &head);
    return launch(handle, &params, &p, &head);
}
