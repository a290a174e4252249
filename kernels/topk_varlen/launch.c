/* Top-k of a decode step: from kseal_topk_varlen_args to the launch of upstream's SinglePassMultiCTARadixTopKKernel. */
#include "kernseal_ops.h"

#define OP "topk_varlen"
#include "list.h"
#include "topk_regions/rows.h"

#define LIMIT(name) KSEAL_TOPK_VARLEN_LIMIT_##name
#define ROWS_END ((int64_t)1 << 30) /* a block's next row is int32 */
#define LENGTH_BITS 31              /* indices are int32 */
#define LOAD_BYTES 32
#define FIXED_SMEM 2304      /* a histogram, its sums and a few numbers; the scores of a chunk follow */
#define STATE_BYTES (770 * 4) /* three histograms and two counters of a group */
#define SMALLEST_CHUNK 8192  /* of a row that is spread over idle multiprocessors */
#define HALVED_CHUNK 32768   /* smallest that a row is halved into */

typedef kseal_topk_varlen_args args_t;

/* How rows are spread. */
struct split {
    int64_t chunk;  /* scores that one thread block holds */
    int64_t ctas;   /* that share a row */
    int64_t groups; /* of them, each of which takes one row after the other */
};

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    bool values;
    int64_t elem_bytes, max_chunk, sm_count;
    int64_t rows, row_stride;
    struct split split;
    uint64_t semaphores_bytes;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    int64_t elem_bytes = axes[KSEAL_TOPK_VARLEN_AXIS_DTYPE] == KSEAL_DTYPE_F32 ? 4 : 2;
    int64_t smem = kseal_topk_varlen_classes[handle->variant->class_index].smem_per_block;
    return (struct problem){
        .args = a,
        .values = axes[KSEAL_TOPK_VARLEN_AXIS_VALUES] != 0,
        .elem_bytes = elem_bytes,
        .max_chunk = round_down((smem - FIXED_SMEM) / elem_bytes, LOAD_BYTES / elem_bytes),
        .sm_count = handle->sm_count,
    };
}

static kseal_status check_sizes(const args_t *a, struct problem *p) {
    CHECK(kseal_check_positive(OP, "top_k", a->top_k));
    CHECK(kseal_check_positive(OP, "next_n", a->next_n));
    CHECK(kseal_check_positive(OP, "compress_ratio", a->compress_ratio));
    CHECK(kseal_check_positive(OP, "max_len", a->max_len));
    if (!product_below(ROWS_END, a->num_requests, a->next_n, 1))
        REFUSE(KSEAL_OVERFLOW, "num_requests is %lld; num_requests * next_n must be below 2^30 (next_n is %d)",
               (long long)a->num_requests, a->next_n);
    CHECK(kseal_check_below(OP, "max_len", a->max_len, LENGTH_BITS));
    p->rows = a->num_requests * a->next_n;
    return check_stride("row_stride", a->row_stride, "max_len", a->max_len, p->rows, p->elem_bytes, &p->row_stride);
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const char *no_values = p->values ? NULL : "config.values is 0";
    uint32_t elem = (uint32_t)p->elem_bytes;
    const struct kseal_pointer pointers[] = {
        {"scores", a->scores, elem, KSEAL_NEEDED, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), KSEAL_NEEDED, NULL},
        {"indices", a->indices, LIMIT(ALIGN_INDICES), KSEAL_NEEDED, NULL},
        {"values", a->values, elem, p->values ? KSEAL_NEEDED : KSEAL_UNWANTED, no_values},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), p->semaphores_bytes > 0 ? KSEAL_NEEDED : KSEAL_OPTIONAL, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* ---- how rows are spread, as upstream's _radix_get_chunk_config does it ---- */

/* As few blocks a row as can hold it. */
static int64_t fullest_chunk(const struct problem *p) {
    int64_t len = p->args->max_len, ctas = div_up(len, p->max_chunk);
    return at_most(round_up(div_up(len, ctas), LOAD_BYTES / p->elem_bytes), p->max_chunk);
}

/* A power of two that spreads a row over `share` multiprocessors or fewer. */
static int64_t spread_chunk(const struct problem *p, int64_t share) {
    int64_t len = p->args->max_len, chunk = at_least(div_up(len, share), SMALLEST_CHUNK), power = 1;
    if (div_up(len, chunk) == 2 && chunk < HALVED_CHUNK)
        chunk = len;
    while (power < chunk)
        power *= 2;
    while (power > p->max_chunk)
        power /= 2;
    return power;
}

static struct split split_of(const struct problem *p) {
    int64_t share = p->sm_count / p->rows;
    int64_t chunk = share <= 1 ? fullest_chunk(p) : spread_chunk(p, share);
    int64_t ctas = div_up(p->args->max_len, chunk);
    return (struct split){chunk, ctas, at_most(p->sm_count / ctas, p->rows)};
}

static kseal_status check_split(const struct problem *p) {
    const args_t *a = p->args;
    return check_groups("num_requests", a->num_requests, p->rows, a->max_len, p->split.groups, p->split.ctas, p->sm_count);
}

/* A batch of none needs nothing. */
static kseal_status plan(const args_t *a, struct problem *p) {
    CHECK(kseal_check_not_negative(OP, "num_requests", a->num_requests));
    if (a->num_requests == 0)
        return KSEAL_OK;
    CHECK(check_sizes(a, p));
    p->split = split_of(p);
    p->semaphores_bytes = p->split.ctas > 1 ? (uint64_t)(p->split.groups * STATE_BYTES) : 0;
    return check_split(p);
}

kseal_status kseal_topk_varlen_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p));
    *bytes = 0;
    return KSEAL_OK;
}

kseal_status kseal_topk_varlen_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p));
    *bytes = p.semaphores_bytes;
    return KSEAL_OK;
}

/* ---- the launch ---- */

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    int32_t rows = (int32_t)p->rows, chunk = (int32_t)p->split.chunk, ctas = (int32_t)p->split.ctas;
    int32_t groups = (int32_t)p->split.groups;
    struct matrix scores = {a.scores, {rows, (int32_t)a.max_len}, p->row_stride};
    struct vector states = {a.semaphores, groups}, seq_lens = {a.seq_lens, (int32_t)a.num_requests};
    struct matrix indices = {a.indices, {rows, a.top_k}, a.top_k}, values = {a.values, {rows, a.top_k}, a.top_k};
    struct list list = {.count = 0};
    add(&list, &scores);
    add(&list, &states);
    add(&list, &seq_lens);
    add(&list, &indices);
    add_if(&list, p->values, &values);
    add(&list, &a.top_k);
    add(&list, &a.next_n);
    add(&list, &a.compress_ratio);
    add(&list, &chunk);
    add(&list, &ctas);
    add(&list, &groups);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

kseal_status kseal_topk_varlen_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p));
    if (args->num_requests == 0)
        return KSEAL_OK;
    CHECK(check_pointers(args, &p));
    CHECK(kseal_check_room(OP, "semaphores_bytes", args->semaphores_bytes, p.semaphores_bytes));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
