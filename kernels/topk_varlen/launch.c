/* Top-k of a decode step: from kseal_topk_varlen_args to the launch of upstream's SinglePassMultiCTARadixTopKKernel. */
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_TOPK_VARLEN_LIMIT_##name
#define ROWS_END ((int64_t)1 << 30)     /* a block's next row is int32 */
#define LENGTH_END ((int64_t)1 << 31)   /* indices are int32 */
#define ARRIVALS_END ((int64_t)1 << 31) /* a group counts the arrivals of its blocks as int32 */
#define ADDRESS_END ((int64_t)1 << 57)  /* bytes that an address can reach */
#define LOAD_BYTES 32
#define FIXED_SMEM 2304      /* a histogram, its sums and a few numbers; the scores of a chunk follow */
#define STATE_BYTES (770 * 4) /* three histograms and two counters of a group */
#define BARRIERS_PER_ROW 7   /* one before a row, one a round of 8 bits, one while it is written and one after it */
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

#define REFUSE(status, ...) return kseal_fail(status, "topk_varlen: " __VA_ARGS__)

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t div_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
static int64_t round_up(int64_t value, int64_t unit) { return div_up(value, unit) * unit; }
static int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }

/* Whether a * b, neither negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && product < end;
}

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

static kseal_status check_requests(const args_t *a) {
    if (a->num_requests < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_requests is %lld; it must not be negative", (long long)a->num_requests);
    return KSEAL_OK;
}

static kseal_status check_positive(const char *name, int64_t value) {
    if (value <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be positive", name, (long long)value);
    return KSEAL_OK;
}

static kseal_status check_sizes(const args_t *a, struct problem *p) {
    kseal_status status = check_positive("top_k", a->top_k);
    if (status == KSEAL_OK)
        status = check_positive("next_n", a->next_n);
    if (status == KSEAL_OK)
        status = check_positive("compress_ratio", a->compress_ratio);
    if (status == KSEAL_OK)
        status = check_positive("max_len", a->max_len);
    if (status != KSEAL_OK)
        return status;
    if (!product_below(ROWS_END, a->num_requests, a->next_n))
        REFUSE(KSEAL_OVERFLOW, "num_requests is %lld; num_requests * next_n must be below 2^30 (next_n is %d)",
               (long long)a->num_requests, a->next_n);
    if (a->max_len >= LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "max_len is %lld; it must be below 2^31", (long long)a->max_len);
    p->rows = a->num_requests * a->next_n;
    p->row_stride = a->row_stride != 0 ? a->row_stride : a->max_len;
    if (p->row_stride < a->max_len)
        REFUSE(KSEAL_INVALID_ARGUMENT, "row_stride is %lld; it must be 0 or at least max_len, %lld", (long long)a->row_stride,
               (long long)a->max_len);
    if (!product_below(ADDRESS_END / p->elem_bytes, p->row_stride, p->rows))
        REFUSE(KSEAL_OVERFLOW, "row_stride is %lld; %lld rows must end below 2^57 bytes", (long long)a->row_stride,
               (long long)p->rows);
    return KSEAL_OK;
}

enum presence { UNWANTED, OPTIONAL, NEEDED };

struct pointer {
    const char *name;
    const void *value;
    int64_t align;
    enum presence presence;
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->presence == NEEDED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed", p->name);
    if (p->value != NULL && p->presence == UNWANTED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since config.values is 0", p->name, p->value);
    if ((uintptr_t)p->value % (uintptr_t)p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %lld bytes", p->name, p->value, (long long)p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const struct pointer pointers[] = {
        {"scores", a->scores, p->elem_bytes, NEEDED},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), NEEDED},
        {"indices", a->indices, LIMIT(ALIGN_INDICES), NEEDED},
        {"values", a->values, p->elem_bytes, p->values ? NEEDED : UNWANTED},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), p->semaphores_bytes > 0 ? NEEDED : OPTIONAL},
    };
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        kseal_status status = check_pointer(&pointers[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

static kseal_status check_semaphores(const args_t *a, const struct problem *p) {
    if (a->semaphores_bytes < p->semaphores_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "semaphores_bytes is %llu; %llu are needed", (unsigned long long)a->semaphores_bytes,
               (unsigned long long)p->semaphores_bytes);
    return KSEAL_OK;
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
    const struct split *s = &p->split;
    if (s->ctas > p->sm_count)
        REFUSE(KSEAL_OVERFLOW, "max_len is %lld; it needs %lld thread blocks at once, up to %lld are supported on this device",
               (long long)p->args->max_len, (long long)s->ctas, (long long)p->sm_count);
    if (s->ctas > 1 && !product_below(ARRIVALS_END, div_up(p->rows, s->groups) * BARRIERS_PER_ROW + 1, s->ctas))
        REFUSE(KSEAL_OVERFLOW, "num_requests is %lld; groups of %lld thread blocks can take %lld rows in turn (max_len is %lld)",
               (long long)p->args->num_requests, (long long)s->ctas,
               (long long)(((ARRIVALS_END - 1) / s->ctas - 1) / BARRIERS_PER_ROW * s->groups), (long long)p->args->max_len);
    return KSEAL_OK;
}

static kseal_status plan(const args_t *a, struct problem *p) {
    kseal_status status = check_sizes(a, p);
    if (status != KSEAL_OK)
        return status;
    p->split = split_of(p);
    p->semaphores_bytes = p->split.ctas > 1 ? (uint64_t)(p->split.groups * STATE_BYTES) : 0;
    return check_split(p);
}

/* Plans for the sizes; a batch of none needs nothing. */
static kseal_status plan_sizes(const struct kseal_handle *handle, const args_t *args, struct problem *p) {
    *p = problem_of(handle, args);
    kseal_status status = check_requests(args);
    return status != KSEAL_OK || args->num_requests == 0 ? status : plan(args, p);
}

kseal_status kseal_topk_varlen_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_sizes(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = 0;
    return status;
}

kseal_status kseal_topk_varlen_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_sizes(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.semaphores_bytes;
    return status;
}

/* ---- the launch ---- */

/* Tensors as CuTe passes them: the base, then the extents and strides that are not compiled in. */
struct vector {
    const void *data;
    int32_t size;
};
struct matrix {
    const void *data;
    int32_t shape[2];
    int64_t stride;
};

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    int32_t rows = (int32_t)p->rows, chunk = (int32_t)p->split.chunk, ctas = (int32_t)p->split.ctas;
    int32_t groups = (int32_t)p->split.groups;
    struct matrix scores = {a.scores, {rows, (int32_t)a.max_len}, p->row_stride};
    struct vector states = {a.semaphores, groups}, seq_lens = {a.seq_lens, (int32_t)a.num_requests};
    struct matrix indices = {a.indices, {rows, a.top_k}, a.top_k}, values = {a.values, {rows, a.top_k}, a.top_k};
    void *list[13], **end = list;
    *end++ = &scores;
    *end++ = &states;
    *end++ = &seq_lens;
    *end++ = &indices;
    /* An argument that this variant was compiled without is not in its list at all. */
    if (p->values)
        *end++ = &values;
    *end++ = &a.top_k;
    *end++ = &a.next_n;
    *end++ = &a.compress_ratio;
    *end++ = &chunk;
    *end++ = &ctas;
    *end++ = &groups;
    *end++ = &a.stream;
    return kseal_handle_launch(handle, list, (int32_t)(end - list));
}

kseal_status kseal_topk_varlen_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    kseal_status status = check_requests(args);
    if (status != KSEAL_OK || args->num_requests == 0)
        return status;
    status = plan(args, &p);
    if (status == KSEAL_OK)
        status = check_pointers(args, &p);
    if (status == KSEAL_OK)
        status = check_semaphores(args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    return status == KSEAL_OK ? launch(handle, &p) : status;
}
